"""How each torch dtype is stored: as a number type that HDF5 has, or as raw unsigned integers with a tag.

HDF5 and numpy have no bfloat16, float8 or half complex. Such tensors are stored as unsigned integers of the
same width, and the dataset's attribute `torch_dtype` says what the bits mean. Nothing is ever converted: the
bytes in the file are the bytes in memory.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from hpctrain.errors import CheckpointError

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
    """`float32`, `bfloat16`, ...: how a dtype is written in the metadata."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name. Raises CheckpointError for one that this torch does not have."""
    if name not in _BY_NAME:
        raise CheckpointError(
            f"dtype {name!r} is not one that torch {torch.__version__} has and we can store"
        )
    return _BY_NAME[name]


def is_raw(name: str) -> bool:
    """Whether tensors of this dtype are stored as tagged unsigned integers."""
    return name not in _NATIVE


def storage_dtype(name: str) -> np.dtype:
    """The numpy type of the dataset that holds tensors of the torch dtype `name`, in native byte order."""
    if name in _NATIVE:
        return np.dtype(_NATIVE[name])
    return np.dtype(_RAW[dtype_named(name).itemsize])


def check_plain(tensor: torch.Tensor) -> None:
    """Raises CheckpointError for tensors that are not plain strided memory (sparse, quantized, meta, lazy)."""
    if is_lazy(tensor):
        raise CheckpointError(
            "cannot store a parameter of a lazy module that has no shape yet: let it see a batch before it is saved"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise CheckpointError(
            f"cannot store a tensor of layout {tensor.layout}, dtype {tensor.dtype}, device {tensor.device}: "
            "only dense tensors with their data in memory can be stored"
        )


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in row-major order as bytes, shape (nbytes,), on the tensor's device.

    No copy when the tensor is contiguous. Raises CheckpointError for tensors that are not plain strided
    memory (sparse, quantized, meta).
    """
    check_plain(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # complex32 is called experimental at every touch
        # Not reshape: of one element with a stride of its own, which counts as contiguous, it would keep that.
        return plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8)


def empty_tensor(shape: tuple[int, ...], *, dtype: str) -> torch.Tensor:
    """A CPU tensor of this shape and dtype, its content not set."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.empty(shape, dtype=dtype_named(dtype))
