#!/usr/bin/env bash
# A few of the kills of tools/kill_test.sh; all twenty in the long set.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../tools/kill_test.sh" "$1" $([ -n "${LOCKSTEP_NIGHTLY:-}" ] && echo 20 || echo 4)
