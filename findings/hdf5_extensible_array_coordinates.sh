#!/bin/bash
# HDF5's H5Dget_chunk_info, H5Dget_chunk_info_by_coord and H5Dchunk_iter name wrong coordinates of chunks if the only
# unlimited dimension of a dataset is not the first, in the format of libver="latest" (1.10 and newer; SWMR needs it).
#
# Such datasets have an extensible array as chunk index. HDF5 stores the unlimited dimension first in it, and these
# functions return coordinates as if it had not. Reading with H5Dread, and H5Dread_chunk by coordinates, is right.
# Programs that read chunks from their place in the file (to build chunk maps, or to read without HDF5's lock) get the
# bytes of other chunks.
#
# Seen with h5py 3.16.0 (HDF5 2.0.0) and h5py 3.10.0 (HDF5 1.14.2):
#   HDF5 2.0.0: data read by HDF5 right: True; chunks whose coordinates are right: 1 of 24
#   HDF5 1.14.2: data read by HDF5 right: True; chunks whose coordinates are right: 1 of 24
# Exits with 1 if that is no longer so.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/case.py" <<'P'
import sys

import h5py
import numpy as np

data = np.arange(1, 121, dtype=np.float32).reshape(6, 20)
path = sys.argv[1]
with h5py.File(path, "w", libver="latest") as file:
    file.create_dataset("x", data=data, maxshape=(6, None), chunks=(1, 5))
raw = open(path, "rb").read()
right = 0
with h5py.File(path) as file:
    dataset = file["x"]
    read = np.array_equal(dataset[...], data)
    count = dataset.id.get_num_chunks()
    for number in range(count):
        info = dataset.id.get_chunk_info(number)
        row, column = info.chunk_offset
        stored = np.frombuffer(raw, np.float32, 5, info.byte_offset)
        right += np.array_equal(stored, data[row, column : column + 5])
print(f"HDF5 {h5py.version.hdf5_version}: data read by HDF5 right: {read}; "
      f"chunks whose coordinates are right: {right} of {count}")
sys.exit(not (read and right < count))
P
for version in 3.16.0 3.10.0; do
  numpy=2.2.6; [ "$version" = 3.10.0 ] && numpy=1.26.4
  python3 -m pip install --quiet --target "$work/$version" --only-binary :all: "h5py==$version" "numpy==$numpy"
  PYTHONPATH="$work/$version" python3 "$work/case.py" "$work/a.h5"
done
