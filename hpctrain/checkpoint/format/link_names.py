"""Tensor names as HDF5 link names, reversibly.

HDF5 takes `/` for a path and `.` for "here". Those, `%`, NUL, control characters and lone surrogates are
written as %XX of their UTF-8 bytes, as in a URL. All else stays readable: `model.0.weight` is itself.
"""

from __future__ import annotations

import re

_ESCAPED = re.compile(rb"%([0-9A-F]{2})")
_EMPTY = "%"  # never the start of anything else: an escaped % is %25
TENSOR_GROUP = "tensors"
MAX_NAME_BYTES = 16384  # HDF5's limit on what one link may take is 64 KiB


def _escape_char(char: str) -> str:
    code = ord(char)
    if char in "%/" or code < 0x20 or code == 0x7F or 0xD800 <= code <= 0xDFFF:
        return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))
    return char


def escape(name: str) -> str:
    """`name` as one HDF5 link name. `unescape` gives it back."""
    if not name:
        return _EMPTY
    if set(name) == {"."}:
        return name.replace(".", "%2E")
    return "".join(map(_escape_char, name))


def unescape(link: str) -> str:
    """The tensor name that `escape` made `link` from."""
    if link == _EMPTY:
        return ""
    raw = _ESCAPED.sub(lambda match: bytes([int(match[1], 16)]), link.encode("utf-8"))
    return raw.decode("utf-8", "surrogatepass")


def dataset_path(name: str, *, number: int = 0) -> str:
    """Path of the dataset of a tensor's piece; number: of the pieces that one file holds of it.

    Only numbers from 1 on show: `%-1` is no escape of ours, so no tensor's name has it.
    """
    return f"/{TENSOR_GROUP}/{escape(name)}" + (f"%-{number}" if number else "")
