"""How dtypes and names of tensors are represented in HDF5."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from hpctrain.errors import CheckpointError

# How each torch dtype is stored: as the HDF5 type of the same format, or as unsigned integers with a tag.
#
# HDF5 and numpy have no bfloat16, float8 or half complex. Such tensors are stored as unsigned integers of
# the same width, and the dataset's attribute `torch_dtype` names the dtype. Nothing is ever converted: the
# bytes in the file are the bytes in memory.


_NATIVE: dict[str, str] = {
    "bool": "?",
    "uint8": "u1",
    "uint16": "u2",
    "uint32": "u4",
    "uint64": "u8",
    "int8": "i1",
    "int16": "i2",
    "int32": "i4",
    "int64": "i8",
    "float16": "f2",
    "float32": "f4",
    "float64": "f8",
    "complex64": "c8",
    "complex128": "c16",
}
_RAW: dict[int, str] = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}

# Quantized dtypes carry a scale outside the tensor's bytes: storing the bytes alone would lose it.
_BY_NAME: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in the metadata, such as `float32` or `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Returns the torch dtype with this name. Raises CheckpointError if this version of torch does not have it."""
    if name not in _BY_NAME:
        raise CheckpointError(
            f"dtype {name!r} is unknown to torch {torch.__version__}, or cannot be stored in a checkpoint"
        )
    return _BY_NAME[name]


def is_raw(name: str) -> bool:
    """Returns True if HDF5 has no type for the torch dtype `name`, as for bfloat16.

    Tensors of such a dtype are stored as unsigned integers, with an attribute that names the dtype.
    """
    return name not in _NATIVE


def storage_dtype(name: str) -> np.dtype[Any]:
    """Returns the numpy dtype of the dataset that holds tensors of the torch dtype `name`, in native byte order."""
    if name in _NATIVE:
        return np.dtype(_NATIVE[name])
    return np.dtype(_RAW[dtype_named(name).itemsize])


def check_plain(tensor: torch.Tensor) -> None:
    """Raises CheckpointError if the tensor is not plain strided memory but sparse, quantized, meta or lazy."""
    if is_lazy(tensor):
        raise CheckpointError(
            "cannot store a parameter of a lazy module that has no shape yet: run a batch through it before saving"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise CheckpointError(
            f"cannot store a tensor of layout {tensor.layout}, dtype {tensor.dtype}, device {tensor.device}: "
            "only dense tensors with their data in memory can be stored"
        )


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's bytes in row-major order: uint8, shape (nbytes,), on the tensor's device.

    A contiguous tensor is not copied. Raises CheckpointError if the tensor is not plain strided memory.
    """
    check_plain(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that complex32 is experimental
        # Not reshape: it keeps the unusual stride of a tensor of one element, which counts as contiguous.
        return plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8)


def empty_tensor(shape: tuple[int, ...], *, dtype: str) -> torch.Tensor:
    """Returns an uninitialized CPU tensor of this shape and dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.empty(shape, dtype=dtype_named(dtype))


# Reversible encoding of tensor names as HDF5 link names.
#
# HDF5 reads `/` as a path separator and a name of `.` as the current group. Those, `%`, control characters
# and lone surrogates are written as the %XX of their UTF-8 bytes, as in a URL. Other names, such as
# `model.0.weight`, are unchanged.


_EMPTY = "%"  # stands for the empty name; unambiguous, since an escaped % is %25
TENSOR_GROUP = "tensors"
MAX_NAME_BYTES = 16384  # HDF5 limits a link to 64 KiB


def _escape_char(char: str) -> str:
    code = ord(char)
    if char in "%/" or code < 0x20 or code == 0x7F or 0xD800 <= code <= 0xDFFF:
        return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))
    return char


def escape(name: str) -> str:
    """Returns `name` with all characters escaped that an HDF5 link name cannot contain."""
    if not name:
        return _EMPTY
    if set(name) == {"."}:
        return name.replace(".", "%2E")
    return "".join(map(_escape_char, name))


def dataset_path(name: str, *, number: int = 0) -> str:
    """Returns the HDF5 path of a dataset that contains the tensor `name`, or a part (piece) of the tensor.

    `number` is the index of the piece among the tensor's pieces in the same file. An index above 0 is appended, as
    in `%-1`. `escape` never produces such text, so the path cannot collide with that of another tensor.
    """
    return f"/{TENSOR_GROUP}/{escape(name)}" + (f"%-{number}" if number else "")
