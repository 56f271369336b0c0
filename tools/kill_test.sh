#!/usr/bin/env bash
# kill_test.sh BUILD [KILLS]: kills a run with SIGKILL at random moments, gives the same command
# again each time, and requires that metrics (timings aside) and final weights equal those of a run
# that nobody killed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
program=$(realpath "$1")/lockstep
kills=${2:-20}
export LOCKSTEP_HOME=$here
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
command=("$program" train "$here/recipes/demo.toml" arm=trace schedule.steps=6 schedule.prompts=4
  schedule.samples=4 schedule.save_every=1 schedule.keep=1 schedule.rescore_every=2
  device=cpu trainer.lr=1e-3
  store.ram="64 KiB")  # less than a step records, so that the disk has a part

same() {
  python3 - "$work/whole/metrics.jsonl" "$1/metrics.jsonl" <<'PY'
import json, sys

CLOCK = ("timing_s/", "perf/")

def lines(path):
    for line in open(path):
        yield {k: v for k, v in json.loads(line).items() if not k.startswith(CLOCK)}

whole, killed = (list(lines(p)) for p in sys.argv[1:])
assert len(whole) == len(killed) > 0, f"{len(killed)} steps, not {len(whole)}"
for a, b in zip(whole, killed):
    assert a == b, f"step {a['step']}: " + ", ".join(k for k in a if a[k] != b.get(k))
PY
  for file in model.safetensors training_state/trainer_state.bin; do
    cmp "$work/whole/checkpoints/step_6/$file" "$1/checkpoints/step_6/$file"
  done
}

begin=$EPOCHREALTIME
"${command[@]}" --run "$work/whole" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
took=$(awk "BEGIN { print $EPOCHREALTIME - $begin }")
done=0 runs=0
while [ $done -lt "$kills" ]; do
  runs=$((runs + 1))
  run=$work/killed_$runs
  while :; do
    "${command[@]}" --run "$run" >"$work/log" 2>&1 &
    pid=$!
    sleep "$(awk "BEGIN { srand($RANDOM * 32768 + $RANDOM); print rand() * $took }")"
    if [ $done -lt "$kills" ] && kill -9 $pid 2>/dev/null; then
      done=$((done + 1))
      wait $pid 2>/dev/null || :
    else
      wait $pid || { cat "$work/log"; exit 1; }
      took=$(awk "BEGIN { print $took * 0.7 }")  # the machine is less busy than it was
      break
    fi
  done
  same "$run"
  echo "run $runs equals the uninterrupted one after $done kills"
  rm -rf "$run"
done
