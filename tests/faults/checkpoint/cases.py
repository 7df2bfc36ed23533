"""What each rank runs in the tests of saves that fail: one rank alone, or the disk for all."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint import Replicated, State, load_newest_good, save
from hpctrain.comm.collectives.agreement import all_gather_json
from hpctrain.comm.watchdog.monitored_world import Monitored
from hpctrain.errors import CheckpointError, ExitCode
from tests.faults.checkpoint.mounts import Mount, bind, own_mounts
from tests.faults.checkpoint.saves import WAYS, save_state

NOBODY = 65534


def state_at(step: int, *, num_bytes: int = 2_000_000) -> State:
    tensor = torch.arange(num_bytes // 4, dtype=torch.float32) + step
    small = torch.tensor([float(step)])
    return State(
        items=[Replicated(name="w", tensor=tensor), Replicated(name="small", tensor=small)],
        document={"step": step},
    )


def save_must_fail(world: Any, directory: str, *, step: int, engine: str) -> str:
    """Every rank must raise the same agreed CheckpointError, and step 1 must be as it was. The text."""
    with pytest.raises(CheckpointError) as caught:
        save(state_at(step), directory=directory, step=step, comm=world, engine=engine)
    assert caught.value.agreed
    assert caught.value.exit_code == ExitCode.CHECKPOINT
    text = str(caught.value)
    texts = all_gather_json(world, text)
    assert set(texts) == {text}
    return text


def older_is_intact(world: Any, directory: str) -> None:
    restored = load_newest_good(directory, comm=world)
    assert restored is not None
    assert restored.checkpoint.step == 1
    assert torch.equal(restored.tensors["w"], state_at(1).items[0].tensor)
    if world.rank == 0:
        assert [path.name for path in Path(directory).iterdir()] == ["step-00000001.h5"]
    world.barrier()


def one_rank_cannot_write(world: Any, directory: str, engines: list[str]) -> dict[str, dict[str, str]]:
    """What every rank was told, by engine and reason. In the end, as root, rank 1 loses the directory."""
    found = {engine: _one_rank_cannot_write(world, f"{directory}/{engine}", engine) for engine in engines}
    if os.geteuid() == 0:
        place = f"{directory}/direct"
        found["direct"]["unmounted"] = _one_rank_sees_another_directory(world, place)
    return found


def _one_rank_cannot_write(world: Any, directory: str, engine: str) -> dict[str, str]:
    """A limit on file sizes, no permission, and a file instead of the directory: each once, on one rank."""
    found = {}
    save(state_at(1), directory=directory, step=1, comm=world, engine=engine)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    found["limit"] = save_must_fail(world, directory, step=2, engine=engine)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    older_is_intact(world, directory)

    if os.geteuid() == 0:
        for rank in (0, 1):
            if world.rank == rank:
                os.seteuid(NOBODY)
            found[f"permission on rank {rank}"] = save_must_fail(world, directory, step=2, engine=engine)
            if world.rank == rank:
                os.seteuid(0)
            older_is_intact(world, directory)

    found["file"] = save_must_fail(world, directory + "/step-00000001.h5", step=2, engine=engine)
    older_is_intact(world, directory)
    # After all of these the next save works.
    result = save(state_at(1), directory=directory, step=1, comm=world, engine=engine)
    assert result.engine.value == engine
    older_is_intact(world, directory)
    return found


def the_disk_is_full(world: Any, directory: str, engines: list[str]) -> dict[str, str]:
    """`directory` is on a filesystem of 3 MB: one checkpoint of 2 MB fits, a second does not."""
    found = {}
    for engine in engines:
        save(state_at(1), directory=directory, step=1, comm=world, engine=engine, keep=None)
        found[engine] = save_must_fail(world, directory, step=2, engine=engine)
        older_is_intact(world, directory)
        if world.rank == 0:
            (Path(directory) / "step-00000001.h5").unlink()  # two of them do not fit, not even for a moment
    return found


def _one_rank_sees_another_directory(world: Any, directory: str) -> str:
    """On rank 1 an empty filesystem lies over the directory, as on a node that has not mounted it."""
    if world.rank == 1:
        libc = ctypes.CDLL(None, use_errno=True)
        new_mounts, private_recursive = 0x20000, (1 << 18) | (1 << 14)
        assert libc.unshare(new_mounts) == 0
        assert libc.mount(b"none", b"/", None, private_recursive, None) == 0
        assert libc.mount(b"none", directory.encode(), b"tmpfs", 0, None) == 0
    text = save_must_fail(world, directory, step=2, engine="direct")
    load_text = ""
    try:
        load_newest_good(directory, comm=world)
    except CheckpointError as error:
        load_text = str(error)
    assert "cannot open" in load_text
    return text


def storage_of_rank_1_hangs(world: Any, directory: str) -> None:
    """Rank 1 sees the checkpoints through a filesystem that stops in the middle of its write."""
    monitored = Monitored(world, timeout_s=4, directory=Path(directory) / "positions")
    storage, place = Path(directory) / "storage", Path(directory) / "shared"
    own_mounts()
    if world.rank == 1:
        mount = Mount(storage, Path(directory) / "node-1")
        mount.start()
    bind(mount.place if world.rank == 1 else storage, place)
    monitored.barrier()
    save(state_at(1), directory=place, step=1, comm=monitored)
    pids = all_gather_json(monitored, os.getpid())
    if world.rank == 1:
        mount.fault("hang", at=3, until_gone=pids[0])
    monitored.barrier()
    save(state_at(2), directory=place, step=2, comm=monitored)


def save_until_killed(world: Any, directory: str, engine: str) -> None:
    """Save step after step, each in another way; `reported` holds the newest that was reported as saved."""
    ways = [way for way in WAYS if engine == "direct" or way.mode == "sync"]
    step = 0
    while True:
        step += 1
        state = state_at(step, num_bytes=8_000_000)
        save_state(
            state, step=step, directory=Path(directory), comm=world, way=ways[step % len(ways)], engine=engine
        )
        if world.rank == 0:
            (Path(directory).parent / "reported.new").write_text(str(step))
            os.rename(Path(directory).parent / "reported.new", Path(directory).parent / "reported")
