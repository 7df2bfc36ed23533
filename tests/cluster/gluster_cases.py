"""What ranks do on volumes of GlusterFS: `python -m tests.cluster.gluster_cases CASE ARGUMENT ...`, under srun."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from hpctrain.checkpoint import Replicated, State, TensorShard, load, load_newest_good, save, step_of
from hpctrain.checkpoint.files.checkpoint_names import finished_newest_first
from hpctrain.comm import all_gather_json, make_shared_folder, on_rank_0
from hpctrain.errors import CheckpointError
from hpctrain.run import init

# Nobody saves without end because nobody kills anything.
_LAST_STEP = 30
NUM_ROWS = 16_000  # of the sharded tensor: 4 MB
# How checkpoints are saved: one file, a folder with a file of every node (past the page cache, if the volume lets us),
# and one file through MPI-IO.
FORMS = ("file", "nodes", "mpio")


def replicated_at(step: int, *, name: str, num_bytes: int) -> torch.Tensor:
    """Every element differs from its neighbours, and from what it was in the step before."""
    seed = sum(name.encode())
    return torch.arange(num_bytes // 4, dtype=torch.int32) * 1_640_531_527 + step * 7919 + seed


def rows_at(step: int, *, begin: int, end: int) -> torch.Tensor:
    return torch.arange(begin * 64, end * 64, dtype=torch.float32).reshape(-1, 64) + step


SIZES = {"weights": 16_000_000, "moments": 4_000_000, "bias": 20, "nothing": 0}


def state_at(step: int, *, rank: int, num_ranks: int) -> State:
    replicated = [
        Replicated(name=name, tensor=replicated_at(step, name=name, num_bytes=num_bytes))
        for name, num_bytes in SIZES.items()
    ]
    begin, end = (NUM_ROWS * place // num_ranks for place in (rank, rank + 1))
    shard = TensorShard(
        name="rows",
        tensor=rows_at(step, begin=begin, end=end),
        global_shape=(NUM_ROWS, 64),
        offset=(begin, 0),
    )
    return State(items=[*replicated, shard], document={"step": step})


def differences(step: int, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not, bit for bit, those of `state_at`."""
    wanted = {name: replicated_at(step, name=name, num_bytes=num_bytes) for name, num_bytes in SIZES.items()}
    wanted["rows"] = rows_at(step, begin=0, end=NUM_ROWS)
    return [name for name in wanted if name not in tensors or not torch.equal(tensors[name], wanted[name])]


def saves(signals: str, distributed: str, dispersed: str) -> None:
    """Save on both volumes, first in peace, then until a server of the volume has been killed, and once more.

    Rank 0 makes the file SIGNALS/<volume>.saving, looks for SIGNALS/<volume>.killed, and prints what every
    rank saw as JSON: a list for each volume and form of [step, begin, end, error or null], seconds of
    CLOCK_MONOTONIC.
    """
    with init(backend="mpi", timeout_s=300) as session:
        world = session.world
        nodes = session.topology.node_of_rank
        found: dict[str, list[Any]] = {}

        def attempt(volume: Path, form: str, step: int) -> list[Any]:
            error: str | None = None
            begin_s = time.monotonic()
            try:
                state = state_at(step, rank=world.rank, num_ranks=world.num_ranks)
                files: Literal["node"] | int = "node" if form == "nodes" else 1
                save(
                    state,
                    directory=volume / form,
                    step=step,
                    comm=world,
                    keep=None,
                    engine="mpio" if form == "mpio" else "direct",
                    files=files,
                    node_of_rank=nodes,
                    page_cache="bypass" if form == "nodes" else "auto",
                )
            except CheckpointError as caught:
                error = str(caught)
            end_s = time.monotonic()
            # Every rank must have been told the same.
            reported = all_gather_json(world, error)
            same = all(other == error for other in reported)
            return [step, begin_s, end_s, error if same else f"NOT AGREED: {reported}"]

        volumes = {"distributed": Path(distributed), "dispersed": Path(dispersed)}
        for name, volume in volumes.items():
            for form in FORMS:
                found[f"{name} {form}"] = [attempt(volume, form, 1)]
        for name, volume in volumes.items():
            attempts = found[f"{name} file"]
            on_rank_0(world, Path(signals, f"{name}.saving").touch)
            killed = Path(signals, f"{name}.killed")
            while not on_rank_0(world, killed.exists) and len(attempts) < _LAST_STEP:
                attempts.append(attempt(volume, "file", len(attempts) + 1))
            for form in ("file", "nodes"):
                attempts = found[f"{name} {form}"]
                attempts.append(attempt(volume, form, len(attempts) + 1))
        if world.rank == 0:
            print(json.dumps(found))


def loads(*directories: str) -> None:
    """Load all checkpoints of some directories, each by all ranks.

    Rank 0 prints as JSON, for each directory, [name, what is wrong with it] of each checkpoint, newest first.
    """
    with init(backend="mpi", timeout_s=300) as session:
        world = session.world
        found: dict[str, list[Any]] = {}
        for where in map(Path, directories):
            names = on_rank_0(world, lambda where=where: [path.name for path in finished_newest_first(where)])  # type: ignore[misc]
            found[str(where)] = []
            for name in names:
                if name == names[0]:
                    newest = load_newest_good(where, comm=world)
                    checkpoint, tensors = (
                        (None, {}) if newest is None else (newest.checkpoint, newest.tensors)
                    )
                else:
                    checkpoint, tensors = load(where / name, comm=world)
                step = step_of(where / name)
                wrong = differences(step or 0, tensors)
                if checkpoint is None or checkpoint.step != step or checkpoint.document != {"step": step}:
                    wrong.append("step")
                found[str(where)].append([name, wrong])
        every = all_gather_json(world, found)
        if any(other != found for other in every):
            raise CheckpointError(f"the ranks did not load the same: {every}", agreed=True)
        if world.rank == 0:
            print(json.dumps(found))


def folders(where: str, num_folders: str) -> None:
    """Make folders that all ranks write to at once. Rank 0 prints as JSON what each rank could not do."""
    with init(backend="mpi", timeout_s=300) as session:
        world = session.world
        errors: list[str] = []
        for number in range(int(num_folders)):
            folder = Path(where, "made", str(number))
            make_shared_folder(folder, comm=world)
            try:
                (folder / str(world.rank)).write_text("written")
            except OSError as error:
                errors.append(str(error))
        every = all_gather_json(world, errors)
        if world.rank == 0:
            print(json.dumps(every))


if __name__ == "__main__":
    cases: dict[str, Callable[..., None]] = {"saves": saves, "loads": loads, "folders": folders}
    cases[sys.argv[1]](*sys.argv[2:])
