"""Converts checkpoints of torch.distributed.checkpoint (DCP) to checkpoints of hpctrain, and back."""

from __future__ import annotations

import json
import math
import os
import pickle
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

import torch

from hpctrain.checkpoint.dcp import metadata as names
from hpctrain.checkpoint.dcp.metadata import (
    GROUPS,
    METADATA_FILE,
    VERSION,
    ArchiveLocation,
    DcpMetadata,
    DcpObject,
    DcpTensor,
    below,
    key_of,
    optimizer_path,
    read_metadata,
    tensor_name,
)
from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.format.boxes import Box, split_box, whole_box
from hpctrain.checkpoint.format.dtypes import dtype_named, empty_tensor
from hpctrain.checkpoint.format.metadata import StoredTensor
from hpctrain.checkpoint.format.state import SEPARATOR, Replicated, State, TensorShard
from hpctrain.checkpoint.format.typed_values import decode, get_inline
from hpctrain.checkpoint.loading.checkpoint import Checkpoint, open_checkpoint
from hpctrain.checkpoint.loading.restore import MODEL_PREFIX
from hpctrain.checkpoint.operations.export import REGION_BYTES, Exported, select
from hpctrain.checkpoint.operations.import_tensors import (
    SHARD_BYTES,
    map_file,
    refuse_existing,
    save_in_files,
    shards_of_rank,
)
from hpctrain.checkpoint.operations.torch_archives import Located, mapped_tensor, open_archive
from hpctrain.checkpoint.saving.save import SaveResult
from hpctrain.comm import Collective, agreed, all_gather_json, doing, on_rank_0
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.storage import sync_directory
from hpctrain.version import __version__

# Finds tensors and objects in the archives of a checkpoint of torch.distributed.checkpoint.


def locate_tensor(
    directory: Path, place: ArchiveLocation, *, dtype: str, shape: Sequence[int], verify: bool
) -> Located:
    """Returns where the bytes of the tensor in an archive of torch.save lie in the archive's file.

    `place` is the location of the archive in the checkpoint `directory`. With `verify`, the content is also compared
    with the archive's CRC-32. Raises CheckpointError if the archive does not hold one tensor of this dtype and shape.
    """
    with open_archive(directory / place.file, begin=place.begin, num_bytes=place.num_bytes) as archive:
        found = archive.locate(archive.description(verify=verify), verify=verify)
        if found.dtype != dtype or found.shape != tuple(shape):
            raise CheckpointError(
                f"the archive holds {found.dtype} {list(found.shape)}, but the metadata says {dtype} {list(shape)}"
            )
    return found


def read_object(directory: Path, place: ArchiveLocation, *, verify: bool) -> Any:
    """Returns the value in an archive of torch.save, without unpickling, as `read_pickled_data` describes it.

    `place` is the location of the archive in the checkpoint `directory`. With `verify`, the bytes are compared with the
    archive's CRC-32. Raises CheckpointError.
    """
    with open_archive(directory / place.file, begin=place.begin, num_bytes=place.num_bytes) as archive:
        return archive.description(verify=verify)


def as_json(value: Any) -> Any:
    """Returns plain data (dicts, lists, tuples, text, numbers, bool, None) as JSON values, with tuples as lists.

    Raises CheckpointError for anything else.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the object is not plain data: {error}") from error


# Makes a checkpoint from a checkpoint of torch.distributed.checkpoint, whose files are memory-mapped.


OWN_ENTRY = "hpctrain"  # key of what export_dcp adds: step and document


@dataclass(frozen=True, kw_only=True, slots=True)
class DcpImport:
    """Result of `import_dcp`.

    Attributes:
        saved: The new checkpoint.
        num_tensors: Number of imported tensors.
        left_out: Objects of the DCP checkpoint that were not imported, since they are not plain data: maps the key of
            each object to the reason.
    """

    saved: SaveResult
    num_tensors: int
    left_out: Mapping[str, str]


def import_dcp(
    source: Path | str,
    directory: Path | str,
    *,
    comm: Collective,
    step: int | None = None,
    under: str = "",
    files: int = 1,
    replace: bool = False,
    verify: bool = True,
    **options: Any,
) -> DcpImport:
    """Converts a checkpoint of torch.distributed.checkpoint to the checkpoint `directory/step-<step>`. Collective.

    Nothing in the source is unpickled. Its files are memory-mapped and the ranks share the work, so memory does not
    grow with the model. Other checkpoints in `directory` are kept.

    Tensors get names as in a run's checkpoint: `model.0.weight` becomes `model/0.weight`, and
    `optim.state.0.weight.exp_avg`, as `get_state_dict` makes it, `optimizer/0.weight::exp_avg`; any other `a.b.c`
    becomes `a/b.c`. If all tensors are at the top level, as in a model's state dict, they get the prefix `model/`.
    Objects that are plain data go into the document: those of the optimizer under "optimizer" ("groups", "scalars"),
    the rest under "objects"; tuples become lists. Objects that are not plain data are left out and listed in the
    result.

    Args:
        source: Directory of the DCP checkpoint, in DCP's default format (FileSystemWriter), saved by any number of
            ranks.
        directory: Directory of checkpoints in which the new one is created.
        comm: The ranks that share the work.
        step: Step of the new checkpoint; required unless `export_dcp` wrote the source.
        under: Import only the entries below this path in the state dict (keys joined by dots), such as "app" of a state
            dict {"app": {"model": ...}}.
        files: Number of files. 1: a single file; larger: a folder of that many files.
        replace: Replace an existing checkpoint of the same step.
        verify: Compare the tensors' bytes with the CRC-32 that torch.save stores with them. Pass False for
            checkpoints written after `torch.serialization.set_crc32_options(False)`.
        **options: Options of `save`.

    Returns:
        The new checkpoint, and what was left out.

    Raises:
        CheckpointError: On every rank, if the source is damaged or incomplete, has content that cannot be stored,
            or if the step exists and `replace` is False.
        UsageError: On every rank, if `source` is not a DCP checkpoint, and for an invalid argument.
    """
    source, directory = Path(source), Path(directory)
    with doing(comm, f"importing {source}"):
        metadata = DcpMetadata.from_json(
            on_rank_0(comm, lambda: read_metadata(source).to_json(), os_error=CheckpointError)
        )
        tensors, objects = _selected(metadata, under, source=source)
        own_step, document, left_out = on_rank_0(
            comm,
            lambda: _document(objects, source=source, num_tensors=len(tensors), verify=verify),
            os_error=CheckpointError,
        )
        step = own_step if step is None else step
        if step is None:
            raise UsageError(f"{source} does not record a step: give --step", agreed=True)
        on_rank_0(comm, lambda: refuse_existing(directory, step=step, replace=replace))
        located = _locate(tensors, source, comm=comm, verify=verify)
        saved = save_in_files(
            lambda rank, num_ranks: State(
                items=_items(tensors, located, source, rank=rank, num_ranks=num_ranks), document=document
            ),
            directory=directory,
            step=step,
            files=files,
            comm=comm,
            **options,
        )
    return DcpImport(saved=saved, num_tensors=len(tensors), left_out=left_out)


def _selected(
    metadata: DcpMetadata, under: str, *, source: Path
) -> tuple[dict[str, DcpTensor], list[DcpObject]]:
    """Returns the tensors and the objects of a DCP checkpoint whose paths begin with `under`.

    The tensors are returned by their names in the new checkpoint. Raises CheckpointError if there are no tensors, or if
    several would get the same name.
    """
    tensors = [replace(t, path=path) for t in metadata.tensors if (path := below(t.path, under)) is not None]
    objects = [replace(o, path=path) for o in metadata.objects if (path := below(o.path, under)) is not None]
    if not tensors:
        top = sorted({str(tensor.path[0]) for tensor in metadata.tensors})
        where = f" below {under!r}; at its top are {', '.join(map(repr, top[:8]))}" if under and top else ""
        raise CheckpointError(f"{source} has no tensor{where}: nothing to import", agreed=True)
    is_ours = any(item.path == (OWN_ENTRY,) for item in objects)
    is_bare = not is_ours and all(len(tensor.path) == 1 for tensor in tensors)
    names = [f"{MODEL_PREFIX if is_bare else ''}{tensor_name(tensor.path)}" for tensor in tensors]
    ((name, count),) = Counter(names).most_common(1)
    if count > 1:
        raise CheckpointError(
            f"{source}: {count} of its tensors would be named {name!r}: choose one of them with --under",
            agreed=True,
        )
    return dict(zip(names, tensors, strict=True)), objects


def _document(objects: Sequence[DcpObject], *, source: Path, num_tensors: int, verify: bool) -> list[Any]:
    """Makes the document of the new checkpoint from the objects of the DCP checkpoint. Called on rank 0.

    Returns the step (or None), the document, and a dict with the key of each object that is left out and the reason.
    """
    values: list[tuple[tuple[str | int, ...], Any]] = []
    left_out: dict[str, str] = {}
    for item in objects:
        value = read_object(source, item.place, verify=verify)
        try:
            values.append((item.path, as_json(value)))
        except CheckpointError as error:
            left_out[key_of(item.path)] = str(error)
    for path, value in values:
        if path == (OWN_ENTRY,):
            try:
                if not isinstance(value["document"], dict) or type(value["step"]) is not int:
                    raise TypeError("step and document have other types")
                return [value["step"], value["document"], left_out]
            except (KeyError, TypeError) as error:
                raise CheckpointError(f"{source}: its entry {OWN_ENTRY!r} is invalid: {error}") from error
    document: dict[str, Any] = {"imported": {"directory": source.name, "num_tensors": num_tensors}}
    groups: dict[int, dict[str, Any]] = {}
    scalars: dict[str, Any] = {}
    others = []
    for path, value in values:
        found = optimizer_path(path)
        if found is None:
            others.append({"path": list(path), "value": value})
        elif found[0] == GROUPS:
            group = groups.setdefault(int(found[1]), {"parameters": [], "options": {}})
            if found[2] == "params":
                group["parameters"] = value
            else:
                group["options"][str(found[2])] = value
        else:
            scalars[SEPARATOR.join(map(str, found[1:]))] = value
    if groups or scalars:
        ordered = [groups[index] for index in sorted(groups)]
        document["optimizer"] = {"groups": ordered, "scalars": scalars}
    if others:
        document["objects"] = others
    return [None, document, left_out]


def _locate(
    tensors: Mapping[str, DcpTensor], source: Path, *, comm: Collective, verify: bool
) -> dict[str, list[Located]]:
    """Returns where the bytes of each tensor's chunks lie in the files. Collective: the ranks share the reading."""
    units = [(name, tensor, chunk) for name, tensor in tensors.items() for chunk in tensor.chunks]

    def own_part() -> list[list[Any]]:
        found = []
        for name, tensor, chunk in units[comm.rank :: comm.num_ranks]:
            try:
                place = locate_tensor(
                    source, chunk.place, dtype=tensor.dtype, shape=chunk.box.shape, verify=verify
                )
            except CheckpointError as error:
                raise CheckpointError(f"tensor {name!r}: {error}") from error
            found.append([place.file_offset, place.num_bytes, place.first, place.strides])
        return found

    parts = all_gather_json(comm, agreed(comm, own_part, os_error=CheckpointError))
    located: dict[str, list[Located]] = {name: [] for name in tensors}
    for number, (name, _, _) in enumerate(units):
        file_offset, num_bytes, first, strides = parts[number % comm.num_ranks][number // comm.num_ranks]
        located[name].append(
            Located(
                dtype=tensors[name].dtype,
                shape=tuple(tensors[name].chunks[len(located[name])].box.shape),
                file_offset=file_offset,
                num_bytes=num_bytes,
                first=first,
                strides=tuple(strides),
            )
        )
    return located


def _items(
    tensors: Mapping[str, DcpTensor],
    located: Mapping[str, Sequence[Located]],
    source: Path,
    *,
    rank: int,
    num_ranks: int,
) -> list[Replicated | TensorShard]:
    """Returns the memory-mapped tensors that rank `rank` of `num_ranks` ranks passes to the save.

    A tensor stored in one chunk is `Replicated`, the same on every rank. Tensors in several chunks become shards,
    which are distributed over the ranks.
    """
    names = sorted({chunk.place.file for tensor in tensors.values() for chunk in tensor.chunks})
    files = {name: map_file(source / name) for name in names}
    items: list[Replicated | TensorShard] = []
    shards: list[TensorShard] = []
    for name, tensor in tensors.items():
        if math.prod(tensor.shape) == 0:
            items.append(Replicated(name=name, tensor=empty_tensor(tensor.shape, dtype=tensor.dtype)))
            continue
        contents = [
            mapped_tensor(files[chunk.place.file], place, where=chunk.place.file)
            for chunk, place in zip(tensor.chunks, located[name], strict=True)
        ]
        if len(contents) == 1:
            items.append(Replicated(name=name, tensor=contents[0]))
            continue
        for chunk, content in zip(tensor.chunks, contents, strict=True):
            most = max(1, SHARD_BYTES // content.element_size())
            shards += [
                TensorShard(
                    name=name,
                    tensor=content[part.slices(origin=chunk.box.offset)],
                    global_shape=tensor.shape,
                    offset=part.offset,
                )
                for part in split_box(chunk.box, max_elems=most)
            ]
    return [*items, *shards_of_rank(shards, rank=rank, num_ranks=num_ranks)]


# Exports a checkpoint in the format of torch.distributed.checkpoint, so that `dcp.load` reads it on any
# ranks.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Unit:
    """What one archive of a DCP checkpoint will contain: a box (rectangular region) of a tensor, or an object.

    If `box` is None, `content` is the object. `number` is the index of the box among the boxes of the tensor.
    """

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
    """Writes a checkpoint to `directory` in the default format of torch.distributed.checkpoint (DCP). Collective.

    The ranks share the work; each holds one region of REGION_BYTES in memory at a time. Any number of ranks can
    load the result, sharded or not, since a tensor is written in chunks of one region each. All that is read is
    verified, and the directory gets its name only when it is complete.

    The names are converted in the reverse of `import_dcp`: `model/0.weight` becomes `model.0.weight` and
    `optimizer/0.weight::exp_avg` becomes `optim.state.0.weight.exp_avg`. These are the keys in the state dict
    {"model": ..., "optim": ...} that is made with `get_state_dict`. The optimizer's groups and scalars and other
    objects of the document are written by torch.save. Step and document go into the entry "hpctrain", from which
    `import_dcp` restores the same checkpoint.

    Args:
        source: A checkpoint, or a directory of checkpoints, whose newest one is exported.
        directory: The new directory; it must not exist, or be empty.
        comm: The ranks that share the work.
        weights: Write only the model, under the keys of its own state dict, and nothing else.
        under: Keys joined by dots that are put before every key, as "app" for a state dict {"app": {"model": ...}}.
        progress: Called with the number of bytes of this rank's share written so far, and with the size of the
            share.

    Returns:
        Path, number of tensors and size of the export.

    Raises:
        CheckpointError: On every rank, for damage, for files that cannot be written, and for names or dtypes that
            the format cannot represent.
        UsageError: On every rank, if `directory` is in use.
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
    """Returns the objects that a DCP checkpoint gets besides tensors, each after its path in the state dict.

    They are made from the checkpoint's document. Entries of the document that have not the form which a run or
    `import_dcp` writes do not become objects of their own, but remain in the document, which is one of the objects.
    """
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
    """Returns the value that `encoded` (JSON of a document) stands for, or `encoded` itself if it refers to tensors."""
    try:
        return decode(encoded, get=get_inline, where="the document")
    except CheckpointError:
        return encoded


def _units_of(key: str, tensor: StoredTensor) -> list[_Unit]:
    box = whole_box(tensor.shape)
    boxes = list(split_box(box, max_elems=REGION_BYTES // tensor.elem_bytes)) or [box]
    return [_Unit(key=key, content=tensor, box=part, number=number) for number, part in enumerate(boxes)]


def _refuse_existing(target: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"{target} exists: choose another name")


def _create(target: Path) -> str:
    """Creates the directory of an export under a temporary name, and returns its path. Called on rank 0."""
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
    """Writes this rank's archives, of all in `units`, to one file. Returns the offset and length in bytes of each."""
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
    """Finishes an export: writes the metadata, and renames the directory from `partial` to `target`.

    Called on rank 0. Returns the total length of the files in bytes. `parts` contains, for each rank, the offset and
    the length of each archive in the rank's file.
    """
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
