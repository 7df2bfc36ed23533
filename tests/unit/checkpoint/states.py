"""States that the checkpoint tests save: a function of the rank; and the truth to compare with."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint import Replicated, State, TensorShard, save
from hpctrain.checkpoint.format.dtypes import byte_view
from hpctrain.comm.backends.threads_world import run_threads


def whole_tensors() -> dict[str, torch.Tensor]:
    """Every tensor whole: matrices, vectors, scalars, empty ones, not contiguous ones, other dtypes."""
    made = torch.Generator().manual_seed(7)
    weight = torch.randn(300, 411, generator=made)
    return {
        "model/layer.0/weight": weight,
        "model.bias": torch.randn(411, generator=made).to(torch.bfloat16),
        "large": torch.randn(3001, 701, generator=made),
        "optimizer.step": torch.tensor(17, dtype=torch.int64),
        "scale": torch.tensor(65536.0, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(31, 17, generator=made).t(),
        "strided": torch.randn(64, 10, generator=made)[::3, 1:9:2],
        "mask": torch.randn(100, generator=made) > 0,
        "rows": torch.randn(53, 7, 3, generator=made),
        "columns": torch.randn(29, 31, generator=made).to(torch.float16),
        "grid": torch.randn(12, 10, generator=made, dtype=torch.float64),
        "held_by_one": torch.arange(1000),
    }


@functools.cache
def small_tensors() -> dict[str, torch.Tensor]:
    """`whole_tensors()`, of which the two largest have fewer rows: for hundreds of loads."""
    made = whole_tensors()
    made["large"] = made["large"][:40]
    made["model/layer.0/weight"] = made["model/layer.0/weight"][:30]
    return made


def save_by_threads(directory: Path, *, num_ranks: int, files: Sequence[int]) -> list[Path]:
    """Saves `small_tensors()` by ranks that are threads, into so many files each time. Returns the checkpoints."""

    def save_all(world: Any) -> list[Path]:
        state = state_of(world.rank, world.num_ranks, tensors=small_tensors())
        places = [directory / f"{world.num_ranks}-ranks-{num_files}-files" for num_files in files]
        return [
            save(state, directory=place, step=1, comm=world, files=num_files).path
            for place, num_files in zip(places, files, strict=True)
        ]

    return run_threads(num_ranks, save_all, timeout_s=300)[0]


SHARDED = ("rows", "columns", "grid", "held_by_one")


def state_of(rank: int, num_ranks: int, *, tensors: dict[str, torch.Tensor] | None = None) -> State:
    """What `rank` of `num_ranks` hands over of `whole_tensors()`."""
    tensors = whole_tensors() if tensors is None else tensors
    items: list[Replicated | TensorShard] = [
        Replicated(name=name, tensor=tensor) for name, tensor in tensors.items() if name not in SHARDED
    ]
    if rank % 2:
        items.reverse()  # the order of the items is each rank's own business

    def add(name: str, index: tuple[slice, ...]) -> None:
        tensor = tensors[name]
        offset = tuple(s.start or 0 for s in index)
        items.append(
            TensorShard(name=name, tensor=tensor[index], global_shape=tuple(tensor.shape), offset=offset)
        )

    rows = tensors["rows"].shape[0]
    add("rows", (slice(rank * rows // num_ranks, (rank + 1) * rows // num_ranks), slice(0, 7), slice(0, 3)))
    columns = tensors["columns"].shape[1]
    add("columns", (slice(0, 29), slice(rank * columns // num_ranks, (rank + 1) * columns // num_ranks)))
    for half in (0, 1):  # two boxes on each rank
        begin, end = rank * 10 // num_ranks, (rank + 1) * 10 // num_ranks
        add("grid", (slice(6 * half, 6 * half + 6), slice(begin, end)))
    if rank == num_ranks - 1:
        add("held_by_one", (slice(0, 1000),))
    return State(
        items=items, document={"epoch": 3, "loss_scale": 65536.0, "nested": {"list": [1, None, "ü"]}}
    )


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit (so that a NaN equals itself)."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    flat = [byte_view(t) for t in (first, second)]
    return torch.equal(flat[0], flat[1])
