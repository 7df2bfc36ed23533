"""Reversible encoding of tensor names as HDF5 link names.

HDF5 reads `/` as a path separator and a name of `.` as the current group. Those, `%`, control characters and
lone surrogates are written as the %XX of their UTF-8 bytes, as in a URL. Other names, such as `model.0.weight`,
are unchanged.
"""

from __future__ import annotations

_EMPTY = "%"  # stands for the empty name; unambiguous, since an escaped % is %25
TENSOR_GROUP = "tensors"
MAX_NAME_BYTES = 16384  # HDF5 limits a link to 64 KiB


def _escape_char(char: str) -> str:
    code = ord(char)
    if char in "%/" or code < 0x20 or code == 0x7F or 0xD800 <= code <= 0xDFFF:
        return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))
    return char


def escape(name: str) -> str:
    """Returns `name` as one HDF5 link name."""
    if not name:
        return _EMPTY
    if set(name) == {"."}:
        return name.replace(".", "%2E")
    return "".join(map(_escape_char, name))


def dataset_path(name: str, *, number: int = 0) -> str:
    """Returns the HDF5 path of the dataset of a tensor's piece. number: counts the tensor's pieces in one file.

    Numbers from 1 on are appended as `%-1`, which `escape` never produces, so no tensor's name can collide with it.
    """
    return f"/{TENSOR_GROUP}/{escape(name)}" + (f"%-{number}" if number else "")
