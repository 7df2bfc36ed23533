# Part of setup.sh: wheels that are built against this machine's MPI, HDF5 and torch, and their cache.
# shellcheck shell=bash disable=SC2154

install_wheels() {
  local py_tag machine mpi_version hdf5_key numpy_major mpi4py_version
  machine=$(uname -m)
  find_nccl
  if ! without horovod && [[ $torch_cuda != cpu && $no_nccl_because ]]; then say "Horovod without NCCL: $no_nccl_because"; fi
  # The site's own builds stay, unless they are ours of before, or cannot do what is needed.
  local horovod_stays='' h5py_stays=
  if [[ $site_because ]]; then
    [[ -e $record/horovod ]] || ! "$py" -c 'import horovod.torch as hvd, sys; sys.exit(not hvd.mpi_built())' 2>/dev/null || horovod_stays=yes
    [[ -e $record/h5py ]] || ! "$py" -c 'import mpi4py; mpi4py.rc.initialize = False; import h5py, sys; sys.exit(not h5py.get_config().mpi)' 2>/dev/null || h5py_stays=yes
  fi

  # With MPICC also where nothing else is built: the wheel of mpi4py may load another MPI, or find none.
  if [[ ${MPICC:-} ]] || ! without horovod || ! without h5py; then use_mpi_of_compiler; fi
  # rc.initialize: MPI_Init outside a job aborts on some sites' login nodes.
  read -r py_tag numpy_major mpi4py_version mpi_version < <("$py" -c '
import sys, mpi4py, numpy
mpi4py.rc.initialize = False
from mpi4py import MPI
version = MPI.Get_library_version().splitlines()[0].split(",")[0]
print("cp%d%d" % sys.version_info[:2], numpy.__version__.split(".")[0], mpi4py.__version__, version)')

  local built="r$RECIPE $py_tag $machine"
  horovod_key="horovod $HOROVOD_VERSION $built torch $torch_version cuda ${cuda_version:-no} nccl ${nccl_version:-no} $mpi_version"
  h5py_key="h5py $H5PY_VERSION $built hdf5 $hdf5_version $hdf5_prefix numpy $numpy_major mpi4py $mpi4py_version $mpi_version"

  if without horovod; then remove_horovod
  elif [[ $horovod_stays ]]; then say "keeping the Horovod of this environment"
  else wheels+=(horovod); fi
  if without h5py; then install_published_h5py
  elif [[ $h5py_stays ]]; then say "keeping the parallel h5py of this environment"
  else wheels+=(h5py); fi

  prepare_wheels
  local name key
  case " ${failed[*]-} " in *' horovod '*) remove_horovod ;; esac
  case " ${failed[*]-} " in *' h5py '*) install_published_h5py ;; esac
  for name in ${wheels[@]+"${wheels[@]}"}; do
    key=${name}_key
    install_wheel "$name" "${!key}"
  done
  # After h5py, and without what it asks for: pip would put the published h5py in the place of ours.
  "$py" -c 'import hdf5plugin' 2>/dev/null ||
    pip install -q -q --no-deps --only-binary :all: "hdf5plugin==$HDF5PLUGIN_VERSION"
}

wheels=()

remove_horovod() { [[ ! -e $record/horovod ]] || { pip uninstall -q -y horovod; rm -f "$record/horovod"; }; }

install_published_h5py() {
  [[ $(cat "$record/h5py" 2>/dev/null) != "published $H5PY_VERSION" ]] || return 0
  # A site's h5py of any kind is good enough here.
  if [[ ! $site_because || -e $record/h5py ]] || ! "$py" -c 'import h5py' 2>/dev/null; then
    pip install -q -q --force-reinstall --no-deps --only-binary h5py "h5py==$H5PY_VERSION"
    mkdir -p "$record"
    printf 'published %s' "$H5PY_VERSION" > "$record/h5py"
  fi
}

# Whether mpi4py is its published wheel, which has a module for each family of MPI.
published_mpi4py() {
  "$py" -c 'import glob, mpi4py, sys; sys.exit(not glob.glob(mpi4py.__path__[0] + "/MPI.*mpi*.so"))'
}

# The wheel of mpi4py takes the first MPI library that the loader finds. If that is not the compiler wrapper's,
# Horovod and mpi4py would be two MPIs in one process: then mpi4py is built like the others. From a bundle it always is:
# on a cluster it depends on the loaded modules which MPI the loader finds first.
use_mpi_of_compiler() {
  local work of_compiler of_mpi4py because=
  work=$(mktemp -d "${TMPDIR:-/tmp}/hpctrain-mpi.XXXXXX")
  cat > "$work/version.c" <<'C'
#include <mpi.h>
#include <stdio.h>
int main(void) {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length;
  MPI_Get_library_version(text, &length);  /* allowed before MPI_Init */
  printf("%s\n", text);
  return 0;
}
C
  if ! "$mpicc" -o "$work/version" "$work/version.c" 2>"$work/log"; then
    tail -n 20 "$work/log" >&2
    rm -rf "$work"
    fail "$mpicc cannot compile an MPI program, see above"
  fi
  # A cross-compiling site cannot run it here; then there is nothing to compare.
  of_compiler=$("$work/version" 2>/dev/null | head -n 1 | tr -d '\0') || of_compiler=
  rm -rf "$work"
  of_mpi4py=$("$py" -c 'import mpi4py; mpi4py.rc.initialize = False
from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0])' 2>/dev/null | tr -d '\0') || of_mpi4py="no MPI"
  if [[ $of_compiler && $of_compiler != "$of_mpi4py" ]]; then because="mpi4py found $of_mpi4py, $mpicc is $of_compiler"
  elif [[ $bundle && ! $active ]] && published_mpi4py; then because="$mpicc is $of_compiler"; fi
  if [[ $because ]]; then
    say "$because: building mpi4py with it"
    mpi4py_key="$(grep -h '^mpi4py==' requirements/runtime.txt) r$RECIPE $("$py" -c 'import sys; print("cp%d%d" % sys.version_info[:2])') $(uname -m) $of_compiler $mpicc"
    wheels=(mpi4py)
    prepare_wheels
    install_wheel mpi4py "$mpi4py_key"
    wheels=()
  fi
}

# ---------------------------------------------------------------- the cache
wheel_folder() { printf '%s/wheels/%s-%s' "$CACHE" "$1" "$(printf '%s' "$2" | sha256sum | cut -c1-16)"; }

# A folder gets its name when it is complete, so what has the name is complete.
is_cached() { compgen -G "$1/*.whl" >/dev/null; }

# Builds what of `wheels` is neither installed nor cached, side by side. hpctrain works without Horovod and without a
# parallel h5py: if their builds fail, they are taken out of `wheels`, and the set-up continues.
failed=()
prepare_wheels() {
  local name key pids=() names=() tools=
  for name in ${wheels[@]+"${wheels[@]}"}; do
    key=${name}_key
    is_cached "$(wheel_folder "$name" "${!key}")" && continue
    if [[ ! $tools ]]; then pip install -q -q -r requirements/build.txt; tools=yes; fi
    # A process group for each: an interrupt then ends the compilers too, and not only this shell.
    set -m
    build_wheel "$name" "${!key}" & pids+=($!) names+=("$name")
    set +m
  done
  ((${#pids[@]})) || return 0
  # shellcheck disable=SC2064
  trap "for pid in ${pids[*]}; do kill -TERM -- -\$pid 2>/dev/null; done; exit 130" INT TERM HUP
  # All are waited for: one that works is in the cache for the next try.
  local number
  for number in "${!pids[@]}"; do wait "${pids[number]}" || failed+=("${names[number]}"); done
  trap - INT TERM HUP
  for name in ${failed[@]+"${failed[@]}"}; do
    [[ $name == horovod || $name == h5py ]] || fail "$name could not be built, see above"
    local left=() other
    for other in "${wheels[@]}"; do [[ $other == "$name" ]] || left+=("$other"); done
    wheels=(${left[@]+"${left[@]}"})
    say "continuing without this build of $name: see above"
  done
}

# What of hpctrain works without the wheel NAME, and how to set up without it.
without_wheel() {
  case $1 in
    horovod) echo "Without Horovod everything works but run.backend = \"horovod\" and \`import horovod\`; Horovod programs" \
      "run by \`import hpctrain.hvd\`. To leave it out: HPCTRAIN_WITHOUT=horovod make setup" ;;
    h5py) echo "A parallel h5py is for your own driver=\"mpio\" only. To take the published one: HPCTRAIN_WITHOUT=h5py make setup" ;;
    mpi4py) echo "Runs of more than one rank need it." ;;
  esac
}

# first_errors LOG: the first errors of compilers and of cmake in it. Its end is often a traceback of what called them.
first_errors() {
  grep -E ': (fatal )?error: |^CMake Error|: undefined reference to|ld: cannot find|: command not found' "$1" | head -n 8 || true
}

# build_wheel NAME KEY: build_NAME makes a wheel; it goes into the cache. Fails with the end of the log.
build_wheel() {
  local name=$1 key=$2 folder work lock
  folder=$(wheel_folder "$name" "$key")
  mkdir -p "$CACHE/wheels"
  exec {lock}>"$folder.lock"
  # Two clones that are set up at the same time build once.
  flock -n "$lock" 2>/dev/null || { say "waiting for another build of $name"; flock "$lock" || true; }
  if ! is_cached "$folder"; then
    say "building $name ($key)"
    work=$(mktemp -d "${TMPDIR:-/tmp}/hpctrain-$name.XXXXXX")
    mkdir "$work/out"
    trap 'rm -rf "$work"; exit 143' INT TERM HUP
    # In a shell of its own with -e: as the condition of an `if`, a function runs on after an error.
    (set -e; trap - INT TERM HUP; cd "$work"; "build_$name" "$work/out") >"$work/log" 2>&1 &
    if ! wait $! || ! is_cached "$work/out"; then
      { tail -n 15 "$work/log"
        if [[ $(first_errors "$work/log") ]]; then echo "setup: the first errors:"; first_errors "$work/log"; fi
        echo "setup: building $name failed; whole log: $work/log"
        echo "setup: $(without_wheel "$name")"; } >&2
      exit 1
    fi
    printf '%s\n' "$key" > "$work/out/BUILT_AGAINST"
    # Copied into the cache's folder and then renamed there: the cache is often on another filesystem than TMPDIR.
    rm -rf "$folder" "$folder".partial.*
    cp -r "$work/out" "$folder.partial.$$"
    mv "$folder.partial.$$" "$folder"
    rm -rf "$work"
  fi
  exec {lock}>&-
}

# install_wheel NAME KEY: from the cache, unless this very wheel is installed.
install_wheel() {
  local name=$1 key=$2 folder
  folder=$(wheel_folder "$name" "$key")
  if [[ $(cat "$record/$name" 2>/dev/null) == "$key" ]] &&
    "$py" -c 'import importlib.metadata, sys; importlib.metadata.version(sys.argv[1])' "$name" 2>/dev/null; then
    return 0
  fi
  if ! pip install -q -q --no-deps --no-index --force-reinstall "$folder"/*.whl; then
    rm -rf "$folder"
    fail "the cached wheel in $folder was broken, and is removed: run make setup again, which builds it anew"
  fi
  mkdir -p "$record"
  printf '%s' "$key" > "$record/$name"
}

# ---------------------------------------------------------------- the builds
# Each runs in an empty folder and leaves a wheel in the folder $1.

# First on PATH: the environment's tools, and wrappers of the one MPI that is meant under the usual names.
use_tools() {
  mkdir bin
  printf '#!/bin/sh\nexec "%s" "$@"\n' "$mpicc" > bin/mpicc
  printf '#!/bin/sh\nexec "%s" "$@"\n' "${mpicxx:-$(dirname "$mpicc")/mpicxx}" | tee bin/mpicxx bin/mpic++ bin/mpiCC >/dev/null
  # cmake takes the wrappers in the folder of the mpiexec that it finds, and looks for that in MPI_HOME first.
  printf '#!/bin/sh\nexit 1\n' > bin/mpiexec
  chmod +x bin/*
  export MPI_HOME=$PWD PATH=$PWD/bin:$(dirname "$py"):$PATH
}

# The standard of C++ that torch's headers need: 17 since torch 2.1, 20 since 2.15.
cxx_of_torch() {
  local minor
  minor=$(sed -nE 's/^2\.([0-9]+).*/\1/p' <<<"$torch_version")
  if [[ $minor && $minor -lt 15 ]]; then echo 17; else echo 20; fi
}

build_horovod() {
  use_tools
  pip download -q -q --no-deps --no-build-isolation --no-binary horovod "horovod==$HOROVOD_VERSION"
  tar xf "horovod-$HOROVOD_VERSION.tar.gz"
  if [[ $nccl_version ]]; then
    # A prefix with this NCCL alone: torch's wheels bring libnccl.so.2 without the name that the linker wants,
    # and cmake would take the header of one NCCL and the library of another.
    mkdir -p nccl/include nccl/lib
    ln -s "$nccl_home"/include/nccl*.h nccl/include/
    ln -s "$nccl_lib" nccl/lib/libnccl.so
    export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED
    export HOROVOD_CUDA_HOME=$cuda_home HOROVOD_NCCL_HOME=$PWD/nccl
    PATH=$cuda_home/bin:$PATH
  fi
  cd "horovod-$HOROVOD_VERSION"
  # Published in 2023 with C++14 and CUDA C++11; torch's headers need a newer one.
  sed -i -E "s/(CMAKE_CXX_STANDARD|CMAKE_CUDA_STANDARD) 1[147]/\1 $(cxx_of_torch)/" CMakeLists.txt horovod/*/CMakeLists.txt horovod/common/ops/cuda/CMakeLists.txt
  # GCC 14 and newer: their headers include fewer others, and they look into templates that nothing uses.
  export CXXFLAGS="-include stdexcept -include string -include cstdint ${CXXFLAGS:-}"
  sed -i 's/^  const size_type count_;/  size_type count_;/' third_party/flatbuffers/include/flatbuffers/stl_emulation.h
  # cmake 4 refuses projects that were written for cmake before 3.5.
  export CMAKE_POLICY_VERSION_MINIMUM=3.5
  # Without debug information: a third less to do for the compiler, and a wheel of 1 MB instead of 20.
  sed -i 's/REPLACE "-O2" "-O3"/REPLACE "-O2 -g" "-O3"/' CMakeLists.txt
  # Without Gloo, Horovod's controller where there is no MPI: hpctrain never uses it, and it is long to compile.
  HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    MAKEFLAGS=-j$JOBS pip wheel --no-deps --no-build-isolation -w "$1" .
}

build_h5py() {
  use_tools
  # Without build isolation: with it, mpi4py would be compiled from source once more, 20 GB and ten minutes.
  # Setuptools compiles one module at a time by default; generating debug information takes longer than the code.
  printf '[build_ext]\nparallel = %s\n' "$JOBS" > build.cfg
  HDF5_MPI=ON CC=mpicc CFLAGS="-g0 ${CFLAGS:-}" DIST_EXTRA_CONFIG=$PWD/build.cfg HDF5_DIR=$hdf5_prefix \
    pip wheel --no-deps --no-build-isolation --no-cache-dir --no-binary h5py -w "$1" "h5py==$H5PY_VERSION"
}

build_mpi4py() {
  use_tools
  # With debug information the compiler takes 20 GB of memory, without it 0.6.
  MPICC=$PWD/bin/mpicc CFLAGS="-g0 ${CFLAGS:-}" pip wheel --no-deps --no-build-isolation --no-cache-dir --no-binary mpi4py -w "$1" \
    "$(sed -n 's/^mpi4py==/&/p' "$SCRIPTS/../requirements/runtime.txt")"
}
