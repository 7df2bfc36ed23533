#!/usr/bin/env bash
# Sets up everything hpctrain needs, without a question asked.
#
#   make setup              # laptop or plain Debian: system packages, .venv, Horovod, parallel h5py
#   MPICC=... HDF5_DIR=... make setup     # cluster: the site's own MPI and HDF5, no package manager
#   source site-env/bin/activate; make setup   # into the environment that is already active
#
# Variables read:
#   PYTHON               interpreter for a new .venv                (default: python3)
#   VENV                 where the environment is made              (default: .venv)
#   MPICC                the site's MPI compiler wrapper; set = never call a package manager
#   HDF5_DIR             prefix of a parallel HDF5;       set = never call a package manager
#   HPCTRAIN_CACHE       built wheels live here  (default: $XDG_CACHE_HOME/hpctrain or ~/.cache/hpctrain)
#   HPCTRAIN_WITHOUT     words from "horovod h5py": skip that build; hpctrain falls back and says so
#   HOROVOD_CUDA_HOME, HOROVOD_NCCL_HOME   where CUDA and NCCL are, if not in the usual places
set -euo pipefail
cd "$(dirname "$0")/.."

HOROVOD_VERSION=0.28.1
H5PY_VERSION=3.16.0
RECIPE=1            # raise it when the way the wheels are built changes: old cached ones are then not used
CACHE=${HPCTRAIN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hpctrain}
WITHOUT=" ${HPCTRAIN_WITHOUT:-} "
JOBS=$(nproc 2>/dev/null || echo 2)

say()  { printf '\033[1m==>\033[0m %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# An environment that the user has active is the site's choice; so is a compiler wrapper or an HDF5 prefix.
ACTIVE=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
SITE=no
if [[ -n ${MPICC:-} || -n ${HDF5_DIR:-} ]]; then SITE=yes; fi
if [[ -n $ACTIVE && $(realpath -m "$ACTIVE") != $(realpath -m "${VENV:-.venv}") ]]; then SITE=yes; else ACTIVE=; fi

# ---------------------------------------------------------------- system packages
have_hdf5() {
  [[ -n ${HDF5_DIR:-} && -e $HDF5_DIR/include/H5pubconf.h ]] && return 0
  pkg-config --exists hdf5-openmpi 2>/dev/null || [[ -d /usr/lib/$(uname -m)-linux-gnu/hdf5/openmpi ]]
}
python_of_system() { "${PYTHON:-python3}" "$@"; }

missing=()
command -v g++     >/dev/null || missing+=(g++)
command -v make    >/dev/null || missing+=(make)
command -v "${MPICC:-mpicc}" >/dev/null || missing+=(libopenmpi-dev)
command -v mpirun  >/dev/null || command -v srun >/dev/null || missing+=(openmpi-bin)
command -v h5dump  >/dev/null || [[ $SITE == yes ]] || missing+=(hdf5-tools)
if [[ $WITHOUT != *" h5py "* ]]; then
  have_hdf5 || missing+=(libhdf5-openmpi-dev)
fi
if [[ -z $ACTIVE ]]; then
  if python_of_system -c '' 2>/dev/null; then
    python_of_system -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
    python_of_system -c 'import sysconfig,os,sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"],"Python.h")))' \
      || missing+=(python3-dev)
  else
    missing+=(python3 python3-venv python3-dev)
  fi
fi

if ((${#missing[@]})); then
  sudo=
  [[ $(id -u) == 0 ]] || sudo="sudo -n"
  if [[ $SITE == yes ]]; then
    fail "not found: ${missing[*]} (Debian names). Load the site's modules (MPI, parallel HDF5, compiler), or set MPICC and HDF5_DIR; no package manager is called on a site."
  elif command -v apt-get >/dev/null && { [[ -z $sudo ]] || $sudo true 2>/dev/null; }; then
    say "system packages: ${missing[*]}"
    $sudo apt-get update -qq
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    fail "not found, and this user may not install it. Ask for: apt-get install ${missing[*]}"
  fi
fi

# ---------------------------------------------------------------- python environment
if [[ -n $ACTIVE ]]; then
  say "using the active environment $ACTIVE"
  py=$(command -v python)
else
  VENV=${VENV:-.venv}
  [[ -x $VENV/bin/python ]] || { say "new environment $VENV"; python_of_system -m venv "$VENV"; }
  py=$PWD/$VENV/bin/python
  [[ $VENV == /* ]] && py=$VENV/bin/python
fi
"$py" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "Python 3.10 or newer is needed, $py is $("$py" -V)"

# Done before, with the same inputs? Then there is nothing to do.
stamp=$("$py" -c 'import sys; print(sys.prefix)')/hpctrain-setup.stamp
inputs=$(cat scripts/setup.sh requirements/*.txt setup.py pyproject.toml | sha256sum | cut -c1-16)-${MPICC:-}-${HDF5_DIR:-}-$WITHOUT-$PWD
if [[ -e $stamp && $(cat "$stamp") == "$inputs" ]]; then say "already set up"; exit 0; fi

pip() { "$py" -m pip --disable-pip-version-check "$@"; }
constraints=()
if "$py" -c 'import torch' 2>/dev/null && [[ $SITE == yes ]]; then
  # The site's torch stays: it was built for this machine.
  site_torch=$("$py" -c 'import torch; print(torch.__version__)')
  say "keeping torch $site_torch"
  grep -v '^torch==' requirements/runtime.txt > "${TMPDIR:-/tmp}/hpctrain-runtime.$$.txt"
  runtime=${TMPDIR:-/tmp}/hpctrain-runtime.$$.txt
else
  runtime=requirements/runtime.txt
fi
say "python packages"
pip install --quiet -r requirements/build.txt -r "$runtime" -r requirements/test.txt 2>&1 | grep -v 'is ignored: it is neither' || true
"$py" -c 'import torch, numpy, mpi4py, typer, pydantic' || fail "python packages did not install: see above"

# ---------------------------------------------------------------- wheels built against this machine
export MPICC=${MPICC:-mpicc}
read -r py_tag torch_version torch_cuda < <("$py" -c '
import sys, torch
print("cp%d%d" % sys.version_info[:2], torch.__version__, torch.version.cuda or "cpu")')
# Not piped into head: mpirun would die of the closed pipe, and pipefail would end this script.
mpi_version=$("$py" -c 'from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0].split(",")[0])')

nccl=no
if [[ $torch_cuda != cpu ]]; then
  cuda_home=${HOROVOD_CUDA_HOME:-${CUDA_HOME:-/usr/local/cuda}}
  nccl_home=${HOROVOD_NCCL_HOME:-${NCCL_HOME:-/usr}}
  if [[ -x $cuda_home/bin/nvcc ]] && [[ -e $nccl_home/include/nccl.h ]]; then
    nccl=$(awk '/#define NCCL_(MAJOR|MINOR|PATCH)/{printf "%s.", $3}' "$nccl_home/include/nccl.h")
    export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_CUDA_HOME=$cuda_home HOROVOD_NCCL_HOME=$nccl_home
  else
    say "torch has CUDA $torch_cuda, but nvcc or nccl.h is missing ($cuda_home, $nccl_home): Horovod is built without NCCL"
  fi
fi

hdf5_prefix=${HDF5_DIR:-}
if [[ -z $hdf5_prefix ]]; then
  hdf5_prefix=/usr/lib/$(uname -m)-linux-gnu/hdf5/openmpi
fi
hdf5_version=$(awk -F'"' '/define H5_VERS_INFO|define H5_PACKAGE_VERSION /{print $2; exit}' "$hdf5_prefix"/include/H5pubconf*.h "$hdf5_prefix"/include/H5public.h 2>/dev/null || true)

# cached NAME KEYTEXT BUILD_FUNCTION: install the wheel built against exactly these versions, building it once.
cached() {
  local name=$1 key build=$3 dir lock
  key=$(printf '%s' "$2" | sha256sum | cut -c1-16)
  dir=$CACHE/wheels/$name-$key
  mkdir -p "$CACHE/wheels"
  exec {lock}>"$CACHE/wheels/.$name-$key.lock"
  flock "$lock"                       # two clones set up at the same time build once
  if ! compgen -G "$dir/*.whl" >/dev/null; then
    say "building $name ($2)"
    local work; work=$(mktemp -d "${TMPDIR:-/tmp}/hpctrain-$name.XXXXXX")
    mkdir -p "$work/out"
    if ! (cd "$work" && $build "$work/out") >"$work/log" 2>&1; then
      tail -n 40 "$work/log" >&2
      fail "building $name failed; whole log: $work/log"
    fi
    printf '%s\n' "$2" > "$work/out/BUILT_AGAINST"
    rm -rf "$dir"; mv "$work/out" "$dir"; rm -rf "$work"
  fi
  flock -u "$lock"
  pip install --quiet --no-deps --no-index --force-reinstall "$dir"/*.whl
}

build_horovod() {
  pip download --quiet --no-deps --no-build-isolation --no-binary horovod "horovod==$HOROVOD_VERSION"
  tar xf horovod-*.tar.gz
  cd "horovod-$HOROVOD_VERSION"
  # Published in 2023 with C++14; the headers of torch since 2.1 need C++17.
  sed -i -E 's/(CMAKE_CXX_STANDARD) 1[147]/\1 17/' CMakeLists.txt horovod/torch/CMakeLists.txt
  HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    PATH="$(dirname "$py"):$PATH" MAKEFLAGS=-j$JOBS \
    pip wheel --no-deps --no-build-isolation -w "$1" .
}

build_h5py() {
  # Without build isolation: with it, mpi4py would be compiled from source once more, 20 GB and ten minutes.
  HDF5_MPI=ON CC=$MPICC HDF5_DIR=$hdf5_prefix PATH="$(dirname "$py"):$PATH" \
    pip wheel --no-deps --no-build-isolation --no-binary h5py -w "$1" "h5py==$H5PY_VERSION"
}

pids=()
if [[ $WITHOUT != *" horovod "* ]]; then
  cached horovod "horovod $HOROVOD_VERSION r$RECIPE $py_tag $(uname -m) torch $torch_version cuda $torch_cuda nccl $nccl $mpi_version" build_horovod & pids+=($!)
fi
if [[ $WITHOUT != *" h5py "* ]]; then
  cached h5py "h5py $H5PY_VERSION r$RECIPE $py_tag $(uname -m) hdf5 $hdf5_version $hdf5_prefix $mpi_version" build_h5py & pids+=($!)
else
  pip install --quiet "h5py==$H5PY_VERSION"
fi
for pid in "${pids[@]}"; do wait "$pid" || fail "a build failed, see above"; done

# ---------------------------------------------------------------- hpctrain itself
say "hpctrain"
pip install --quiet --no-deps --no-build-isolation --editable .
"$py" - <<'PY'
import h5py, torch
try:
    import horovod.torch as hvd
    built = "MPI" if hvd.mpi_built() else ""
    built += " NCCL" if hvd.nccl_built() else ""
    horovod = f"Horovod ({built.strip()})"
except ImportError:
    horovod = "no Horovod: the mpi backend is used"
print(f"    torch {torch.__version__}, h5py {h5py.__version__} (parallel: {h5py.get_config().mpi}), {horovod}")
PY
printf '%s' "$inputs" > "$stamp"
say "ready: source ${VENV:-$ACTIVE}/bin/activate && hpctrain doctor"
