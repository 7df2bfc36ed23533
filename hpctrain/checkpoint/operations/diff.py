"""Compares two checkpoints: which tensors and document entries differ, and by how much. The ranks share the work.

Tensors that are divided in the same way and have the same hashes are equal and are not read, so checkpoints in which
most tensors are the same are compared quickly. Damage in tensors that are not read is not detected here, but by
`verify`. All that is read is verified.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.format.boxes import Box, split_box, whole_box
from hpctrain.checkpoint.format.metadata import StoredTensor
from hpctrain.checkpoint.format.tensor_difference import Amount, Tolerance, amount_of
from hpctrain.checkpoint.loading.checkpoint import Checkpoint, open_checkpoint
from hpctrain.comm import Collective, agreed, all_gather_json
from hpctrain.errors import CheckpointError

# Bytes read of each checkpoint at a time. Extents take at most 4 MiB, so few (at region boundaries) are read twice.
REGION_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """A tensor that differs between two checkpoints.

    Attributes:
        name: Name of the tensor.
        first: Dtype and shape in the first checkpoint, such as `float32 [3, 4]`.
        second: Dtype and shape in the second checkpoint.
        amount: By how much the elements differ; None if the shapes differ.
    """

    name: str
    first: str
    second: str
    amount: Amount | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryDifference:
    """An entry of the checkpoints' JSON documents that differs between two checkpoints.

    `first` and `second` are the entry's JSON text in the two checkpoints; None where the entry is missing.
    """

    path: str
    first: str | None
    second: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Result of `compare`.

    Attributes:
        first: The first checkpoint.
        second: The second checkpoint.
        num_same: Number of tensors that are equal within the tolerance.
        changed: Tensors in both checkpoints that differ.
        only_in_first: Names of tensors that only the first checkpoint has.
        only_in_second: Names of tensors that only the second checkpoint has.
        entries: Entries of the documents that differ.
    """

    first: Checkpoint
    second: Checkpoint
    num_same: int
    changed: tuple[TensorDifference, ...]
    only_in_first: tuple[str, ...]
    only_in_second: tuple[str, ...]
    entries: tuple[EntryDifference, ...]

    @property
    def is_empty(self) -> bool:
        return not (self.changed or self.only_in_first or self.only_in_second or self.entries)


def compare(
    first: Path | str,
    second: Path | str,
    *,
    comm: Collective,
    prefix: str = "",
    tolerance: Tolerance | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Difference:
    """Compares two checkpoints: tensors, and unless there is a prefix also their documents. Collective.

    The ranks share the work. Each rank uses about 100 MB of memory.

    Args:
        first: A checkpoint, or a directory of checkpoints, whose newest one is compared.
        second: The checkpoint to compare with, given in the same way.
        comm: The ranks that share the work.
        prefix: Compare only tensors whose names begin with this text, and not the documents.
        tolerance: How much elements may differ; None: every bit must be equal.
        progress: Called with the number of bytes of this rank's share compared so far, and with the size of the
            share.

    Returns:
        The differences, the same on all ranks.

    Raises:
        CheckpointError: On every rank, if a checkpoint cannot be opened, or for damage in the bytes that are read.
    """
    tolerance = tolerance or Tolerance()
    opened = open_checkpoint(first, comm=comm), open_checkpoint(second, comm=comm)
    one, two = (_under(checkpoint, prefix) for checkpoint in opened)
    both = [name for name in one if name in two]
    to_read = [name for name in both if not _same_hashes(one[name], two[name])]
    units = [unit for name in to_read for unit in _regions(one[name], two[name])]

    def own_part() -> dict[str, dict[str, Any]]:
        mine = units[comm.rank :: comm.num_ranks]
        total = sum(region.num_elems * one[name].elem_bytes for name, region in mine)
        done, found = 0, dict[str, Amount]()
        for name, region in mine:
            place = {"offset": region.offset, "shape": region.shape}
            pair = opened[0].read(name, **place), opened[1].read(name, **place)
            found[name] = found.get(name, Amount()) + amount_of(*pair, tolerance=tolerance)
            done += region.num_elems * one[name].elem_bytes
            progress(done, total)
        return {name: asdict(amount) for name, amount in found.items()}

    amounts = {name: Amount() for name in to_read}
    for part in all_gather_json(comm, agreed(comm, own_part, os_error=CheckpointError)):
        for name, amount in part.items():
            amounts[name] += Amount(**amount)
    changed = [
        _tensor_difference(one[name], two[name], amounts[name])
        for name in to_read
        if not _same_kind(one[name], two[name]) or amounts[name].num_beyond
    ]
    return Difference(
        first=opened[0],
        second=opened[1],
        num_same=len(both) - len(changed),
        changed=tuple(changed),
        only_in_first=tuple(name for name in one if name not in two),
        only_in_second=tuple(name for name in two if name not in one),
        entries=() if prefix else tuple(compare_json(opened[0].document, opened[1].document)),
    )


def compare_json(first: Any, second: Any, *, path: str = "") -> Iterator[EntryDifference]:
    """Yields the entries in which two JSON values differ, each with a path such as `key.key[2]`."""
    missing = object()
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in sorted({*first, *second}):
            deeper = f"{path}.{key}" if path else str(key)
            yield from _compare_entry(first.get(key, missing), second.get(key, missing), deeper, missing)
    elif isinstance(first, list) and isinstance(second, list):
        for place in range(max(len(first), len(second))):
            one, two = (values[place] if place < len(values) else missing for values in (first, second))
            yield from _compare_entry(one, two, f"{path}[{place}]", missing)
    elif (one := json.dumps(first, sort_keys=True)) != (two := json.dumps(second, sort_keys=True)):
        yield EntryDifference(path=path, first=one, second=two)


def _compare_entry(first: Any, second: Any, path: str, missing: object) -> Iterator[EntryDifference]:
    if first is not missing and second is not missing:
        yield from compare_json(first, second, path=path)
        return
    one, two = (None if value is missing else json.dumps(value, sort_keys=True) for value in (first, second))
    yield EntryDifference(path=path, first=one, second=two)


def _under(checkpoint: Checkpoint, prefix: str) -> dict[str, StoredTensor]:
    found = {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith(prefix)}
    if prefix and not found:
        raise CheckpointError(f"{checkpoint.path} has no tensor under {prefix!r}", agreed=True)
    return found


def _same_kind(first: StoredTensor, second: StoredTensor) -> bool:
    return (first.dtype, first.shape) == (second.dtype, second.shape)


def _same_hashes(first: StoredTensor, second: StoredTensor) -> bool:
    """Returns True if the hashes prove that both tensors have the same bits.

    For this, both must be divided into the same regions (extents), with the same hashes.
    """
    if not _same_kind(first, second) or first.view != second.view:
        return False
    one, two = (
        {(e.box.offset, e.box.shape): e.hash for _, e in tensor.extents} for tensor in (first, second)
    )
    return one == two


def _regions(first: StoredTensor, second: StoredTensor) -> Iterator[tuple[str, Box]]:
    """Yields the boxes (rectangular regions) of two tensors to be compared, each after the name of the tensors.

    Yields nothing if the shapes of the tensors differ.
    """
    if first.shape == second.shape:
        elem_bytes = max(first.elem_bytes, second.elem_bytes)
        for region in split_box(whole_box(first.shape), max_elems=REGION_BYTES // elem_bytes):
            yield first.name, region


def _tensor_difference(first: StoredTensor, second: StoredTensor, amount: Amount) -> TensorDifference:
    return TensorDifference(
        name=first.name,
        first=f"{first.dtype} {list(first.shape)}",
        second=f"{second.dtype} {list(second.shape)}",
        amount=amount if first.shape == second.shape else None,
    )
