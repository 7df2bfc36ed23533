"""Names what HDF5 cannot read: a file of another format, or written by a newer HDF5; says how to convert it."""

from __future__ import annotations

import os
import re

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"CDF\x01", "a netCDF-3 file (classic format), not HDF5: convert it with nccopy -k nc4 FILE NEW"),
    (b"CDF\x02", "a netCDF-3 file (64-bit offsets), not HDF5: convert it with nccopy -k nc4 FILE NEW"),
    (b"CDF\x05", "a netCDF-3 file (CDF-5), not HDF5: convert it with nccopy -k nc4 FILE NEW"),
    (b"ADIOS-BP", "a part of an ADIOS2 BP file, not HDF5: write it with ADIOS2's HDF5 engine"),
    (b"\x0e\x03\x13\x01", "an HDF4 file, not HDF5: convert it with h4toh5 FILE NEW"),
    (b"MATLAB 5.0 MAT-file", "a MATLAB file before version 7.3, not HDF5: save it with save(FILE, '-v7.3')"),
    (b"\x93NUMPY", "a numpy file, not HDF5: pack it with hpctrain data pack"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the file itself: run git lfs pull"),
    (b"\x1f\x8b", "compressed by gzip as a whole: uncompress it with gunzip"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd as a whole: uncompress it with unzstd"),
    (b"PK\x03\x04", "a zip archive (as numpy's .npz), not HDF5"),
    (b"PAR1", "a Parquet file, not HDF5"),
    (b"GRIB", "a GRIB file, not HDF5"),
    (b"SIMPLE  =", "a FITS file, not HDF5"),
)
# Directories that are one dataset: a file in them, and what they are.
_MARKERS: tuple[tuple[str, str], ...] = (
    ("md.idx", "an ADIOS2 BP directory: write the data with ADIOS2's HDF5 engine"),
    (".zgroup", "a Zarr directory: write the data as HDF5"),
    (".zarray", "a Zarr directory: write the data as HDF5"),
    ("zarr.json", "a Zarr directory: write the data as HDF5"),
)
# HDF5's message if the version of an object's header, layout, datatype or superblock is unknown to it
_UNKNOWN_VERSION = re.compile(r"bad (\w+ )*version number|version number too|unknown (datatype )?class")
# Numbers that h5repack has for the newest format that each version of HDF5 reads
_FORMATS = {(1, 8): 1, (1, 10): 2, (1, 12): 3, (1, 14): 4}


def format_of(path: str) -> str | None:
    """Returns what a file or directory that is not HDF5 is, in words, and how to convert it; None if unknown."""
    if os.path.isdir(path):
        return next((what for name, what in _MARKERS if os.path.exists(os.path.join(path, name))), None)
    try:
        with open(path, "rb") as file:
            start = file.read(32)
    except OSError:
        return None
    if not start:
        return "empty: it has no bytes"
    found = next((what for magic, what in _MAGIC if start.startswith(magic)), None)
    if found is None and path.endswith(".bp"):
        return "an ADIOS2 BP file, not HDF5: write it with ADIOS2's HDF5 engine"
    return found


def newer_library(error: object) -> str | None:
    """Returns an explanation if HDF5's error says that a newer HDF5 wrote what it was to read; else None."""
    import h5py

    text = str(error).strip("'\"")
    if _UNKNOWN_VERSION.search(text) is None:
        return None
    number = h5py.version.hdf5_version
    high = _FORMATS.get(h5py.version.hdf5_version_tuple[:2], 0)
    name = {1: "v108", 2: "v110", 3: "v112", 4: "v114"}.get(high, "earliest")
    again = (
        "with a type that this one has (a complex number as two floats)"
        if "datatype" in text
        else f"with h5repack --low=0 --high={high} FILE NEW of the newer one, or in Python with "
        f'libver=("earliest", "{name}")'
    )
    return (
        f"was written by a newer HDF5 than this one ({number}), which says: {text}. Write it again {again}; or install "
        "an h5py with the newer HDF5"
    )
