#!/usr/bin/env bash
# The tests of the device under compute-sanitizer, each in a process of its own and several at a
# time: one line a tool, and behind it whatever was found.
#
#   tools/sanitize.sh [-c LAUNCHES] [-f FILTER] [-j JOBS] [-l SECONDS] [-m SECONDS] [-t TESTS]
#                     BUILD [tool ...]
#
#   -c LAUNCHES  of kernels that are looked at, the first ones of each test (default: all)
#   -f FILTER    of tests, as --gtest_filter takes it (default '*/cuda*')
#   -j JOBS      processes at a time (default: the cores, 16 at most)
#   -l SECONDS   that a test may take under a tool (default 120); one that takes longer is told
#   -m SECONDS   that a tool may take (default 3600); what was not reached is told
#   -t TESTS     the test programs, in quotes (default kernels_test)
#   BUILD        a build folder with LOCKSTEP_CUDA
#   tool ...     of memcheck racecheck synccheck initcheck; without any, all of them
#
# racecheck wants a build with LOCKSTEP_RACECHECK: src/device/cuda/arrivals.h says why.
set -uo pipefail
jobs=$(nproc)
[ "$jobs" -gt 16 ] && jobs=16
limit=120
most=3600
tests=kernels_test
filter='*/cuda*'
launches=""
while getopts "c:f:j:l:m:t:" option; do
  case $option in
    c) launches="--launch-count $OPTARG" ;;
    f) filter=$OPTARG ;;
    j) jobs=$OPTARG ;;
    l) limit=$OPTARG ;;
    m) most=$OPTARG ;;
    t) tests=$OPTARG ;;
    *) sed -n '2,17p' "$0"; exit 2 ;;
  esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || { sed -n '2,17p' "$0"; exit 2; }
build=$1
shift
for number in "$jobs" "$limit" "$most"; do
  if ! [[ $number =~ ^[1-9][0-9]*$ ]]; then
    echo "sanitize: $number: jobs and seconds are whole numbers from 1" >&2
    exit 2
  fi
done
[ $# -gt 0 ] || set -- memcheck racecheck synccheck initcheck
for tool in "$@"; do
  case $tool in
    memcheck | racecheck | synccheck | initcheck) ;;
    *)
      echo "sanitize: $tool is no tool: memcheck, racecheck, synccheck or initcheck" >&2
      exit 2
      ;;
  esac
done

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
if [ -z "$sanitizer" ]; then
  echo "sanitize: compute-sanitizer is not on the PATH, nor in /usr/local/cuda/bin: install the CUDA toolkit" >&2
  exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for test in $tests; do
  if [ ! -x "$build/$test" ]; then
    echo "sanitize: $build has no $test: build it, or name other tests with -t" >&2
    exit 1
  fi
  "$build/$test" --gtest_list_tests --gtest_filter="$filter" 2>/dev/null |
    awk -v p="$test" '/^[^ ]/ { s = $1 } /^ / { print p, s $1 }'
done >"$work/list"
if [ ! -s "$work/list" ]; then
  echo "sanitize: $build has no tests of a CUDA device that run here" >&2
  exit 1
fi

# A test that lets a call fail on purpose is no finding, hence no API errors.
one() {
  local log=$work/$tool.$1.${2//\//_}
  local options="--report-api-errors no"
  [ "$tool" = memcheck ] || options=""
  options="$options $launches"
  timeout "$limit" "$sanitizer" --tool "$tool" $options --error-exitcode 77 \
    "$build/$1" --gtest_brief=1 --gtest_filter="$2" >"$log" 2>&1
  case $? in
    0) echo "clean" ;;
    77) echo "FOUND $1 $2 $log" ;;
    124 | 137) echo "LATE $1 $2" ;;
    *) echo "FAILED $1 $2 $log" ;;
  esac
}
export -f one
export work limit sanitizer build tool launches

failed=0
for tool in "$@"; do
  if [ "$tool" = racecheck ] &&
    ! grep -qs '^LOCKSTEP_RACECHECK:BOOL=ON' "$build/CMakeCache.txt"; then
    echo "sanitize: $build is no build with LOCKSTEP_RACECHECK: what warps hand on by barriers in" \
      "shared memory racecheck will take for races" >&2
  fi
  begin=$SECONDS
  timeout "$most" xargs -a "$work/list" -P "$jobs" -L 1 bash -c 'one "$@"' _ >"$work/$tool"
  clean=$(grep -c '^clean' "$work/$tool")
  all=$(wc -l <"$work/list")
  printf '%-10s %d of %d tests clean, %d late, %d not reached, %d s\n' "$tool" "$clean" "$all" \
    "$(grep -c '^LATE' "$work/$tool")" $((all - $(wc -l <"$work/$tool"))) $((SECONDS - begin))
  [ "$clean" = "$all" ] || failed=1
  grep -v '^clean' "$work/$tool" | sort | while read -r verdict test name log; do
    echo "  $verdict $test $name"
    if [ -n "$log" ]; then
      grep -E '^=========' "$log" | grep -v 'COMPUTE-SANITIZER\|Host Frame\|Saved host' |
        sort | uniq -c | sort -rn | head -n 8 | sed 's/^/    /'
      [ "$verdict" = FAILED ] && tail -n 5 "$log" | sed 's/^/    /'
    fi
  done
done
exit $failed
