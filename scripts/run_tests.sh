#!/usr/bin/env bash
# What `make test` runs: lint and all tests, in three streams, two of them at the same time.
#
#   bash scripts/run_tests.sh BIN      BIN: the folder of python, ruff and mypy
#
# Many tests start ranks, daemons or a cluster, and share the cores with the other stream. A test that fails there runs up to
# twice more, alone; the run is red when it fails each time, and says which tests passed only then. More than ten that fail
# are a fault of the code, so nothing is repeated.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
bin=${1:?usage: bash scripts/run_tests.sh BIN}
reports=build/tests
mkdir -p "$reports"

# How a process of low priority is started; without chrt (util-linux) as any other.
idle=()
if command -v chrt >/dev/null && chrt -i 0 true 2>/dev/null; then idle=(chrt -i 0); fi

# What runs at idle priority besides tests/unit, tests/gpu and tests/contract: tests of files alone, and of ranks that only compare
# numbers, so that it does not matter how fast they run.
patient=(tests/faults/checkpoint/test_crashes.py tests/ranks/data tests/ranks/comm/test_large_buffers.py)
for each in tests/ranks/reduce/test_*.py; do [[ $each == */test_autotune.py ]] || patient+=("$each"); done
for each in engines load replicas reshape save; do patient+=("tests/ranks/checkpoint/test_$each.py"); done
for each in check_gpu examples sync_batch_norm training; do patient+=("tests/ranks/train/test_$each.py"); done

unit=("${patient[@]}" tests/unit tests/gpu tests/contract -m "not timing and not thorough")
timing=(tests/unit tests/contract -m timing)
ranks=(tests/ranks tests/faults tests/cluster "${patient[@]/#/--ignore=}" -m "not thorough")

# run STREAM ARGUMENT...: pytest, which notes the stream's failures in a folder of its own.
run() { local stream=$1; shift; "$bin"python -m pytest -o cache_dir="$reports/$stream" "$@"; }

rm -rf "${reports:?}"/*
"${idle[@]}" make --no-print-directory lint >"$reports/lint.log" 2>&1 &
lint_process=$!
(
  [[ ${#idle[@]} == 0 ]] || chrt -i -p 0 "$BASHPID" >/dev/null
  exec "$bin"python -m pytest -o cache_dir="$reports/unit" "${unit[@]}" -n 2 --dist loadfile --no-loadscope-reorder --durations=10
) >"$reports/unit.log" 2>&1 &
unit_process=$!
trap 'kill "$lint_process" "$unit_process" 2>/dev/null; exit 130' INT TERM

declare -A code
run timing "${timing[@]}" -n 4
code[timing]=$?
run ranks "${ranks[@]}" --durations=10
code[ranks]=$?
wait "$lint_process"
lint=$?
cat "$reports/lint.log"
wait "$unit_process"
code[unit]=$?
cat "$reports/unit.log"

# failed STREAM: the tests that failed in it, a line each.
failed() { "$bin"python -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "$reports/$1/v/cache/lastfailed"; }

worst=$lint
for stream in timing ranks unit; do
  # 1: tests failed; anything else is an error of the run itself.
  if [[ ${code[$stream]} == 1 ]]; then
    mapfile -t names < <(failed "$stream")
    if ((${#names[@]} <= 10)); then
      declare -n arguments=$stream
      for again in 1 2; do
        echo "==> $(failed "$stream" | wc -l) of the stream '$stream' failed and run again, alone ($again of 2)"
        run "$stream" "${arguments[@]}" --last-failed --last-failed-no-failures none
        code[$stream]=$?
        [[ ${code[$stream]} == 1 ]] || break
      done
      [[ ${code[$stream]} != 0 ]] || printf '==> failed at first, passed alone: %s\n' "${names[@]}"
    fi
  fi
  ((worst = worst || code[$stream]))
done
exit "$worst"
