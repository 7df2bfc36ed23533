"""What each rank of the engine tests runs."""

from __future__ import annotations

import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.checkpoint import Replicated, State, TensorShard, load, open_checkpoint, save
from hpctrain.checkpoint.engines import engine_choice
from hpctrain.checkpoint.engines.engine_choice import choose_engine
from hpctrain.checkpoint.engines.engine_name import Engine
from hpctrain.checkpoint.engines.write_batch import ByteRange
from hpctrain.checkpoint.engines.write_engines import write_collectively, write_direct
from hpctrain.comm.collectives.agreement import agreed
from hpctrain.comm.watchdog.monitored_world import Monitored
from hpctrain.errors import CheckpointError, HpctrainError
from hpctrain.storage.filesystem_type import Filesystem
from tests.ranks.checkpoint.save_cases import digests

# kind -> (pieces, their greatest length, least length, whether ranks own them in turn or each a part of the file)
PATTERNS = {
    "shares": (300, 5_000, 1, False),
    "rows": (900, 700, 1, True),
    "tiny rows": (4000, 40, 1, True),
    "long rows": (14, 150_000, 70_000, True),
    "one piece": (1, 5000, 5000, True),
    "nothing": (0, 1, 1, True),
}


def pieces_of(kind: str, *, num_ranks: int) -> tuple[list[tuple[int, int, int]], int]:
    """(offset, length, rank that writes, or -1) of each piece, ascending; and bytes of the file. The same on every
    rank; some pieces are nobody's, and of four ranks one writes nothing."""
    count, longest, shortest, in_turn = PATTERNS[kind]
    rng = random.Random(kind)
    writers = [rank for rank in range(num_ranks) if rank != 2 or num_ranks < 4]
    pieces, offset = [], 4096
    for number in range(count):
        length = rng.randint(shortest, longest)
        rank = rng.choice(writers) if in_turn else writers[number * len(writers) // count]
        pieces.append((offset, length, rank if number % 7 else -1))
        offset += length
    return pieces, offset + 1000


def element_runs_of(
    data: np.ndarray, pieces: list[tuple[int, int, int]], *, rank: int
) -> Iterator[ByteRange]:
    for offset, length, writer in pieces:
        if writer == rank:
            yield offset, data[offset : offset + length].data


def engines_of_every_size(world: Any, directory: str) -> dict[str, Any]:
    """Every pattern on the first 1, 2, ... ranks, what goes wrong, and what is chosen.

    wrong: on rank 0, which files differ from what was meant. errors, choices: what each rank was told.
    """
    world = Monitored(world, timeout_s=300)  # as runs have it
    wrong = []
    for num_ranks in range(1, world.num_ranks):
        group = world.split([range(num_ranks)])
        if group is not None:
            wrong += write_every_pattern(group, Path(directory))
        world.barrier()
    wrong += write_every_pattern(world, Path(directory))
    found = {
        "wrong": wrong,
        "errors": _errors(world, Path(directory)),
        "saved": _saved_by_columns(world, Path(directory)),
        "choices": _choices(world, Path(directory)),
    }
    world.close()
    return found


def write_every_pattern(comm: Any, directory: Path) -> list[str]:
    """Each pattern by both engines, with small batches and large, and by two groups, each to a file of its own; on
    rank 0, the files that are not what was meant."""
    wrong = []
    half = (comm.num_ranks + 1) // 2
    everyone, groups = range(comm.num_ranks), [range(half), range(half, comm.num_ranks)]
    for kind in PATTERNS:
        pieces, num_bytes = pieces_of(kind, num_ranks=comm.num_ranks)
        data = np.random.default_rng(len(kind)).integers(0, 256, num_bytes, dtype=np.uint8)
        for engine, batch_bytes, files in (
            ("direct", 0, [everyone]), ("mpio", 1 << 20, [everyone]), ("mpio", 20_000, [everyone]),
            ("mpio", 1 << 20, groups),
        ):  # fmt: skip
            if engine == "mpio" and comm.num_ranks == 1 and comm.backend == "horovod":
                continue
            paths = [
                directory / f"{comm.num_ranks}-{kind}-{engine}-{batch_bytes}-{len(files)}-{number}"
                for number in range(len(files))
            ]
            if comm.rank == 0:
                for path in paths:
                    path.write_bytes(b"\xaa" * num_bytes)
            comm.barrier()
            number = next(number for number, members in enumerate(files) if comm.rank in members)
            byte_ranges = element_runs_of(data, pieces, rank=comm.rank)
            if engine == "direct":
                write_direct(paths[number], byte_ranges)
            else:
                write_collectively(
                    paths[number], byte_ranges, comm=comm, batch_bytes=batch_bytes,
                    groups=[[comm.members[r] for r in members] for members in files],
                )  # fmt: skip
            comm.barrier()
            if comm.rank == 0:
                wrong += [
                    path.name
                    for path, members in zip(paths, files, strict=True)
                    if path.read_bytes() != expected_of(data, pieces, members=members)
                ]
    return wrong


def expected_of(data: np.ndarray, pieces: list[tuple[int, int, int]], *, members: range) -> bytes:
    expected = np.full(len(data), 0xAA, dtype=np.uint8)
    for offset, length, writer in pieces:
        if writer in members:
            expected[offset : offset + length] = data[offset : offset + length]
    return expected.tobytes()


def _saved_by_columns(world: Any, directory: Path) -> dict[str, list[str]]:
    """A matrix sharded by columns, rows of 100 bytes per rank: hashes of the content of each file, saved by each engine
    into one file, two and three."""
    columns = 25
    mine = torch.arange(3000)[:, None] * 1000 + world.rank * columns + torch.arange(columns)
    state = State(
        items=[
            TensorShard(name="matrix", tensor=mine.to(torch.int32), global_shape=(3000, world.num_ranks * columns),
                  offset=(0, world.rank * columns)),
            Replicated(name="vector", tensor=torch.arange(100_000)),
        ],
        document={},
    )  # fmt: skip
    found = {}
    for engine in ("direct", "mpio"):
        for files in (1, 2, 3):  # with 4 ranks, two share a file both times
            place = directory / f"columns-{engine}-{files}"
            result = save(state, directory=place, step=1, comm=world, engine=engine, files=files)
            paths = sorted(result.path.iterdir()) if result.path.is_dir() else [result.path]
            found[f"{engine} {files}"] = [f"{path.name} {sorted(digests(path).items())}" for path in paths]
            whole = open_checkpoint(result.path, comm=world).read("matrix")
            assert torch.equal(
                whole[:, world.rank * columns : (world.rank + 1) * columns], mine.to(torch.int32)
            )
    return found


def _errors(world: Any, directory: Path) -> dict[str, str]:
    """What each rank raises when all have voted: the last rank's source fails, the file is not there, it may not
    become as long as it should."""
    last = world.rank == world.num_ranks - 1
    pieces, num_bytes = pieces_of("tiny rows", num_ranks=world.num_ranks)
    data = np.ones(num_bytes, dtype=np.uint8)
    path = directory / "refused"

    def reported(path: Path, *, failing: bool = False) -> str:
        world.barrier()
        byte_ranges = element_runs_of(data, pieces, rank=world.rank)
        if failing:
            byte_ranges = _failing(byte_ranges)
        try:
            agreed(world, lambda: write_collectively(path, byte_ranges, comm=world, batch_bytes=20_000))
        except HpctrainError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    if world.rank == 0:
        path.write_bytes(bytes(num_bytes))
    found = {"source": reported(path, failing=last), "missing": reported(directory / "is not there")}
    # A write beyond the limit fails with EFBIG, as one to a full disk does with ENOSPC, on whichever rank MPI lets
    # do the writing. Open MPI's collective write does not tell.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes // 2, before[1]))
    found["too large"] = reported(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    found["after all"] = reported(path)
    for engine in ("direct", "mpio"):
        found[f"replica, {engine}"] = _reported_of_a_replica(
            world, directory / f"replica-{engine}", engine=engine
        )
        found[f"changed, {engine}"] = _saved_when_changed(
            world.duplicate(), directory / f"changed-{engine}", engine=engine
        )
    return found


def _reported_of_a_replica(world: Any, directory: Path, *, engine: str) -> str:
    """Of a later save, in which the last rank's copy of what rank 0 writes has another shape; then one is saved."""
    tensors = {f"t{i}": torch.full((2048,), float(i)) for i in range(world.num_ranks)}

    def save_them(step: int, **odd: torch.Tensor) -> None:
        items = [Replicated(name=name, tensor=tensor) for name, tensor in {**tensors, **odd}.items()]
        save(State(items=items), directory=directory, step=step, comm=world, engine=engine)

    save_them(1)
    found = "nothing"
    try:
        save_them(2, **({"t0": torch.zeros(3)} if world.rank == world.num_ranks - 1 else {}))
    except HpctrainError as error:
        found = f"{type(error).__name__}: {error}"
    world.barrier()  # rank 0 has removed what it had made
    left = sorted(path.name for path in directory.iterdir())
    world.barrier()
    save_them(3)
    return f"{found}; left: {left}"


def _saved_when_changed(world: Any, directory: Path, *, engine: str) -> str:
    """Which tensors are not what was saved when, of large and of small ones, one has another shape than before on every
    rank: each is written by one rank or two, who find it out while the others write."""
    tensors = [torch.full((30_000 if i % 2 else 500,), float(i)) for i in range(2 * world.num_ranks)]
    wrong = []
    for step, changed in enumerate((None, 0, 1, None)):
        if changed is not None:
            tensors[changed] = torch.arange(40_000).reshape(200, 200)
        items = [Replicated(name=f"t{i}", tensor=tensor) for i, tensor in enumerate(tensors)]
        path = save(State(items=items), directory=directory, step=step, comm=world, engine=engine).path
        _, loaded = load(path, comm=world)
        wrong += [f"{step} {item.name}" for item in items if not torch.equal(loaded[item.name], item.tensor)]
    return f"{wrong}; left: {len(list(directory.iterdir()))}"


def _failing(byte_ranges: Iterator[ByteRange]) -> Iterator[ByteRange]:
    for number, byte_range in enumerate(byte_ranges):
        if number == 50:
            raise CheckpointError("the device is gone")
        yield byte_range


def _choices(world: Any, directory: Path) -> dict[str, Any]:
    """What is chosen on this local disk, and what where its filesystem is taken for a shared one."""
    names = ("direct", "mpio", "auto")
    chosen = {name: choose_engine(Engine(name), directory=directory, comm=world) for name in names}
    again = choose_engine(Engine.AUTO, directory=directory, comm=world)
    engine_choice.filesystem_of = lambda path, **_: Filesystem(kind="nfs4")
    shared = directory / "shared" / "checkpoints"
    chosen["shared"] = choose_engine(Engine.AUTO, directory=shared, comm=world)
    chosen["background"] = choose_engine(Engine.AUTO, directory=shared, comm=world, in_background=True)
    world.barrier()
    return {
        **{name: [choice.engine.value, choice.note] for name, choice in chosen.items()},
        "remembered": again is chosen["auto"],
        "left behind": [path.name for path in shared.iterdir()],
    }
