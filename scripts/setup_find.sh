# Part of setup.sh: finds what this machine has. These functions only look, and set variables.
# shellcheck shell=bash disable=SC2034

have() { command -v "$1" >/dev/null 2>&1; }

find_settings() {
  WITHOUT=" ${HPCTRAIN_WITHOUT:-} "
  local word
  for word in $WITHOUT; do
    [[ $word == horovod || $word == h5py ]] || fail "HPCTRAIN_WITHOUT has '$word': it takes horovod, h5py or both"
  done
  local home_cache=~/.cache     # also where HOME is not set
  CACHE=$(realpath -m "${HPCTRAIN_CACHE:-${XDG_CACHE_HOME:-$home_cache}/hpctrain}")
  VENV=$(realpath -ms "${VENV:-.venv}")
  local cores; cores=$(nproc 2>/dev/null || echo 2)
  # A login node has many cores, and other users; each compiler takes up to 2 GB.
  JOBS=${HPCTRAIN_JOBS:-$((cores < 8 ? cores : 8))}
}

without() { [[ $WITHOUT == *" $1 "* ]]; }

# active: the environment in use, other than our own .venv; empty if none.
# site_because: why no package manager may be called; empty if it may.
find_mode() {
  active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
  if [[ $active && $(realpath -m "$active") == "$(realpath -m "$VENV")" ]]; then active=; fi
  site_because=
  if   [[ ${MPICC:-} ]];    then site_because="MPICC is set to $MPICC"
  elif [[ ${HDF5_DIR:-} ]]; then site_because="HDF5_DIR is set to $HDF5_DIR"
  elif [[ $active ]];       then site_because="the environment $active is active"
  fi
}

# bundle: the archive or folder that packages come from; empty if they come from the network. bundle_id: hash of its
# manifest; bundle_python: the version that its wheels are for. An environment remembers its bundle.
find_bundle() {
  bundle=${BUNDLE:-} bundle_id='' bundle_python='' bundle_line='' bundle_torch='' bundle_for=''
  bundle_record=${active:-$VENV}/hpctrain-bundle
  if [[ ! ${BUNDLE+set} && -e $bundle_record ]]; then
    { read -r bundle; read -r bundle_id; } < "$bundle_record"
    site_because="this environment was set up from the bundle $bundle"
    if [[ ! -e $bundle ]]; then bundle=; fi
  elif [[ $bundle ]]; then
    [[ -r $bundle ]] || fail "BUNDLE is $bundle, and there is no such file here: make it with \`make bundle\` on a" \
      "machine with network, and copy it here"
    site_because="BUNDLE is set to $bundle"
  fi
  [[ $bundle ]] || return 0
  bundle=$(realpath "$bundle")
  local manifest
  # What is no bundle is refused by setup_bundle.py, in words.
  if [[ -d $bundle ]]; then manifest=$(cat "$bundle/MANIFEST.json" 2>/dev/null) || true
  else manifest=$(tar -xOf "$bundle" --occurrence=1 hpctrain-bundle/MANIFEST.json 2>/dev/null) || true; fi
  bundle_id=$(sha256sum <<<"$manifest" | cut -c1-16)
  bundle_python=$(sed -nE 's/^ *"python": "([0-9.]+)".*/\1/p' <<<"$manifest")
}

PYTHONS="3.10 to 3.14"  # as pack_bundle.py has them
supported_python() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }

# base_python: the interpreter of the active environment, of .venv, or for a new .venv; empty if there is none.
find_python() {
  base_python=
  local candidate
  if [[ $active ]]; then
    if supported_python "$active/bin/python"; then base_python=$active/bin/python; fi
  elif [[ ${PYTHON:-} ]]; then
    if supported_python "$PYTHON"; then base_python=$(command -v "$PYTHON"); fi
  else
    for candidate in "$VENV/bin/python" ${bundle_python:+"python$bundle_python"} python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
      if supported_python "$candidate"; then base_python=$(command -v "$candidate"); break; fi
    done
  fi
}

# torch_version, torch_cuda ("cpu" without): of the torch that PYTHON sees; empty if it sees none.
# Read from torch/version.py: importing torch takes seconds, and on a login node may miss the GPU driver.
find_torch() {
  torch_version='' torch_cuda='' torch_folder=''
  [[ $1 ]] || return 0
  local found
  found=$("$1" -c '
import importlib.util, os, runpy
spec = importlib.util.find_spec("torch")
if spec and spec.origin:
    folder = os.path.dirname(spec.origin)
    names = runpy.run_path(os.path.join(folder, "version.py"))
    print(names["__version__"], names.get("cuda") or "cpu", folder)' 2>/dev/null) || true
  [[ ! $found ]] || read -r torch_version torch_cuda torch_folder <<<"$found"
}

# mpicc, mpicxx: the compiler wrappers, as paths; mpi_flavour: openmpi, mpich or other.
find_mpi() {
  mpicc=$(command -v "${MPICC:-mpicc}" || true)
  mpicxx=${MPICXX:-} mpi_flavour=openmpi
  [[ $mpicc ]] || return 0
  local folder base name
  folder=$(dirname "$mpicc") base=$(basename "$mpicc")
  if [[ ! $mpicxx ]]; then
    # The C++ wrapper of the same MPI: mpicc.mpich -> mpicxx.mpich, mpiicc -> mpiicpc, Cray's cc -> CC.
    for name in "${base/mpicc/mpicxx}" "${base/mpicc/mpic++}" "${base/mpiicc/mpiicpc}" "${base/mpiicx/mpiicpx}" CC; do
      if [[ $name != "$base" && -x $folder/$name ]]; then mpicxx=$folder/$name; break; fi
    done
  fi
  case $("$mpicc" -show 2>/dev/null || true) in
    *openmpi* | *lmpi_cxx*) mpi_flavour=openmpi ;;
    *mpich*) mpi_flavour=mpich ;;
    *) if "$mpicc" --showme:version >/dev/null 2>&1; then mpi_flavour=openmpi; else mpi_flavour=other; fi ;;
  esac
}

# hdf5_prefix, hdf5_version: of a parallel HDF5; both empty, and hdf5_problem filled, if there is none.
find_hdf5() {
  hdf5_prefix='' hdf5_version='' hdf5_problem="a parallel HDF5 with headers: set HDF5_DIR to its prefix"
  local prefix header
  local places=("${HDF5_DIR:-}")
  if [[ ! ${HDF5_DIR:-} ]]; then
    places=("${HDF5_ROOT:-}" "${EBROOTHDF5:-}" "/usr/lib/$(uname -m)-linux-gnu/hdf5/$mpi_flavour")
    ! have h5pcc || places+=("$(dirname "$(dirname "$(command -v h5pcc)")")")
  fi
  for prefix in "${places[@]}"; do
    [[ $prefix ]] || continue
    header=$prefix/include/H5public.h
    if [[ ! -e $header ]]; then
      [[ ! ${HDF5_DIR:-} ]] || hdf5_problem="HDF5's headers: HDF5_DIR is $prefix, and there is no $header"
    elif ! grep -qsE '^#define H5_HAVE_PARALLEL 1' "$prefix"/include/H5pubconf*.h; then
      hdf5_problem="a parallel HDF5: the one in $prefix was built without MPI (no H5_HAVE_PARALLEL in its H5pubconf.h)"
    else
      hdf5_prefix=$prefix hdf5_problem=
      hdf5_version=$(awk '/^#define H5_VERS_(MAJOR|MINOR|RELEASE)[ \t]/{printf "%s%s", dot, $3; dot="."}' "$header")
      return 0
    fi
  done
}

missing() { missing_packages+=("$1"); missing_things+=("$2"); }

# missing_packages: Debian's names. missing_things: the same in words, with what to do on a site.
find_missing() {
  missing_packages=() missing_things=()
  local building=yes version
  if without horovod && without h5py; then building=; fi
  if [[ $base_python ]]; then
    version=$("$base_python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [[ ! $active ]] && ! "$base_python" -c 'import venv, ensurepip' 2>/dev/null; then
      missing "python$version-venv" "venv and ensurepip of $base_python (python$version-venv)"
    fi
    if [[ $building ]] && ! "$base_python" -c '
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'; then
      missing "python$version-dev" "Python.h of $base_python (python$version-dev)"
    fi
  elif [[ $active || ${PYTHON:-} ]]; then
    fail "Python $PYTHONS is needed, and ${PYTHON:-$active/bin/python} is" \
      "$("${PYTHON:-$active/bin/python}" -V 2>&1 || true)"
  else
    missing python3 "Python ${bundle_python:-$PYTHONS}: load the site's module, or set PYTHON"
    missing python3-venv "its venv and ensurepip (python3-venv)"
    missing python3-dev "its headers (python3-dev)"
  fi
  have make || missing make "make"
  if [[ $building ]] && ! have "${CXX:-g++}"; then missing g++ "a C++17 compiler (g++), or CXX"; fi
  if [[ $building && ! $mpicc ]]; then
    missing libopenmpi-dev "the MPI compiler wrapper ${MPICC:-mpicc}: load the site's MPI module, or set MPICC to the wrapper's path"
  fi
  have mpirun || have srun || missing openmpi-bin "mpirun or srun: load the site's MPI module"
  if ! without h5py && [[ ! $hdf5_prefix ]]; then
    if [[ $mpi_flavour == mpich ]]; then missing libhdf5-mpich-dev "$hdf5_problem"
    else missing libhdf5-openmpi-dev "$hdf5_problem"; fi
  fi
  # Not needed to run, only to look into files: a site decides for itself.
  have h5dump || [[ $site_because ]] || missing hdf5-tools "h5dump"
}

first_with() {  # first_with FILE PREFIX...: the first prefix that has FILE
  local file=$1 prefix; shift
  for prefix in "$@"; do
    if [[ $prefix && -e $prefix/$file ]]; then printf '%s\n' "$prefix"; return 0; fi
  done
  return 1
}

nccl_library() {  # nccl_library PREFIX: the shared library below it
  local folder
  for folder in "$1/lib" "$1/lib64" "$1/lib/$(uname -m)-linux-gnu"; do
    compgen -G "$folder/libnccl.so*" | head -n 1 && return 0
  done
  return 1
}

# nccl_version, cuda_version and cuda_home, nccl_home, nccl_lib: what Horovod is built with; or empty, and no_nccl_because says why.
# Asked for by variable and not there is an error: silence would cost the user a slow run.
find_nccl() {
  nccl_version='' cuda_version='' cuda_home='' nccl_home='' nccl_lib='' no_nccl_because=
  if [[ ! $torch_version ]]; then no_nccl_because="decided when torch is installed"; return 0; fi
  if [[ $torch_cuda == cpu ]]; then no_nccl_because="torch $torch_version has no CUDA"; return 0; fi

  local nvcc_prefix='' release
  ! have nvcc || nvcc_prefix=$(dirname "$(dirname "$(realpath "$(command -v nvcc)")")")
  if [[ ${HOROVOD_CUDA_HOME:-} ]]; then
    cuda_home=$(first_with bin/nvcc "$HOROVOD_CUDA_HOME") || fail "HOROVOD_CUDA_HOME is $HOROVOD_CUDA_HOME, and there is no bin/nvcc in it"
  elif ! cuda_home=$(first_with bin/nvcc "${CUDA_HOME:-}" "${CUDA_PATH:-}" "${EBROOTCUDA:-}" "$nvcc_prefix" /usr/local/cuda); then
    no_nccl_because="torch has CUDA $torch_cuda, but no nvcc was found: set HOROVOD_CUDA_HOME"
    return 0
  fi
  release=$("$cuda_home/bin/nvcc" --version | sed -nE 's/.*release ([0-9.]+).*/\1/p')
  if [[ ${release%%.*} != "${torch_cuda%%.*}" ]]; then
    no_nccl_because="torch has CUDA $torch_cuda, but $cuda_home has $release: set HOROVOD_CUDA_HOME to a CUDA ${torch_cuda%%.*}"
    [[ ! ${HOROVOD_CUDA_HOME:-} ]] || fail "$no_nccl_because"
    return 0
  fi

  # torch's own NCCL before those of the system: one process should hold one NCCL.
  local own; own=$(dirname "$torch_folder")/nvidia/nccl
  if [[ ${HOROVOD_NCCL_HOME:-} ]]; then
    nccl_home=$(first_with include/nccl.h "$HOROVOD_NCCL_HOME") || fail "HOROVOD_NCCL_HOME is $HOROVOD_NCCL_HOME, and there is no include/nccl.h in it"
  elif ! nccl_home=$(first_with include/nccl.h "${NCCL_HOME:-}" "${NCCL_ROOT:-}" "${EBROOTNCCL:-}" "$own" "$cuda_home" /usr); then
    no_nccl_because="torch has CUDA $torch_cuda, but no nccl.h was found: set HOROVOD_NCCL_HOME"
    return 0
  fi
  if ! nccl_lib=$(nccl_library "$nccl_home"); then
    no_nccl_because="$nccl_home has nccl.h, but no libnccl.so: set HOROVOD_NCCL_HOME"
    [[ ! ${HOROVOD_NCCL_HOME:-} ]] || fail "$no_nccl_because"
    return 0
  fi
  nccl_version=$(awk '/^#define NCCL_(MAJOR|MINOR|PATCH)[ \t]/{printf "%s%s", dot, $3; dot="."}' "$nccl_home/include/nccl.h")
  cuda_version=$release
}

print_plan() {
  line() { printf '%-9s %s\n' "$1" "$2"; }
  if [[ $site_because ]]; then line mode "site, because $site_because: no package manager is called"
  else line mode "missing system packages are installed, if this user may"; fi
  [[ ! $bundle ]] || line bundle "$bundle: ${bundle_line:-not looked at, without Python}"
  line python "${base_python:-not found} -> ${active:-$VENV}"
  if [[ $torch_version ]]; then
    line torch "$torch_version, CUDA $torch_cuda$([[ ! $site_because ]] || echo ', kept')"
  else
    line torch "$([[ $bundle ]] && echo "the bundle's" || grep -h '^torch==' requirements/runtime.txt), to be installed"
  fi
  line mpi "${mpicc:-not found} ($mpi_flavour), C++: ${mpicxx:-not found}"
  line hdf5 "${hdf5_prefix:+$hdf5_version in $hdf5_prefix}${hdf5_problem:+not found}"
  if without horovod; then line horovod "not built: HPCTRAIN_WITHOUT"
  elif [[ $nccl_version ]]; then
    line horovod "$HOROVOD_VERSION with MPI and NCCL $nccl_version ($nccl_lib), CUDA $cuda_version ($cuda_home)"
  else line horovod "$HOROVOD_VERSION with MPI, without NCCL: $no_nccl_because"; fi
  if without h5py; then line h5py "$H5PY_VERSION as published, not parallel: HPCTRAIN_WITHOUT"
  else line h5py "$H5PY_VERSION built against this HDF5"; fi
  line cache "$CACHE"
  line missing "${missing_packages[*]:-nothing}"
}
