"""Exports a checkpoint in the format of torch.distributed.checkpoint, so that `dcp.load` reads it on any ranks."""

from __future__ import annotations

import os
import pickle
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

import torch

from hpctrain.checkpoint.dcp import names
from hpctrain.checkpoint.dcp.import_dcp import OWN_ENTRY
from hpctrain.checkpoint.dcp.metadata import METADATA_FILE, VERSION
from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.format.boxes import Box, split_box, whole
from hpctrain.checkpoint.format.dtypes import dtype_named
from hpctrain.checkpoint.format.metadata import StoredTensor
from hpctrain.checkpoint.format.state import SEPARATOR
from hpctrain.checkpoint.format.typed_values import decode, get_inline
from hpctrain.checkpoint.loading.checkpoint import Checkpoint, open_checkpoint
from hpctrain.checkpoint.loading.partial_load import MODEL_PREFIX
from hpctrain.checkpoint.operations.export import REGION_BYTES, Exported, select
from hpctrain.comm import Collective, agreed, all_gather_json, doing, on_rank_0
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.storage import sync_directory
from hpctrain.version import __version__


@dataclass(frozen=True, kw_only=True, slots=True)
class _Unit:
    """What one archive holds: a box of a tensor, or an object. number: of this box among those of its tensor."""

    key: str
    content: StoredTensor | Any
    box: Box | None = None
    number: int = 0


def export_dcp(
    source: Path | str,
    directory: Path | str,
    *,
    comm: Collective,
    weights: bool = False,
    under: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Writes a checkpoint to `directory` in DCP's default format, for `torch.distributed.checkpoint.load`. Collective.

    The ranks share the work; each holds one region of REGION_BYTES at a time. Any number of ranks can load the result,
    sharded or not: a tensor is written in chunks of such regions. All that is read is verified, and the directory gets
    its name only when it is complete.

    Names are those of `import_dcp` in reverse: `model/0.weight` becomes `model.0.weight` and
    `optimizer/0.weight::exp_avg` becomes `optim.state.0.weight.exp_avg`, where the state dict
    {"model": ..., "optim": ...} of `get_state_dict` looks for them. The optimizer's groups, scalars and other objects
    of the document are written as `torch.save` does it. Step and document go into the entry "hpctrain", so that
    `import_dcp` restores the same checkpoint.

    Args:
        source: a checkpoint, or a directory, whose newest one is taken.
        directory: must not exist, or be empty.
        weights: only the model, under the keys of its own state dict, and nothing else.
        under: put before every key, such as "app" for a state dict {"app": {"model": ...}}.
        progress: called with the bytes of this rank's share written so far, and with the share.

    Raises on every rank: CheckpointError for damage, for files that cannot be written, and for names or dtypes that the
    format cannot hold; UsageError if `directory` is in use.
    """
    target = Path(directory)
    with doing(comm, f"exporting to {target}"):
        on_rank_0(comm, lambda: _refuse_existing(target), os_error=CheckpointError)
        checkpoint = open_checkpoint(source, comm=comm)
        tensors = select(checkpoint, MODEL_PREFIX if weights else "")
        root = tuple(under.split(".")) if under else ()
        paths = {name: (*root, *((name,) if weights else names.path_of(name))) for name in tensors}
        objects = [] if weights else [((*root, *path), value) for path, value in _objects(checkpoint)]
        keys = [names.key_of(path) for path in [*paths.values(), *(path for path, _ in objects)]]
        key, count = Counter(keys).most_common(1)[0]
        if count > 1:
            raise CheckpointError(
                f"{checkpoint.path}: {count} of its entries have the key {key!r} in DCP", agreed=True
            )
        units = [_Unit(key=names.key_of(path), content=value) for path, value in objects]
        for name, tensor in tensors.items():
            units += _units_of(names.key_of(paths[name]), tensor)
        partial = Path(on_rank_0(comm, lambda: _create(target), os_error=CheckpointError))
        try:
            written = agreed(
                comm,
                lambda: _write(partial, checkpoint, units, comm=comm, progress=progress),
                os_error=CheckpointError,
            )
            parts = all_gather_json(comm, written)
            planner_data = dict(zip(keys, [*paths.values(), *(path for path, _ in objects)], strict=True))
            num_bytes = on_rank_0(
                comm,
                lambda: _commit(partial, target, units, parts=parts, paths=planner_data),
                os_error=CheckpointError,
            )
        except BaseException:  # also KeyboardInterrupt: partial files may be large
            if comm.rank == 0:
                with suppress(OSError):
                    shutil.rmtree(partial)
            raise
    return Exported(path=target, num_tensors=len(tensors), num_bytes=num_bytes, step=checkpoint.step)


def _objects(checkpoint: Checkpoint) -> list[tuple[names.Path, Any]]:
    """Returns what is not a tensor, with its path. Entries of the document that have another form than a run or
    `import_dcp` gives them are only in the document."""
    document = dict(checkpoint.document)
    own = {"version": __version__, "step": checkpoint.step, "document": document}
    found: list[tuple[names.Path, Any]] = [((OWN_ENTRY,), own)]
    optimizer = document.get("optimizer")
    if isinstance(optimizer, Mapping):
        groups, scalars = optimizer.get("groups"), optimizer.get("scalars")
        for number, group in enumerate(groups if isinstance(groups, list) else ()):
            if isinstance(group, Mapping) and isinstance(group.get("options"), Mapping):
                options = {"params": group.get("parameters", []), **group["options"]}
                at = (names.OPTIMIZER, names.GROUPS, number)
                found += [((*at, key), _value(value)) for key, value in options.items()]
        for path, value in (scalars if isinstance(scalars, Mapping) else {}).items():
            found.append(((names.OPTIMIZER, names.STATE, *path.split(SEPARATOR)), _value(value)))
    if "imported" in document:
        found += [(tuple(entry["path"]), entry["value"]) for entry in document.get("objects", ())]
    return found


def _value(encoded: Any) -> Any:
    """Returns the value that a document holds; its JSON if it refers to tensors of the checkpoint."""
    try:
        return decode(encoded, get=get_inline, where="the document")
    except CheckpointError:
        return encoded


def _units_of(key: str, tensor: StoredTensor) -> list[_Unit]:
    box = whole(tensor.shape)
    boxes = list(split_box(box, max_elems=REGION_BYTES // tensor.elem_bytes)) or [box]
    return [_Unit(key=key, content=tensor, box=part, number=number) for number, part in enumerate(boxes)]


def _refuse_existing(target: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"{target} exists: choose another name")


def _create(target: Path) -> str:
    """Creates the directory under a temporary name. Rank 0. Returns its path."""
    partial = target.with_name(f".{target.name}.partial-{secrets.token_hex(8)}")
    with explained(action="create", path=partial):
        partial.mkdir(parents=True)
    return str(partial)


def _file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _write(
    partial: Path,
    checkpoint: Checkpoint,
    units: Sequence[_Unit],
    *,
    comm: Collective,
    progress: Callable[[int, int], None],
) -> list[tuple[int, int]]:
    """Writes this rank's archives, one after another. Returns the first byte and the length of each."""
    mine = units[comm.rank :: comm.num_ranks]
    total = sum(_num_bytes(unit) for unit in mine)
    done, places = 0, []
    path = partial / _file_of(comm.rank)
    if not mine:
        return []
    with explained(action="write", path=path), open(path, "xb") as file:
        for unit in mine:
            begin = file.tell()
            value = unit.content
            if unit.box is not None:
                value = checkpoint.read(unit.content.name, offset=unit.box.offset, shape=unit.box.shape)
            _save(value, file, unit=unit)
            places.append((begin, file.tell() - begin))
            done += _num_bytes(unit)
            progress(done, total)
        file.flush()
        os.fsync(file.fileno())
    return places


def _save(value: Any, file: IO[bytes], *, unit: _Unit) -> None:
    try:
        torch.save(value, file)
    except RuntimeError as error:  # from torch's writer, for a full disk among others
        raise CheckpointError(f"cannot write {file.name}: {str(error).splitlines()[0]}") from error
    except KeyError as error:  # from torch, for a dtype without a storage class
        raise CheckpointError(
            f"{unit.key!r}: torch.save does not support the dtype {error.args[0]}"
        ) from error


def _num_bytes(unit: _Unit) -> int:
    return 0 if unit.box is None else unit.box.num_elems * unit.content.elem_bytes


def _commit(
    partial: Path,
    target: Path,
    units: Sequence[_Unit],
    *,
    parts: Sequence[Sequence[Sequence[int]]],
    paths: Mapping[str, names.Path],
) -> int:
    """Writes the metadata and renames the directory. Rank 0. Returns the length of all files."""
    # Imported here, since it takes a second. _StorageInfo is not public, but it is what DCP's metadata consists of.
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, Any] = {}
    storage = {}
    for number, unit in enumerate(units):
        rank = number % len(parts)
        begin, length = parts[rank][number // len(parts)]
        index = MetadataIndex(unit.key)
        if unit.box is None:
            entries[unit.key] = BytesStorageMetadata()
        else:
            if unit.number == 0:
                entries[unit.key] = TensorStorageMetadata(
                    properties=TensorProperties(dtype=dtype_named(unit.content.dtype)),
                    size=torch.Size(unit.content.shape),
                    chunks=[],
                )
            offset = torch.Size(unit.box.offset)
            index = MetadataIndex(unit.key, offset, unit.number)
            entries[unit.key].chunks.append(
                ChunkStorageMetadata(offsets=offset, sizes=torch.Size(unit.box.shape))
            )
        storage[index] = _StorageInfo(relative_path=_file_of(rank), offset=begin, length=length)
    metadata = Metadata(
        state_dict_metadata=entries,
        planner_data=dict(paths),
        storage_data=storage,
        storage_meta=StorageMeta(checkpoint_id=str(target), save_id=partial.name[-16:]),
        # PyTorch 2.8 has none.
        **({"version": VERSION} if "version" in {field.name for field in fields(Metadata)} else {}),
    )
    with explained(action="write", path=partial / METADATA_FILE), open(partial / METADATA_FILE, "xb") as file:
        pickle.dump(metadata, file)
        file.flush()
        os.fsync(file.fileno())
    with explained(action="rename the finished directory to", path=target):
        sync_directory(partial)
        os.rename(partial, target)
        sync_directory(target.parent)
        return sum(path.stat().st_size for path in target.iterdir())
