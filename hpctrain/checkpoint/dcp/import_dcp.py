"""Makes a checkpoint from a checkpoint of torch.distributed.checkpoint, whose files are memory-mapped."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.dcp.archives import as_json, locate_tensor, read_object
from hpctrain.checkpoint.dcp.metadata import DcpMetadata, DcpObject, DcpTensor, read_metadata
from hpctrain.checkpoint.dcp.names import GROUPS, below, key_of, name_of, optimizer_path
from hpctrain.checkpoint.format.boxes import split_box
from hpctrain.checkpoint.format.dtypes import empty_tensor
from hpctrain.checkpoint.format.state import SEPARATOR, Replicated, Shard, State
from hpctrain.checkpoint.loading.partial_load import MODEL_PREFIX
from hpctrain.checkpoint.operations.import_tensors import refuse_existing
from hpctrain.checkpoint.operations.mapped_tensors import (
    SHARD_BYTES,
    map_file,
    save_in_files,
    shards_of_rank,
)
from hpctrain.checkpoint.operations.torch_archives import Located, mapped_tensor
from hpctrain.checkpoint.saving.save import SaveResult
from hpctrain.comm import Collective, agreed, all_gather_json, doing, on_rank_0
from hpctrain.errors import CheckpointError, UsageError

OWN_ENTRY = "hpctrain"  # key of what export_dcp adds: step and document


@dataclass(frozen=True, kw_only=True, slots=True)
class DcpImport:
    """Result of an import. left_out: objects of the DCP checkpoint that are not plain data, with the reason."""

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
    """Makes the checkpoint `directory/step-<step>` from one of torch.distributed.checkpoint, `source`. Collective.

    `source` is in DCP's default format (FileSystemWriter), saved by any number of ranks. Nothing in it is unpickled.
    The files are memory-mapped and the ranks share the work, so memory does not grow with the model. Other checkpoints
    in `directory` are kept.

    Tensors get names as in a run's checkpoint: `model.0.weight` becomes `model/0.weight`, and
    `optim.state.0.weight.exp_avg`, as `get_state_dict` makes it, `optimizer/0.weight::exp_avg`; any other `a.b.c`
    becomes `a/b.c`. If all tensors are at the top level, as in a model's state dict, they get the prefix `model/`.
    Objects that are plain data go into the document: the optimizer's under "optimizer" ("groups", "scalars"), others
    under "objects"; tuples become lists. Others are left out and named in the result.

    Args:
        step: required unless `export_dcp` wrote the checkpoint, with step and document.
        under: import only the keys below this path, such as "app" of a state dict {"app": {"model": ...}}.
        files: 1: one file; a larger number: a folder of so many files.
        replace: replace a checkpoint of the same step.
        verify: compare the bytes of tensors with the CRC-32 that torch.save stores with them. False: for checkpoints
            written after `torch.serialization.set_crc32_options(False)`.
        options: options of `save`.

    Raises on every rank: CheckpointError if the DCP checkpoint is damaged, not complete, or has content that cannot be
    stored; UsageError if `source` is not one, and for an invalid argument.
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
    """Returns the tensors below the path `under` by our names, and the objects below it. Raises CheckpointError."""
    tensors = [replace(t, path=path) for t in metadata.tensors if (path := below(t.path, under)) is not None]
    objects = [replace(o, path=path) for o in metadata.objects if (path := below(o.path, under)) is not None]
    if not tensors:
        top = sorted({str(tensor.path[0]) for tensor in metadata.tensors})
        where = f" below {under!r}; at its top are {', '.join(map(repr, top[:8]))}" if under and top else ""
        raise CheckpointError(f"{source} has no tensor{where}: nothing to import", agreed=True)
    is_ours = any(item.path == (OWN_ENTRY,) for item in objects)
    is_bare = not is_ours and all(len(tensor.path) == 1 for tensor in tensors)
    names = [f"{MODEL_PREFIX if is_bare else ''}{name_of(tensor.path)}" for tensor in tensors]
    ((name, count),) = Counter(names).most_common(1)
    if count > 1:
        raise CheckpointError(
            f"{source}: {count} of its tensors would be named {name!r}: choose one of them with --under",
            agreed=True,
        )
    return dict(zip(names, tensors, strict=True)), objects


def _document(objects: Sequence[DcpObject], *, source: Path, num_tensors: int, verify: bool) -> list[Any]:
    """Returns the step, or None, the document, and why objects are left out, by key. Rank 0."""
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
    """Returns where each chunk of the tensors lies. Collective: the ranks share the work."""
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
) -> list[Replicated | Shard]:
    """Returns what `rank` of `num_ranks` passes to the save, mapped: a tensor in one chunk whole, as every rank does,
    of one in several chunks its own part of them."""
    names = sorted({chunk.place.file for tensor in tensors.values() for chunk in tensor.chunks})
    files = {name: map_file(source / name) for name in names}
    items: list[Replicated | Shard] = []
    shards: list[Shard] = []
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
                Shard(
                    name=name,
                    tensor=content[part.slices(origin=chunk.box.offset)],
                    global_shape=tensor.shape,
                    offset=part.offset,
                )
                for part in split_box(chunk.box, max_elems=most)
            ]
    return [*items, *shards_of_rank(shards, rank=rank, num_ranks=num_ranks)]
