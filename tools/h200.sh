#!/usr/bin/env bash
# Everything that a run on a GPU has to show, in one table: the device's tests, cuda_bench with the
# rivals of tools/bench/*rivals*.py beside it, a step of the trainer, and how costs grow. All in the
# same minutes on the same card.
#
#   tools/h200.sh [-b BUILD] [-n] [-o FILE] [-t] [-s] [-y] [name ...]
#
#   -b BUILD  a build folder with LOCKSTEP_CUDA (default build-h200, made where it is not there)
#   -n        build nothing: BUILD was made elsewhere, say on a machine that has the libraries' headers;
#             the table names the commit that BUILD/commit has
#   -o FILE   where the table goes too (default BUILD/h200.txt)
#   -t        tests alone
#   -s        the tests under compute-sanitizer too: some minutes
#   -y        the study too: teaches recipes/long_sft.toml and compares recipes/studies/long_answers.toml;
#             hours. Interrupted, it goes on with the same command; its report is below runs/
#   name ...  entries of cuda_bench; without any, all of them
set -uo pipefail
cd "$(dirname "$0")/.."
build=build-h200
building=true
out=""
tests_alone=false
sanitize=false
study=false
while getopts "b:no:tsy" option; do
  case $option in
    b) build=$OPTARG ;;
    n) building=false ;;
    o) out=$OPTARG ;;
    t) tests_alone=true ;;
    s) sanitize=true ;;
    y) study=true ;;
    *) sed -n '2,16p' "$0"; exit 2 ;;
  esac
done
shift $((OPTIND - 1))
python=${LOCKSTEP_PYTHON:-python3}
out=${out:-$build/h200.txt}
programs=(device_test kernels_test rollout_test sync_test train_test recipe_test refit_device_test
  device_fault_test parity_test product_test cuda_bench train_bench step_bench lockstep)

if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; then
  echo "h200: there is no NVIDIA GPU on this machine" >&2
  exit 1
fi
if $building && [ ! -e "$build/build.ninja" ]; then
  cmake -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DLOCKSTEP_CUDA=ON \
    -DCMAKE_CUDA_ARCHITECTURES=90a-real -DLOCKSTEP_PYTHON="$python" >/dev/null || exit 1
fi
# Always where it builds: the table names this commit.
if $building; then
  cmake --build "$build" --target "${programs[@]/%lockstep/lockstep_cli}" || exit 1
fi
missing=""
for program in "${programs[@]}"; do
  [ -x "$build/$program" ] || missing+=" $program"
done
if [ -n "$missing" ]; then
  echo "h200: $build has no$missing: build them there, or leave out -n" >&2
  exit 1
fi
if ! { : >>"$out"; } 2>/dev/null; then
  echo "h200: $out cannot be written, where the table goes: give another file with -o" >&2
  exit 1
fi

failed=0
tests() {
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
}
benchmarks() {
  local names=("$@")
  # The laws have a section of their own.
  [ $# -gt 0 ] || mapfile -t names < <("$build/cuda_bench" --list | grep -v '^law_')
  "$build/cuda_bench" "${names[@]}" || failed=1
}
rivals() {
  for rival in tools/bench/*rivals*.py; do
    [ -e "$rival" ] || continue
    echo "-- $(basename "$rival" .py)"
    timeout 600 "$python" "$rival" 2>&1 || echo "$(basename "$rival"): did not run"
  done
}
# Laws that do not hold are told in the table and in docs/performance.md: no failure of the run.
laws() {
  "$build/cuda_bench" law >"$build/h200_laws.log" 2>&1
  local status=$?
  if [ $status != 0 ] && [ $status != 3 ]; then
    failed=1
    tail -n 20 "$build/h200_laws.log"
  fi
  grep -E '^(law|--)' "$build/h200_laws.log"
}
learn_and_compare() {
  export LOCKSTEP_HOME=$PWD
  [ -e runs/long_sft/model.safetensors ] || "$build/lockstep" sft recipes/long_sft.toml || return 1
  "$build/lockstep" compare recipes/studies/long_answers.toml
}
# Of the programs, not of the checkout where they were not made of it.
commit() {
  if $building; then
    git describe --always --dirty 2>/dev/null || echo unknown
  elif [ -s "$build/commit" ]; then
    cat "$build/commit"
  else
    echo "unknown (built elsewhere)"
  fi
}
report() {
  echo "commit $(commit), $(date -u +%FT%TZ)"
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  printf '\n== tests\n'
  tests
  if $sanitize; then
    printf '\n== tests under compute-sanitizer\n'
    tools/sanitize.sh -t "kernels_test rollout_test sync_test train_test" "$build" || failed=1
  fi
  $tests_alone && return
  printf '\n== benchmarks\n'
  benchmarks "$@"
  printf '\n== rivals\n'
  rivals
  if [ $# -eq 0 ]; then
    printf '\n== a step of the trainer\n'
    "$build/train_bench" --benchmark_filter=on_device || failed=1
    printf '\n== whole steps\n'
    "$build/step_bench" --benchmark_filter=whole_steps || failed=1
    printf '\n== how costs grow\n'
    laws
  fi
  if $study; then
    printf '\n== study\n'
    learn_and_compare || failed=1
  fi
}
# Not a pipe: what failed inside must be known out here.
report "$@" > >(tee "$out")
wait
exit $failed
