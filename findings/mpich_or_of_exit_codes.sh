#!/bin/bash
# MPICH: mpiexec's exit code is the bitwise or of how all processes ended, so it may be that of none of them.
#
# Hydra (mpiexec of MPICH) combines the wait statuses of all processes of a node bit by bit, and of all nodes as well. Two
# programs that exit with 4 and 3 give 7. A rank that is ended by SIGBUS (7), after which Hydra kills the others (SIGKILL,
# 9), gives 15, with the words "Terminated (signal 15)", though nothing has sent SIGTERM. So a batch script cannot conclude
# from the number what has happened, and the process that the message names need not be the one that ended first.
#
# Seen with mpich 5.0.2 from PyPI, on Linux:
#   exit codes 4 and 3: mpiexec ends with 7
#   exit codes 3 and 3: mpiexec ends with 3
# Exits with 1 if that is no longer so.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "mpich==5.0.2"
code() {
  local code=0
  "$work/venv/bin/mpiexec.hydra" -launcher fork -n 1 sh -c "sleep 1; exit $1" : -n 1 sh -c "sleep 1; exit $2" >/dev/null 2>&1 || code=$?
  echo "exit codes $1 and $2: mpiexec ends with $code" >&2
  echo "$code"
}
different=$(code 4 3)
same=$(code 3 3)
[[ $different == 7 && $same == 3 ]]
