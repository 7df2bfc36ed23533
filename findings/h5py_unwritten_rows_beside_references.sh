#!/bin/bash
# Rows of a table that were never written read as values of other rows if a column has references (h5py).
#
# A dataset with fill time "never" has no value for rows that were never written: HDF5 leaves the reader's memory as it
# is. h5py gives HDF5 an array of zeros, so that such rows are zeros. If the stored type has references it gives HDF5
# memory that is not initialised instead, also if only another column is read: the rows have values of rows that were
# read before, others in each read, without an error.
#
# Seen with h5py 3.16.0 (HDF5 2.0.0):
#   a table of two numbers: True; with a column of references: False
#   (whether all rows that were never written are zero in 20 reads)
# Exits with 1 if that is no longer so.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install --quiet --target "$work/packages" --only-binary :all: h5py==3.16.0 numpy==2.2.6
cat > "$work/case.py" <<'P'
import sys

import h5py
import numpy as np


def are_zeros(first) -> bool:
    dtype = np.dtype([("a", first), ("b", "<f8")])
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((4,))
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with h5py.File(sys.argv[1], "w") as file:
        kind = h5py.h5t.py_create(dtype, logical=True)
        h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((32,)), plist)
        rows = np.zeros(4, dtype)
        rows["a"] = file.ref if first is h5py.ref_dtype else 1
        for start in (0, 8, 16, 24):
            rows["b"] = start + 1
            file["x"][start : start + 4] = rows
    with h5py.File(sys.argv[1]) as file:
        reads = [file["x"].fields("b")[...] for _ in range(20)]
    return not any(read.reshape(4, 2, 4)[:, 1].any() for read in reads)


plain, with_references = are_zeros("<i4"), are_zeros(h5py.ref_dtype)
print(f"h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version}: a table of two numbers: {plain}; "
      f"with a column of references: {with_references}")
sys.exit(not (plain and not with_references))
P
PYTHONPATH="$work/packages" python3 "$work/case.py" "$work/a.h5"
