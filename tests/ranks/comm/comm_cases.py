"""What ranks do in the tests of communication that need real processes."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hpctrain.comm import Monitored, World, all_gather_json, make_two_level, open_world
from hpctrain.errors import CommunicationError, DataError, HpctrainError
from hpctrain.reduce.factory import ReductionRequest
from hpctrain.run.session import init
from hpctrain.topology import Topology
from tests.sessions import session_over

PIECE_ELEMS = 499


def one_rank_sleeps(world: World, directory: str, late_rank: int, timeout_s: float) -> None:
    """`late_rank` never comes to the third operation of a group."""
    monitored = Monitored(world, timeout_s=timeout_s, directory=Path(directory))
    group = monitored.split([list(range(world.num_ranks))])
    assert group is not None
    group.barrier()
    group.all_gather_bytes(b"")
    monitored.step = 41
    if world.rank == late_rank:
        time.sleep(600)
    Path(directory, f"began-{world.rank}").touch()
    group.all_reduce(torch.ones(10))


def one_rank_leaves_a_trace_and_stops(world: World, directory: str) -> None:
    """Rank 2, on the second of two emulated nodes, writes its process id; the test stops that process."""
    monitored = Monitored(world, timeout_s=12)
    monitored.place(Topology.from_node_names(["here/0", "here/0", "here/1", "here/1"], emulated=True))
    monitored.publish_in(Path(directory) / "positions")
    monitored.barrier()
    if world.rank == 2:
        path = Path(directory) / "pid"
        path.with_suffix(".partial").write_text(str(os.getpid()))
        path.with_suffix(".partial").rename(path)
        while True:
            time.sleep(0.1)
    monitored.barrier()


def slow_but_in_time(world: World, directory: str) -> list[str]:
    """Monitored ranks of which one is slow, over two levels and a second communicator."""
    monitored = Monitored(world, timeout_s=16, directory=Path(directory))
    levels = make_two_level(monitored, Topology.from_node_names(["a", "a", "b"]))
    duplicate = monitored.duplicate()
    for step in range(3):
        monitored.step = step
        if world.rank == step:
            time.sleep(0.5)
        buffer = torch.full((7,), float(world.rank))
        levels.all_reduce(buffer)
        assert buffer.tolist() == [3.0] * 7
        duplicate.barrier()
    time.sleep(2)  # at least one look of the watcher between two operations
    board = monitored._watcher._board
    assert board is not None
    monitored.close()
    return [*sorted(path.name for path in Path(directory).rglob("*.json")), str(board.folders.local)]


def one_rank_is_late_at_the_end(world: World) -> None:
    """Rank 0 still frees communicators of MPI when rank 1 is through with everything."""
    transport = world.transport(Topology.from_node_names(["a", "b"]))
    assert transport is not None
    if world.rank == 0:
        time.sleep(1)
    transport.close()


def one_rank_aborts(world: World, exit_code: int) -> None:
    if world.rank == world.num_ranks - 1:
        print("this line must not be lost")
        world.abort(exit_code)
    world.barrier()


def one_rank_raises_alone(world: World) -> None:
    """An error that is not agreed: the launcher of the tests aborts, as the command does."""
    if world.rank == 0:
        raise DataError("only rank 0 knows")
    world.barrier()


def contract_and_totals(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {"contract": small_pieces(world)}
    if world.backend == "horovod":
        found["buffers that differ"] = buffers_that_differ(world)
    return {**found, "totals": totals(world)}


def all_that_opens_worlds(world: World) -> dict[str, Any]:
    """`world` is MPI's: other worlds are opened and closed while it is there. The first case has not loaded Horovod."""
    found = {
        "auto": open_and_describe(world, {}),
        "missing on ranks 1 and 2": open_and_describe(world, {"horovod": [1, 2]}, "auto", "nccl-torus"),
        "asked for and missing on rank 1": open_and_describe(world, {"horovod": [1]}, "horovod"),
    }
    if importlib.util.find_spec("horovod") is not None:
        found["when needed"] = horovod_when_needed(world)
        found["in a session"] = horovod_in_a_session(world)
        found["beside MPI"] = horovod_beside_mpi(world)
        found["an algorithm of Horovod's"] = open_and_describe(world, {}, "auto", "nccl-torus")
    return found


def totals(world: World) -> dict[str, Any]:
    """What a session makes of numbers and tensors that each rank brings; the tensors as lists, with their dtype."""
    session = session_over(world)
    tenths = 0.1 * (1 + world.rank)
    numbers = {"loss": tenths, "samples": 2.0**52, "hidden": (1e16, 1.0, -1e16)[world.rank]}
    if world.rank == 1:
        numbers = dict(reversed(numbers.items()))  # names count, not their order
    found: dict[str, Any] = {}
    for op in ("sum", "mean", "max"):
        found[op] = session.all_reduce(numbers, op=op)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64):
            if op == "mean" and dtype is torch.int64:
                continue
            unit = 2**55 + 1 if dtype is torch.int64 else 2.0**10  # float16 ends at 2**16
            mine = (torch.tensor([[1, -2], [3, 0]], dtype=dtype) * unit * (1 + world.rank)).t()
            total = session.all_reduce(mine, op=op)
            found[f"{op} {str(dtype).removeprefix('torch.')}"] = total.tolist()
            assert total.dtype is dtype
    # Three ranks' sum is beyond float16; their mean is not.
    found["mean of large"] = float(session.all_reduce(torch.tensor(60000.0, dtype=torch.float16), op="mean"))
    found["nan"] = session.all_reduce({"x": math.nan if world.rank == 1 else 5.0}, op="max")["x"] != 5.0
    return found


def small_pieces(world: World) -> list[str]:
    """The contract over a world whose pieces are so short that buffers of 1000 elements and more take several."""
    from hpctrain.testing.collective_cases import run_all

    if world.backend == "horovod":
        from hpctrain.comm.backends.horovod_world import HorovodWorld

        found = run_all(HorovodWorld.open(chunk_elems=PIECE_ELEMS))
    else:
        from hpctrain.comm.backends.mpi_world import MpiWorld

        found = run_all(MpiWorld.open(chunk_elems=PIECE_ELEMS))
    return [f"{name}: {text}" for name, text in found.items() if text]


def horovod_beside_mpi(world: World) -> dict[str, Any]:
    """`world` is MPI's: Horovod starts beside it, both communicate, Horovod ends, MPI goes on."""
    from hpctrain.comm.backends.horovod_world import HorovodWorld

    horovod = HorovodWorld.open()
    sums = []
    for comm in (world, horovod, world, horovod):
        buffer = torch.tensor([1.0 + world.rank])
        comm.all_reduce(buffer)
        sums.append(float(buffer))
    horovod.close()
    horovod.close()
    after = torch.tensor([1.0])
    world.all_reduce(after)
    return {"sums": sums, "after": float(after), "rank": horovod.rank}


def buffers_that_differ(world: World) -> str:
    """Horovod compares shapes: every rank hears of it, and the ranks go on."""
    try:
        world.all_reduce(torch.ones(3 + world.rank))
        text = "nothing raised"
    except CommunicationError as error:
        text = f"{type(error).__name__}: {error}"
    world.barrier()
    return text


def different_buffers_in_turn(world: World, directory: str | None) -> list[str]:
    """Rank 1 brings something else to one operation after the other; what this rank is told each time."""
    positions = None if directory is None else Path(directory)
    monitored = Monitored(world, timeout_s=600, directory=positions)
    num_ranks, odd = world.num_ranks, world.rank == 1

    def vector(num_elems: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(num_elems, dtype=dtype)

    def of_each(num_elems: int) -> list[int]:
        return [num_elems] * num_ranks

    same_bytes = torch.int32 if odd else torch.float32
    calls: dict[str, Callable[[], object]] = {
        "size": lambda: monitored.all_reduce(vector(7 if odd else 4)),
        "dtype": lambda: monitored.all_reduce(vector(4, torch.float64 if odd else torch.float32)),
        "same bytes": lambda: monitored.all_reduce(vector(4, same_bytes)),
        "long": lambda: monitored.all_reduce(vector(150_000 if odd else 100_000)),
        "broadcast": lambda: monitored.broadcast(vector(7 if odd else 4), root=0),
        "broadcast dtype": lambda: monitored.broadcast(vector(4, same_bytes), root=0),
    }
    calls |= {
        "empty": lambda: monitored.all_reduce(vector(0 if odd else 4)),
        "empty broadcast": lambda: monitored.broadcast(vector(0 if odd else 4), root=0),
        "empty all_gather": lambda: monitored.all_gather(
            vector(0 if odd else 2), counts=of_each(0 if odd else 2)
        ),
        "empty reduce_scatter": lambda: monitored.reduce_scatter(
            vector(0 if odd else 2 * num_ranks), counts=of_each(0 if odd else 2)
        ),
    }
    if (
        world.backend == "mpi"
    ):  # Horovod lets an all-gather's parts differ, and never ends where operations do
        calls |= {
            "reduce_scatter": lambda: monitored.reduce_scatter(
                vector(num_ranks * (3 if odd else 2)), counts=of_each(3 if odd else 2)
            ),
            "all_gather": lambda: monitored.all_gather(vector(2, same_bytes), counts=of_each(2)),
            "operation": lambda: monitored.barrier() if odd else monitored.all_reduce(vector(4)),
            "group": lambda: monitored.duplicate() if odd else monitored.split([[0, 1]]),
        }
    reported = []
    for name, call in calls.items():
        start_s = time.monotonic()
        try:
            call()
            reported.append(f"{name}: nothing raised")
        except HpctrainError as error:
            took = "in time" if time.monotonic() - start_s < 200 else "late"
            reported.append(f"{name}: {type(error).__name__} {error.agreed} {took} {error}")
    right = torch.ones(5)
    monitored.all_reduce(right)  # and the ranks go on
    reported.append(f"{float(right.sum()) / 5:g}")
    monitored.close()
    return reported


def one_rank_is_in_another_operation(world: World, directory: str) -> None:
    """Over Horovod, which knows operations by name, neither ends. Rank 0 leaves behind when it began."""
    monitored = Monitored(world, timeout_s=600, directory=Path(directory))
    monitored.barrier()
    if world.rank == 0:
        Path(directory, "began").touch()
    monitored.broadcast(torch.ones(4), root=0) if world.rank == 1 else monitored.all_reduce(torch.ones(4))


def one_rank_has_a_longer_buffer_in_pieces(world: World, directory: str) -> None:
    """The second piece of rank 1's buffer must not meet what the others sum next."""
    from hpctrain.comm.backends.horovod_world import HorovodWorld

    monitored = Monitored(HorovodWorld.open(chunk_elems=4), timeout_s=6, directory=Path(directory))
    monitored.all_reduce(torch.ones(8 if world.rank == 1 else 4))
    monitored.all_reduce(torch.ones(4))


def horovod_when_needed(world: World) -> dict[str, Any]:
    """`world` is MPI's. Whether Horovod runs, before its reductions, with two worlds of them, with one, and after; and
    on two ranks what is wrong with such a world."""
    from hpctrain.testing.collective_cases import run_all

    opened = open_world("horovod")
    horovod = importlib.import_module("horovod.torch")
    topology = Topology.from_node_names(["a", "b"] * (world.num_ranks // 2))
    running, sums, groups = [horovod.is_initialized()], [], []
    for _ in range(3):
        first, second = opened.world.open_reduction_world(), opened.world.open_reduction_world()
        running.append(horovod.is_initialized())
        groups.append(os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"])
        for reduce in (first.all_reduce, make_two_level(second, topology).all_reduce):
            buffer = torch.full((5,), 1.0 + world.rank)
            reduce(buffer)
            sums.append(float(buffer[-1]))
        groups.append(os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"])
        first.close()
        running.append(horovod.is_initialized())
        second.close()
        running.append(horovod.is_initialized())
    contract = run_all(opened.world.open_reduction_world()) if world.num_ranks == 2 else {}
    opened.world.close()
    wrong = [f"{name}: {text}" for name, text in contract.items() if text]
    return {"running": running, "sums": sums, "groups": groups, "contract": wrong}  # fmt: skip


def horovod_in_a_session(world: World) -> dict[str, Any]:
    """By algorithm: what reduces, and whether Horovod runs, with the backend `horovod`. `world` is MPI's."""
    session = init(backend="horovod", timeout_s=300)
    horovod = importlib.import_module("horovod.torch")
    found: dict[str, Any] = {}
    for algorithm in ("hierarchical", "auto", "flat"):
        reduction = session.reductions.make(ReductionRequest(algorithm=algorithm), gradient_bytes=4096)
        found[algorithm] = [reduction.algorithm.partition(":")[0], horovod.is_initialized()]
    session.close()
    found["closed"] = horovod.is_initialized()
    return found


def open_and_describe(
    world: World, missing: dict[str, list[int]], backend: str = "auto", algorithm: str | None = None
) -> dict[str, Any]:
    """What `open_world` gives when modules cannot be imported on some ranks. Runs along with `world`."""
    rank = world.rank
    gone = [module for module, ranks in missing.items() if rank in ranks and module not in sys.modules]
    sys.modules.update(dict.fromkeys(gone))  # None there makes an import fail
    try:
        opened = open_world(backend, algorithm=algorithm)
    except HpctrainError as error:
        return {"error": type(error).__name__, "text": str(error)}
    finally:
        for module in gone:
            del sys.modules[module]
    found = {"backend": opened.world.backend, "reductions": opened.world.reduction_backend}
    found |= {"reason": opened.reason, "notes": list(opened.notes)}
    if not missing and algorithm is None:
        found["horovod loaded"] = "horovod" in sys.modules
    found["ranks"] = all_gather_json(opened.world, rank)
    opened.world.close()
    return found


if __name__ == "__main__":
    # Started by mpirun without the tests' launcher: nothing has touched MPI before.
    world = open_world(sys.argv[1]).world
    print(
        f"rank {world.rank} of {world.num_ranks} over {world.backend}, mpi4py {'mpi4py.MPI' in sys.modules}"
    )
    if sys.argv[2:] == ["abort"] and world.rank == 1:
        world.abort(6)
    world.barrier()
    world.close()
