#!/usr/bin/env bash
# Everything that a run on a GPU has to show, in one table: the device's tests, cuda_bench, and the
# rivals of tools/bench/*rivals*.py beside it. Each runs in the same minutes on the same card.
#
#   tools/h200.sh [-b BUILD] [-o FILE] [-t] [name ...]
#
#   -b BUILD  a build folder with LOCKSTEP_CUDA (default build-h200, made where it is not there)
#   -o FILE   where the table goes too (default BUILD/h200.txt)
#   -t        tests alone
#   name ...  entries of cuda_bench; without any, all of them
set -uo pipefail
cd "$(dirname "$0")/.."
build=build-h200
out=""
tests_alone=false
while getopts "b:o:t" option; do
  case $option in
    b) build=$OPTARG ;;
    o) out=$OPTARG ;;
    t) tests_alone=true ;;
    *) sed -n '2,11p' "$0"; exit 2 ;;
  esac
done
shift $((OPTIND - 1))
python=${LOCKSTEP_PYTHON:-python3}
out=${out:-$build/h200.txt}

if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; then
  echo "h200: there is no NVIDIA GPU on this machine" >&2
  exit 1
fi
if [ ! -e "$build/build.ninja" ]; then
  cmake -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DLOCKSTEP_CUDA=ON \
    -DCMAKE_CUDA_ARCHITECTURES=90a-real -DLOCKSTEP_PYTHON="$python" >/dev/null || exit 1
fi
# Always: the table names this commit.
cmake --build "$build" --target device_test kernels_test rollout_test sync_test train_test \
  recipe_test refit_device_test cuda_bench train_bench || exit 1

failed=0
report() {
  echo "commit $(git describe --always --dirty 2>/dev/null || echo unknown), $(date -u +%FT%TZ)"
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  echo
  echo "== tests"
  for test in "$build"/*_test; do
    [ -x "$test" ] || continue
    # Bodies over devices have a row named after each.
    "$test" --gtest_list_tests --gtest_filter='*/cuda*' 2>/dev/null | grep -q '^  ' || continue
    printf '%-24s ' "$(basename "$test")"
    if "$test" --gtest_filter='*/cuda*' --gtest_brief=1 >"$build/h200_test.log" 2>&1; then
      grep -E '^\[  PASSED' "$build/h200_test.log"
    else
      echo FAILED
      tail -n 40 "$build/h200_test.log"
      failed=1
    fi
  done
  $tests_alone && return
  echo
  echo "== benchmarks"
  "$build/cuda_bench" "$@" || failed=1
  echo
  echo "== rivals"
  for rival in tools/bench/*rivals*.py; do
    [ -e "$rival" ] || continue
    echo "-- $(basename "$rival" .py)"
    timeout 600 "$python" "$rival" 2>&1 || echo "$(basename "$rival"): did not run"
  done
}
# Not a pipe: what failed inside must be known out here.
report "$@" > >(tee "$out")
wait
exit $failed
