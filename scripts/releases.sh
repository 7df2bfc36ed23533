#!/usr/bin/env bash
# Tries hpctrain with every dependency at its newest release, or at the oldest that setup.py allows, in an environment of
# its own: unit tests, contract tests and a choice of tests that start ranks. Without Horovod and parallel h5py.
#
#   make newest                        # with PYTHON, or the Python of .venv
#   make oldest                        # with PYTHON, or python3.10
#   bash scripts/releases.sh newest -- tests/unit/comm      # what pytest runs instead, always without the mark `thorough`
#
# Downloads torch for GPUs from PyPI, 3 GB, unless pip's settings name another place. RELEASES_IN: where the
# environments are (default: build/releases).
set -euo pipefail

say() { printf '==> %s\n' "$*"; }
fail() { printf 'releases: %s\n' "$*" >&2; exit 2; }

cd "$(dirname "${BASH_SOURCE[0]}")/.."
which=${1:-}
shift || true
[[ ${1:-} != -- ]] || shift
case $which in
  newest) python=${PYTHON:-${VIRTUAL_ENV:-.venv}/bin/python} ;;
  oldest) python=${PYTHON:-python3.10} ;;
  *) fail "newest or oldest, and perhaps -- and what pytest runs" ;;
esac
command -v "$python" >/dev/null || fail "$python is missing: set PYTHON"
place=$(realpath -m "${RELEASES_IN:-build/releases}/$which")
tests=("$@")
((${#tests[@]})) || tests=(tests/unit tests/contract tests/ranks/comm tests/ranks/distributed/test_c10d.py tests/ranks/parallel/test_zero.py
  tests/ranks/checkpoint/test_save.py tests/ranks/train/test_training.py)

pip() { "$place/bin/python" -m pip --disable-pip-version-check install -q "$@"; }
if [[ ! -e $place/made ]]; then
  say "an environment in $place ($("$python" -V))"
  rm -rf "$place"
  "$python" -m venv "$place"
  pip setuptools wheel uv
  if [[ $which == newest ]]; then
    # The names that are pinned, without their versions.
    cat requirements/runtime.txt requirements/test.txt | sed -nE 's/^([A-Za-z0-9_.-]+)==[^;]*(;.*)?$/\1\2/p' | sort -u > "$place/names"
    pip -r "$place/names" h5py hdf5plugin
  else
    extras=$(sed -nE '/extras_require/,/^    \}/ s/^ *"([a-z]+)": \[.*/\1/p' setup.py | grep -vxE 'horovod|test' | paste -sd,)
    echo "setuptools<69" > "$place/builds"  # newer ones cannot build old releases
    "$place/bin/python" -m uv pip install -q --build-constraints "$place/builds" --python "$place/bin/python" --resolution lowest-direct --no-build-isolation-package hpctrain ".[$extras]"
    "$place/bin/python" -m pip uninstall -q -y hpctrain
    # The tools of the tests as they are pinned, with what is there.
    "$place/bin/python" -m pip freeze --disable-pip-version-check | grep '==' | grep -v '^pytest==' > "$place/there"
    pip -c "$place/there" -r <(grep -E '^(pytest|hypothesis|expecttest|mfusepy|spython|tables)' requirements/test.txt)
  fi
  touch "$place/made"
fi
# Each time: the environment may be another checkout's, and what is compiled an earlier commit's.
pip --no-deps --no-build-isolation --editable .
"$place/bin/python" -m pip freeze --disable-pip-version-check | grep -iE '^(torch|numpy|h5py|mpi4py|pydantic|typer|xxhash)=='
# Old releases warn of what newer ones of others took back.
warnings=()
if [[ $which == oldest ]]; then warnings=(-W ignore::DeprecationWarning); fi
PATH=$place/bin:$PATH VIRTUAL_ENV=$place exec "$place/bin/python" -m pytest -q -m "not thorough" -p no:cacheprovider "${warnings[@]}" "${tests[@]}"
