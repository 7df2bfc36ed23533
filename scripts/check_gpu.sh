#!/usr/bin/env bash
# Runs the checks on a GPU on a machine without a network. scripts/pack_gpu_check.py puts it into its archive as
# `check-gpu`, next to openmpi/, wheels/ and tree/. Changes nothing outside its own folder.
#
#   gpu-check/check-gpu                  # the results: gpu-check/gpu.json
#   PYTHON=/opt/env/bin/python gpu-check/check-gpu --only reductions,digits
#
# Options are those of `python -m tests.gpu`.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
command -v "$python" >/dev/null || { echo "check-gpu: no $python on the PATH: set PYTHON to one that has torch" >&2; exit 1; }
"$python" -c 'import torch' || { echo "check-gpu: $python has no torch: set PYTHON to one that has" >&2; exit 1; }

# Wheels are archives; there may be no pip.
if [[ ! -d $here/site ]]; then
  mkdir "$here/site.new"
  for wheel in "$here"/wheels/*.whl; do
    [[ ! -e $wheel ]] || "$python" -m zipfile -e "$wheel" "$here/site.new"
  done
  mv "$here/site.new" "$here/site"
fi

for library in "$here"/openmpi/spare/*; do
  "$python" -c "import ctypes; ctypes.CDLL('${library##*/}')" 2>/dev/null || cp "$library" "$here/openmpi/lib/"
done

# By these variables Open MPI finds its files; the ranks inherit them.
mpi=$here/openmpi
export OPAL_PREFIX=$mpi OPAL_BINDIR=$mpi/bin OPAL_LIBDIR=$mpi/lib OPAL_PKGLIBDIR=$mpi/lib/openmpi
export OPAL_SYSCONFDIR=$mpi/etc OPAL_DATADIR=$mpi/share OPAL_PKGDATADIR=$mpi/share
export PATH=$mpi/bin:$PATH LD_LIBRARY_PATH=$mpi/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export MPI4PY_MPIABI=openmpi MPI4PY_LIBMPI=$mpi/lib/libmpi.so.40
export PYTHONPATH=$here/tree:$here/site${PYTHONPATH:+:$PYTHONPATH}

# The extension that sums within a node is compiled for one version of Python. Without a compiler numpy is used.
cd "$here/tree"
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
if [[ ! -e hpctrain/reduce/shared_memory/_add$suffix ]]; then
  include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  "${CC:-cc}" -O3 -ffp-contract=off -fno-fast-math -shared -fPIC "-I$include" hpctrain/reduce/shared_memory/_add.c \
    -o "hpctrain/reduce/shared_memory/_add$suffix" 2>/dev/null || echo "check-gpu: no extension was compiled: sums within a node are computed by numpy"
fi
exec "$python" -m tests.gpu --output "$here/gpu.json" "$@"
