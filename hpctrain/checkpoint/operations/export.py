"""Exports a checkpoint's tensors as a safetensors file, or as a torch state dict."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.format.boxes import Box, split_box, whole_box
from hpctrain.checkpoint.format.dtypes import byte_view
from hpctrain.checkpoint.format.metadata import StoredTensor
from hpctrain.checkpoint.format.state import encode_document
from hpctrain.checkpoint.loading.checkpoint import Checkpoint, open_checkpoint
from hpctrain.comm import Collective, agreed, on_rank_0
from hpctrain.errors import CheckpointError
from hpctrain.storage import sync_directory, write_fully
from hpctrain.version import __version__

REGION_BYTES = 32 << 20  # read, verified and written at a time

# Names of the dtypes that the format supports. https://github.com/huggingface/safetensors, "Format".
SAFETENSORS_DTYPES: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """Result of an export.

    Attributes:
        path: The new file or directory.
        num_tensors: Number of exported tensors.
        num_bytes: Length of the file, or of all files.
        step: Step of the exported checkpoint.
    """

    path: Path
    num_tensors: int
    num_bytes: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placed:
    """A tensor to be exported: its name in the safetensors file, and the offset of its first byte there.

    The offset is in bytes, from the start of the file's data section.
    """

    name: str
    tensor: StoredTensor
    offset: int


def export_safetensors(
    source: Path | str,
    target: Path | str,
    *,
    comm: Collective,
    prefix: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Writes a checkpoint's tensors, or those with a prefix, to a safetensors file. Collective.

    The ranks share the work; each uses REGION_BYTES of memory. All that is read is verified, and the file gets its
    name only when it is complete.

    Args:
        source: A checkpoint, or a directory of checkpoints, whose newest one is exported.
        target: The new file.
        comm: The ranks that share the work.
        prefix: Export only tensors whose names begin with this text, such as `model/`, and remove the text from the
            names. If empty, the file also contains step and document, from which `import_tensors` restores the same
            checkpoint.
        progress: Called with the number of bytes of this rank's share written so far, and with the size of the
            share.

    Returns:
        Path, number of tensors and size of the file.

    Raises:
        CheckpointError: On every rank, for damage, if no tensor has the prefix, if the file cannot be written, and
            for a dtype or name that the format does not support.
    """
    target = Path(target)
    checkpoint = open_checkpoint(source, comm=comm)
    placed = place_tensors(select(checkpoint, prefix))
    about = {"format": "pt", "hpctrain": __version__, "step": str(checkpoint.step)}
    if not prefix:
        about["document"] = encode_document(checkpoint.document)
    header = safetensors_header(placed, about=about)
    num_bytes = len(header) + sum(entry.tensor.num_bytes for entry in placed)
    partial = Path(on_rank_0(comm, lambda: _create(target, header=header, num_bytes=num_bytes)))
    try:
        agreed(
            comm,
            lambda: _write_regions(
                partial, checkpoint, placed, begin=len(header), comm=comm, progress=progress
            ),
            os_error=CheckpointError,
        )
        on_rank_0(comm, lambda: _commit(partial, target))
    except BaseException:  # also KeyboardInterrupt: a partial file may be large
        if comm.rank == 0:
            with suppress(OSError):
                partial.unlink()
        raise
    return Exported(path=target, num_tensors=len(placed), num_bytes=num_bytes, step=checkpoint.step)


def export_state_dict(
    source: Path | str, target: Path | str, *, comm: Collective, prefix: str = ""
) -> Exported:
    """Writes a checkpoint's tensors as a state dict that `torch.load(..., weights_only=True)` reads. Collective.

    Rank 0 does all the work, and holds a copy of all selected tensors in memory, which torch.save requires. All
    that is read is verified, and the file gets its name only when it is complete.

    Args:
        source: A checkpoint, or a directory of checkpoints, whose newest one is exported.
        target: The new file.
        comm: The ranks of the call.
        prefix: Export only tensors whose names begin with this text, and remove the text from the names.

    Returns:
        Path, number of tensors and size of the file.

    Raises:
        CheckpointError: On every rank, for damage, if no tensor has the prefix, if the file cannot be written, and
            for a dtype that torch.save does not support, such as int1.
    """
    target = Path(target)
    checkpoint = open_checkpoint(source, comm=comm)
    chosen = select(checkpoint, prefix)

    def save() -> int:
        partial = _partial_of(target)
        try:
            with explained(action="write", path=partial), open(partial, "xb") as file:
                torch.save({name: checkpoint.read(tensor.name) for name, tensor in chosen.items()}, file)
                file.flush()
                os.fsync(file.fileno())
                num_bytes = file.tell()
            _commit(partial, target)
        except BaseException as error:  # also KeyboardInterrupt: a partial file may be large
            with suppress(OSError):
                partial.unlink()
            if isinstance(error, RuntimeError):  # from torch's writer, for a full disk among others
                raise CheckpointError(f"cannot write {partial}: {str(error).splitlines()[0]}") from error
            if isinstance(error, KeyError):  # from torch, for a dtype without a storage class
                raise CheckpointError(f"torch.save does not support this dtype: {error.args[0]}") from error
            raise
        return num_bytes

    num_bytes = on_rank_0(comm, save, os_error=CheckpointError)
    return Exported(path=target, num_tensors=len(chosen), num_bytes=num_bytes, step=checkpoint.step)


def select(checkpoint: Checkpoint, prefix: str) -> dict[str, StoredTensor]:
    """Returns the tensors whose names begin with `prefix`, by their names without the prefix.

    Raises CheckpointError if no name begins with `prefix`.
    """
    found = {
        name[len(prefix) :]: tensor for name, tensor in checkpoint.tensors.items() if name.startswith(prefix)
    }
    if not found:
        what = f"no tensor under {prefix!r}" if prefix else "no tensor"
        raise CheckpointError(f"{checkpoint.path} has {what}: nothing to export", agreed=True)
    return found


def place_tensors(tensors: Mapping[str, StoredTensor]) -> list[_Placed]:
    """Lays out the tensors one after another in the data section of a safetensors file.

    Tensors with the widest elements come first, so that each tensor is aligned to its element size.
    """
    placed, offset = [], 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].elem_bytes, item[0])):
        placed.append(_Placed(name=name, tensor=tensor, offset=offset))
        offset += tensor.num_bytes
    return placed


def safetensors_header(placed: Sequence[_Placed], *, about: Mapping[str, str]) -> bytes:
    """Returns the start of a safetensors file: 8 bytes with the length of the header, then the header.

    `placed` are the tensors with their offsets, and `about` are texts about the file. The header is JSON, padded with
    spaces to a multiple of 8 bytes. Raises CheckpointError for dtypes and names that the format does not support.
    """
    unknown = sorted({entry.tensor.dtype for entry in placed} - SAFETENSORS_DTYPES.keys())
    if unknown:
        first = next(entry for entry in placed if entry.tensor.dtype == unknown[0])
        raise CheckpointError(
            f"safetensors has no {', '.join(unknown)} (tensor {first.tensor.name!r}): "
            "choose other tensors with --prefix, or export a state dict to a name ending in .pt",
            agreed=True,
        )
    header: dict[str, Any] = {"__metadata__": dict(about)}
    for entry in placed:
        if entry.name in header or any(0xD800 <= ord(char) <= 0xDFFF for char in entry.name):
            raise CheckpointError(f"safetensors does not allow the tensor name {entry.name!r}", agreed=True)
        header[entry.name] = {
            "dtype": SAFETENSORS_DTYPES[entry.tensor.dtype],
            "shape": list(entry.tensor.shape),
            "data_offsets": [entry.offset, entry.offset + entry.tensor.num_bytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _regions(placed: Sequence[_Placed]) -> Iterator[tuple[_Placed, Box, int]]:
    """Divides the tensors in `placed` into boxes (rectangular regions) of at most REGION_BYTES bytes.

    Yields each tensor, box, and byte offset of the box in the data section of the safetensors file.
    """
    for entry in placed:
        offset = entry.offset
        for region in split_box(
            whole_box(entry.tensor.shape), max_elems=REGION_BYTES // entry.tensor.elem_bytes
        ):
            yield entry, region, offset
            offset += region.num_elems * entry.tensor.elem_bytes


def _write_regions(
    partial: Path,
    checkpoint: Checkpoint,
    placed: Sequence[_Placed],
    *,
    begin: int,
    comm: Collective,
    progress: Callable[[int, int], None],
) -> None:
    """Writes this rank's share of the tensors to the file `partial`, and flushes it to disk.

    `placed` are the tensors with their offsets in the data section, which begins at byte `begin` of the file.
    """
    mine = list(_regions(placed))[comm.rank :: comm.num_ranks]
    total = sum(region.num_elems * entry.tensor.elem_bytes for entry, region, _ in mine)
    done = 0
    with explained(action="open", path=partial):
        fd = os.open(partial, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for entry, region, offset in mine:
            data = checkpoint.read(entry.tensor.name, offset=region.offset, shape=region.shape)
            content = byte_view(data).numpy().data
            with explained(action="write", path=partial):
                write_fully(fd, content, offset=begin + offset)
            done += content.nbytes
            progress(done, total)
        with explained(action="write", path=partial):
            os.fsync(fd)
    finally:
        os.close(fd)


def _partial_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial-{secrets.token_hex(8)}")


def _create(target: Path, *, header: bytes, num_bytes: int) -> str:
    """Creates the exported file under a temporary name, with header and full length. Returns its path. For rank 0."""
    partial = _partial_of(target)
    with explained(action="write", path=partial):
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_fully(fd, memoryview(header), offset=0)
            os.ftruncate(fd, num_bytes)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
    return str(partial)


def _commit(partial: Path, target: Path) -> None:
    with explained(action="rename the finished file to", path=target):
        os.rename(partial, target)
        sync_directory(target.parent)
