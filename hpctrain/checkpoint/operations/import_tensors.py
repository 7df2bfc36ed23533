"""Makes a checkpoint from a safetensors file or a torch state dict, which is memory-mapped, not read into memory."""

from __future__ import annotations

import json
import math
import mmap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace as replace_fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.checkpoint.files.checkpoint_names import finished_newest_first, step_of
from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.format.boxes import Box, boxes_of_range, split_box
from hpctrain.checkpoint.format.dtypes import dtype_named, empty_tensor
from hpctrain.checkpoint.format.metadata import StoredPiece, StoredTensor
from hpctrain.checkpoint.format.state import Replicated, State, TensorShard
from hpctrain.checkpoint.loading.check_structure import is_checkpoint, opened
from hpctrain.checkpoint.loading.checkpoint import Checkpoint
from hpctrain.checkpoint.loading.restore import MODEL_PREFIX
from hpctrain.checkpoint.operations.torch_archives import Record, mapped_tensor, open_archive
from hpctrain.checkpoint.saving.save import SaveResult, save
from hpctrain.comm import Collective, agreed, on_rank_0, run_threads
from hpctrain.errors import CheckpointError, UsageError

# Memory-maps the tensors of a checkpoint, to save it again without reading it into memory.
#
# Does not verify the content: the caller must verify the checkpoint first. If a mapped file is truncated or
# its disk fails, the process ends with SIGBUS.


# Maximum size of the shards that are distributed over the ranks: much smaller than a share, for balanced shares.
SHARD_BYTES = 32 << 20
THREADS_TIMEOUT_S = 7 * 86400.0  # a copy can take terabytes


def map_items(checkpoint: Checkpoint, *, rank: int, num_ranks: int) -> list[Replicated | TensorShard]:
    """Returns the tensors of `checkpoint`, memory-mapped, as rank `rank` must pass them to a save. Not collective.

    The save is one by `num_ranks` ranks. A tensor that is stored in one HDF5 dataset is `Replicated`: every rank maps
    it, and the save divides it. A tensor in several datasets is distributed over the ranks as shards, balanced in
    bytes. The tensors use no memory but the page cache. Raises CheckpointError.
    """
    tensors = checkpoint.tensors
    numbers = {piece.file for tensor in tensors.values() for piece in tensor.pieces if piece.box.num_elems}
    files = {number: map_file(checkpoint.files[number]) for number in sorted(numbers)}
    items: list[Replicated | TensorShard] = []
    shards: list[TensorShard] = []
    for tensor in tensors.values():
        if math.prod(tensor.shape) == 0:
            items.append(Replicated(name=tensor.name, tensor=empty_tensor(tensor.shape, dtype=tensor.dtype)))
        elif len(tensor.pieces) == 1:
            piece = tensor.pieces[0]
            content = _content(files[piece.file], piece, tensor=tensor)
            items.append(Replicated(name=tensor.name, tensor=content.reshape(tensor.shape)))
        else:
            shape = tuple(tensor.shape)
            for piece in tensor.pieces:
                content = _content(files[piece.file], piece, tensor=tensor)
                shards += [
                    TensorShard(name=tensor.name, tensor=part, global_shape=shape, offset=box.offset)
                    for box, part in _shards_of(content, piece, tensor=tensor)
                ]
    return [*items, *shards_of_rank(shards, rank=rank, num_ranks=num_ranks)]


def shards_of_rank(shards: Sequence[TensorShard], *, rank: int, num_ranks: int) -> list[TensorShard]:
    """Divides `shards` among the ranks, and returns the consecutive part that `rank` passes to a save.

    The parts of all ranks have about the same size in bytes.
    """
    total_bytes = sum(shard.tensor.nbytes for shard in shards)
    found, begin = [], 0
    for shard in shards:
        middle = begin + shard.tensor.nbytes // 2
        if middle * num_ranks // total_bytes == rank:
            found.append(shard)
        begin += shard.tensor.nbytes
    return found


def save_in_files(
    state_of: Callable[[int, int], State],
    *,
    directory: Path,
    step: int,
    files: int,
    comm: Collective,
    **options: Any,
) -> SaveResult:
    """Saves the state `state_of(rank, num_ranks)` in `files` files, and keeps older checkpoints. Collective.

    Each file needs at least one rank, so a single process writes several files with that many threads in the role of
    ranks. `options` are options of `save`. Raises the errors of `save`, and UsageError if there are several ranks, but
    fewer than files.
    """

    def save_part(part: Collective) -> SaveResult:
        state = agreed(part, lambda: state_of(part.rank, part.num_ranks), os_error=CheckpointError)
        # All ranks map the same files, so their copies need not be compared.
        return save(
            state,
            directory=directory,
            step=step,
            comm=part,
            keep=None,
            files=files,
            replica_check="off",
            **options,
        )

    if files <= comm.num_ranks:
        return save_part(comm)
    if comm.num_ranks > 1:
        raise UsageError(
            f"{files} files by {comm.num_ranks} ranks: start one rank, or at least as many as files",
            agreed=True,
        )
    return run_threads(files, save_part, timeout_s=THREADS_TIMEOUT_S)[0]


def map_file(path: Path) -> NDArray[Any]:
    """Returns the memory-mapped file as bytes: uint8, shape (length of the file,), read-only."""
    with opened(path) as fd, explained(action="map", path=path):
        return np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), dtype=np.uint8)


def _content(file: NDArray[Any], piece: StoredPiece, *, tensor: StoredTensor) -> torch.Tensor:
    """Returns the elements of `piece`, an HDF5 dataset with a part of a tensor: shape (num_elems,).

    The result is a view of `file`, the bytes of the memory-mapped file. Do not write to it: its memory is mapped
    read-only, which torch cannot express.
    """
    num_bytes = piece.box.num_elems * tensor.elem_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that it is not writable
        content = torch.from_numpy(file[piece.file_offset : piece.file_offset + num_bytes])
        return content.view(dtype_named(tensor.dtype))


def _shards_of(
    content: torch.Tensor, piece: StoredPiece, *, tensor: StoredTensor
) -> list[tuple[Box, torch.Tensor]]:
    """Divides `piece`, an HDF5 dataset with a part of a tensor, into boxes of at most SHARD_BYTES bytes.

    Returns the boxes (offset and shape) in the coordinates of the tensor, each with its elements. `content` contains
    the elements of the piece: shape (num_elems,).
    """
    if tensor.view == tensor.shape:
        boxes = [piece.box]
    else:
        first = piece.box.offset[0]
        boxes = boxes_of_range(tensor.shape, start=first, stop=first + piece.box.num_elems)
    found, start = [], 0
    for box in boxes:
        for part in split_box(box, max_elems=max(1, SHARD_BYTES // tensor.elem_bytes)):
            found.append((part, content[start : start + part.num_elems].reshape(part.shape)))
            start += part.num_elems
    return found


# Makes a checkpoint from a safetensors file or a torch state dict, which is memory-mapped, not read into
# memory.


INDEX_SUFFIX = ".safetensors.index.json"
STATE_DICT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
MAX_INDEX_BYTES = 256 << 20
_LIGHTNING = "pytorch-lightning_version"  # key of every checkpoint of Lightning
MAX_REPEATED = 16
MIN_CLAIM_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, eq=False)
class Foreign:
    """Tensors, step and document that were read from a file in another format, such as safetensors.

    `step` and `document` are not None only if `export_safetensors` wrote the file, with all tensors of a checkpoint.
    """

    tensors: Mapping[str, torch.Tensor]
    step: int | None = None
    document: Mapping[str, Any] | None = None


def import_tensors(
    source: Path | str,
    directory: Path | str,
    *,
    comm: Collective,
    step: int | None = None,
    prefix: str | None = None,
    key: str | None = None,
    strip: str = "",
    files: int = 1,
    replace: bool = False,
    **options: Any,
) -> SaveResult:
    """Makes the checkpoint `directory/step-<step>` from the tensors in a file. Collective.

    Files are memory-mapped; only torch's file format before 1.6 is read into memory, on every rank. Nothing in a
    file is run. Other checkpoints in `directory` are kept.

    Args:
        source: A safetensors file (x.safetensors), the index of several such files (x.safetensors.index.json), or a
            state dict written by torch.save (x.pt, .pth, .bin, .ckpt). A state dict is read with weights_only=True,
            or as plain data if the file also contains objects of classes, as files of Lightning do.
        directory: Directory of checkpoints in which the new one is created.
        comm: The ranks that share the work.
        step: Step of the new checkpoint; required unless `export_safetensors` wrote the file from a whole
            checkpoint.
        prefix: Text put before every name. None: "" if the file holds a whole checkpoint, otherwise `model/`, where
            a run looks for weights.
        key: Key of the state dict in a file that contains several objects. None: "state_dict" in a file of
            Lightning.
        strip: Import only tensors whose names begin with this text, and remove the text from the names, such as
            "model." of a LightningModule.
        files: Number of files. 1: a single file; larger: a folder of that many files.
        replace: Replace an existing checkpoint of the same step.
        **options: Options of `save`.

    Returns:
        The result of the save.

    Raises:
        CheckpointError: On every rank, if the file is invalid, or if the step exists and `replace` is False.
        UsageError: On every rank, for an invalid argument, and if the file has an unknown suffix or no step.
    """
    source, directory = Path(source), Path(directory)
    foreign = agreed(
        comm, lambda: _stripped(read_foreign(source, key=key), strip, source=source), os_error=CheckpointError
    )
    step = foreign.step if step is None else step
    if step is None:
        raise UsageError(f"{source} does not record a step: give --step", agreed=True)
    on_rank_0(comm, lambda: refuse_existing(directory, step=step, replace=replace))
    if prefix is None:
        prefix = MODEL_PREFIX if foreign.document is None else ""
    document = foreign.document
    if document is None:
        document = {"imported": {"file": source.name, "num_tensors": len(foreign.tensors)}}
    items = [
        Replicated(name=f"{prefix}{name}", tensor=tensor.detach()) for name, tensor in foreign.tensors.items()
    ]
    state = State(items=items, document=document)
    return save_in_files(
        lambda rank, num_ranks: state, directory=directory, step=step, files=files, comm=comm, **options
    )


def refuse_existing(directory: Path, *, step: int, replace: bool) -> None:
    """Raises CheckpointError if `directory` has a checkpoint of step `step`, unless `replace` is True. For rank 0.

    Raises UsageError if `directory` is itself a checkpoint, or is named like one.
    """
    if directory.suffix == ".h5" or is_checkpoint(directory):
        raise UsageError(
            f"{directory} is a checkpoint or has the name of one: give the directory in which to create step-<step>"
        )
    there = [path for path in finished_newest_first(directory) if step_of(path) == step]
    if there and not replace:
        raise CheckpointError(f"{there[0]} exists: choose another step or directory, or give --replace")


def read_foreign(source: Path, *, key: str | None = None) -> Foreign:
    """Reads a file in another format, such as safetensors. The tensors are memory-mapped. Not collective.

    `key` is the key of the state dict in a file of torch.save that contains several objects. Raises CheckpointError if
    the file is invalid, and UsageError if its kind is not supported.
    """
    if not source.is_file():
        raise CheckpointError(f"{source} is not a file")
    if source.name.endswith(STATE_DICT_SUFFIXES):
        return Foreign(tensors=_read_state_dict(source, key=key))
    if key is not None:
        raise UsageError(f"--key is only for files written by torch.save; {source.name} is not one")
    if source.name.endswith(INDEX_SUFFIX):
        return _read_index(source)
    if source.suffix == ".safetensors":
        return _read_safetensors(source)
    raise UsageError(
        f"{source.name}: a name ending in .safetensors, {INDEX_SUFFIX} or {', '.join(STATE_DICT_SUFFIXES)} is expected"
    )


def _read_safetensors(source: Path) -> Foreign:
    try:
        from safetensors import SafetensorError, __version__, safe_open
    except ImportError as error:
        raise CheckpointError(
            f"reading {source.name} needs safetensors (pip install 'hpctrain[formats]'): {error}"
        ) from error
    try:
        with explained(action="read", path=source), safe_open(source, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"{source} is not a valid safetensors file to safetensors {__version__}: {error}. "
            "Newer releases know more types of tensors"
        ) from error
    if "document" not in about or "hpctrain" not in about:
        return Foreign(tensors=tensors)
    try:
        document, step = json.loads(about["document"]), int(about["step"])
    except (ValueError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{source}: its step or document is invalid: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{source}: its document is not a JSON object")
    return Foreign(tensors=tensors, step=step, document=document)


def _read_index(source: Path) -> Foreign:
    """Reads tensors from several safetensors files: the index maps each tensor's name to a file in its folder."""
    try:
        with explained(action="read", path=source), open(source, "rb") as file:
            by_name = json.loads(file.read(MAX_INDEX_BYTES))["weight_map"]
        files = sorted(set(by_name.values()))
        # The index must not make us open files outside its folder.
        if not all(isinstance(name, str) and name == Path(name).name and name != ".." for name in files):
            raise ValueError("a file in the index is not a plain file name")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{source} is not an index of safetensors files: {error}") from error
    tensors: dict[str, torch.Tensor] = {}
    for name in files:
        found = _read_safetensors(source.with_name(name)).tensors
        tensors.update((tensor, found[tensor]) for tensor in found if by_name.get(tensor) == name)
    missing = sorted(by_name.keys() - tensors.keys())
    if missing:
        raise CheckpointError(
            f"{source}: {by_name[missing[0]]} should hold {missing[0]!r}, but it does not"
            + (f"; and {len(missing) - 1} more" if len(missing) > 1 else "")
        )
    return Foreign(tensors=tensors)


def _read_state_dict(source: Path, *, key: str | None) -> dict[str, torch.Tensor]:
    with explained(action="open", path=source), open(source, "rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"  # otherwise torch's format before 1.6, which cannot be mapped
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = torch.load(source, map_location="cpu", weights_only=True, mmap=is_zip)
    # Any exception: a malicious file can make the restricted unpickler raise anything.
    except Exception as error:
        if is_zip:
            return _read_as_data(source, key=key)
        raise CheckpointError(
            f"{source} cannot be read as a state dict: {type(error).__name__}: {error}\n(Of a file that is no zip "
            "archive only tensors and plain containers are accepted, weights_only=True: save its state dict alone)"
        ) from error
    found = _entry_of(value, key=key, source=source)
    others = [name for name, item in found.items() if not isinstance(item, torch.Tensor)]
    if others or not found:
        raise CheckpointError(_not_plain(found, source, key))
    _refuse_odd(found, source=source)
    return {str(name): tensor for name, tensor in found.items()}


def _read_as_data(source: Path, *, key: str | None) -> dict[str, torch.Tensor]:
    """Returns the tensors of a state dict from a file of torch.save that also contains objects of classes.

    The objects are not created; their descriptions are read as plain data. `key` is the key of the state dict in the
    file. None: the file is the state dict, or PyTorch Lightning wrote the file.
    """
    with open_archive(source) as archive:
        found = _entry_of(archive.description(verify=True), key=key, source=source)
        if not found or not all(
            isinstance(item, Record) and "_rebuild_" in item.name for item in found.values()
        ):
            raise CheckpointError(_not_plain(found, source, key))
        file = map_file(source)
        tensors = {}
        for name, item in found.items():
            try:
                place = archive.locate(item, verify=False)
            except CheckpointError as error:
                raise CheckpointError(f"tensor {name!r}: {error}") from error
            tensors[name] = (
                mapped_tensor(file, place, where=source.name)
                if math.prod(place.shape)
                else empty_tensor(place.shape, dtype=place.dtype)
            )
    _refuse_odd(tensors, source=source)
    return {str(name): tensor for name, tensor in tensors.items()}


def _entry_of(value: Any, *, key: str | None, source: Path) -> Mapping[Any, Any]:
    """Returns the entry `key` of `value`, the content of a file that torch.save wrote.

    If `key` is None, returns the state dict in a file that PyTorch Lightning wrote, and `value` itself for other files.
    """
    if key is None and isinstance(value, Mapping) and _LIGHTNING in value:
        key = "state_dict"
    where = source.name
    if key is not None:
        if not isinstance(value, Mapping) or key not in value:
            raise CheckpointError(f"{where} has no entry {key!r}; {_entries(value)}")
        value, where = value[key], f"{where}[{key!r}]"
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where} is a {_kind_of(value)}, not a state dict")
    return value


def _not_plain(found: Mapping[Any, Any], source: Path, key: str | None) -> str:
    where = source.name if key is None else f"{source.name}[{key!r}]"
    return f"{where} is not a plain state dict: {_entries(found)}. Name the entry to import with --key"


def _stripped(foreign: Foreign, strip: str, *, source: Path) -> Foreign:
    """Returns those tensors whose names begin with `strip`, by their names without this text.

    Raises CheckpointError if there are none.
    """
    if not strip:
        return foreign
    found = {name[len(strip) :]: t for name, t in foreign.tensors.items() if name.startswith(strip)}
    if not found or "" in found:
        names = ", ".join(map(repr, list(foreign.tensors)[:4]))
        raise CheckpointError(f"{source} has no tensor below {strip!r} (--strip); it has {names}, ...")
    return replace_fields(foreign, tensors=found, document=None)


def _refuse_odd(tensors: Mapping[Any, torch.Tensor], *, source: Path) -> None:
    """Raises CheckpointError for tensors of a state dict that cannot be imported.

    These are tensors with colliding names, nested tensors, and tensors that together are far larger than the file.
    """
    if len({str(name) for name in tensors}) < len(tensors):
        raise CheckpointError(f"{source}: two of its keys are equal as strings, such as 1 and '1'")
    nested = [name for name, tensor in tensors.items() if tensor.is_nested]
    if nested:
        raise CheckpointError(f"{source}: {nested[0]!r} is a nested tensor: only dense ones can be stored")
    # With strides of 0 a tensor can repeat a few bytes any number of times, and several tensors can share bytes.
    claimed_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    file_bytes = source.stat().st_size
    if claimed_bytes > max(MAX_REPEATED * file_bytes, MIN_CLAIM_BYTES):
        raise CheckpointError(
            f"{source} is {file_bytes} bytes long, but the total size of its tensors is {claimed_bytes}: more than "
            f"{MAX_REPEATED} times as long"
        )


def _entries(value: Any) -> str:
    """Returns a description of what `value` contains, for a message."""
    if not isinstance(value, Mapping):
        return f"it is a {_kind_of(value)}"
    kinds = [f"{name!r} ({_kind_of(item)})" for name, item in list(value.items())[:8]]
    more = f", and {len(value) - 8} more" if len(value) > 8 else ""
    return f"it holds {', '.join(kinds)}{more}" if kinds else "it is empty"


def _kind_of(value: Any) -> str:
    if isinstance(value, Record):
        return "Tensor" if value.name.startswith("torch._utils._rebuild_") else value.name
    return type(value).__name__
