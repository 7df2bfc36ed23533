#!/bin/bash
# HDF5's scale-offset filter does not keep NaN in floats, without an error when they are written.
#
# A NaN that is not the first number of its chunk reads as the smallest number of the chunk. A chunk that begins with NaN
# loses all its numbers: HDF5 1.14.2 reads zeros (1.10.8 too), HDF5 2.0.0 raises an error, but only when it is read.
#
# Seen with h5py 3.16.0 (HDF5 2.0.0) and h5py 3.10.0 (HDF5 1.14.2):
#   HDF5 2.0.0: NaN in the middle reads as the smallest number: True; chunk that begins with NaN: cannot be read
#   HDF5 1.14.2: NaN in the middle reads as the smallest number: True; chunk that begins with NaN: reads as zeros
# Exits with 1 if that is no longer so.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/case.py" <<'P'
import sys

import h5py
import numpy as np

data = np.random.default_rng(0).random((2, 100)).astype(np.float32) * 1000
data[0, 50] = data[1, 0] = np.nan
with h5py.File(sys.argv[1], "w") as file:
    file.create_dataset("x", data=data, chunks=(1, 100), scaleoffset=3)
with h5py.File(sys.argv[1]) as file:
    middle = file["x"][0]
    try:
        first = "reads as zeros" if not file["x"][1].any() else f"reads as {file['x'][1][:3]}"
    except OSError:
        first = "cannot be read"
smallest = middle[50] == middle.min()
print(f"HDF5 {h5py.version.hdf5_version}: NaN in the middle reads as the smallest number: {smallest}; "
      f"chunk that begins with NaN: {first}")
sys.exit(not (smallest and first == sys.argv[2]))
P
for version in 3.16.0 3.10.0; do
  numpy=2.2.6; [ "$version" = 3.10.0 ] && numpy=1.26.4
  wanted="cannot be read"; [ "$version" = 3.10.0 ] && wanted="reads as zeros"
  python3 -m pip install --quiet --target "$work/$version" --only-binary :all: "h5py==$version" "numpy==$numpy"
  PYTHONPATH="$work/$version" python3 "$work/case.py" "$work/a.h5" "$wanted"
done
