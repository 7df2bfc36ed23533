"""The saves that the trials of faults make: of one file or a folder, at once or in the background."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint import Replicated, State, TensorShard, load_newest_good
from hpctrain.checkpoint.saving.background import HostBuffers
from hpctrain.checkpoint.saving.save import CheckpointSave, SaveOptions, save
from hpctrain.comm.backends.serial_world import SerialWorld

NUM_RANKS = 2
NUM_ELEMS = 400_000


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a checkpoint is saved. form: "file" or "folder". mode: "sync" or "async", the latter past the page cache."""

    form: str
    mode: str

    @property
    def page_cache(self) -> str:
        return "use" if self.mode == "sync" else "bypass"


WAYS = tuple(
    Way(form=form, mode=mode) for form, mode in itertools.product(("file", "folder"), ("sync", "async"))
)


def state_at(step: int, rank: int, *, num_elems: int = NUM_ELEMS) -> State:
    rows = torch.full((1, num_elems // 2), float(step + rank))
    return State(
        items=[
            Replicated(name="w", tensor=torch.arange(num_elems, dtype=torch.float32) + step),
            TensorShard(name="rows", tensor=rows, global_shape=(NUM_RANKS, num_elems // 2), offset=(rank, 0)),
        ],
        document={"step": step},
    )


def save_step(
    step: int, *, directory: Path, comm: Any, way: Way, keep: int = 2, num_elems: int = NUM_ELEMS
) -> None:
    """Save in this way, and wait until it is committed. Collective."""
    state = state_at(step, comm.rank, num_elems=num_elems)
    save_state(state, step=step, directory=directory, comm=comm, way=way, keep=keep)


def save_state(
    state: State, *, step: int, directory: Path, comm: Any, way: Way, keep: int = 2, engine: str = "auto"
) -> None:
    """Save it in this way, and wait until it is committed; afterwards the state may have changed. Collective."""
    files = NUM_RANKS if way.form == "folder" else 1
    if way.mode == "sync":
        save(
            state, directory=directory, step=step, comm=comm, keep=keep, files=files, engine=engine,
            page_cache=way.page_cache,
        )  # fmt: skip
        return
    options = SaveOptions(keep=keep, files=files, engine=engine, page_cache=way.page_cache)
    with ThreadPoolExecutor(1) as executor:
        saving = CheckpointSave.begin(
            state, directory=directory, step=step, comm=comm, options=options, buffers=HostBuffers(),
            executor=executor,
        )  # fmt: skip
        for item in state.items:  # training goes on
            item.tensor.fill_(-1)
        saving.finish()


def newest_step(directory: Path, *, num_elems: int = NUM_ELEMS) -> int:
    """Step of the newest checkpoint, after checking every bit of it. 0 when there is none."""
    restored = load_newest_good(directory, comm=SerialWorld())
    if restored is None:
        return 0
    assert not restored.rejected, restored.rejected
    step = restored.checkpoint.step
    assert restored.checkpoint.document == {"step": step}
    assert torch.equal(restored.tensors["w"], torch.arange(num_elems, dtype=torch.float32) + step)
    for rank in range(NUM_RANKS):
        assert torch.equal(restored.tensors["rows"][rank], torch.full((num_elems // 2,), float(step + rank)))
    return step


class Reports:
    """Steps that were reported as saved: lines in a file that no fault meets, on disk when `add` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, step: int) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        try:
            os.write(fd, f"{step}\n".encode())
            os.fsync(fd)
        finally:
            os.close(fd)

    def newest(self) -> int:
        return max(map(int, self._path.read_text().split()), default=0) if self._path.exists() else 0


def left_over(directory: Path) -> list[str]:
    """Names in the directory that are no finished checkpoint's."""
    if not directory.exists():
        return []
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("step-"))


def spread(places: int, *, count: int) -> list[int]:
    """At most `count` of 1..places, evenly, the first and the last among them; all when count is enough."""
    if count >= places:
        return list(range(1, places + 1))
    return sorted({1 + round(place * (places - 1) / max(1, count - 1)) for place in range(count)})


def saver(*, directory: Path, steps: range, way: Way, reports: Reports) -> Callable[[Any], None]:
    """A rank's function: save step after step, and report each."""

    def rank_main(world: Any) -> None:
        for step in steps:
            save_step(step, directory=directory, comm=world, way=way)
            if world.rank == 0:
                reports.add(step)

    return rank_main
