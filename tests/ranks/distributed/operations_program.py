"""Every rank calls the operations of torch.distributed, and compares the results with what they must be."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import hpctrain
from hpctrain.errors import CommunicationError

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
]  # fmt: skip
OPS: dict[str, tuple[dist.ReduceOp.RedOpType, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "min": (dist.ReduceOp.MIN, torch.minimum),
    "product": (dist.ReduceOp.PRODUCT, torch.mul),
    "and": (dist.ReduceOp.BAND, torch.bitwise_and),
    "or": (dist.ReduceOp.BOR, torch.bitwise_or),
    "xor": (dist.ReduceOp.BXOR, torch.bitwise_xor),
}


def values(rank: int, *, dtype: torch.dtype, num: int = 12) -> torch.Tensor:
    """Small numbers, so that sums and products of four of them are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(0, 3, (num,), generator=generator).to(dtype)


def check(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    assert torch.equal(found, expected), f"{what}: {found} instead of {expected}"


def reductions() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for name, (op, function) in OPS.items():
            if name in ("and", "or", "xor") and dtype.is_floating_point:
                continue
            parts = [values(r, dtype=dtype) for r in range(size)]
            expected = functools.reduce(function, parts)
            mine = values(rank, dtype=dtype)
            dist.all_reduce(mine, op=op)
            check(mine, expected, f"all_reduce {name} {dtype}")
            mine = values(rank, dtype=dtype)
            dist.reduce(mine, size - 1, op=op)
            check(mine, expected if rank == size - 1 else parts[rank], f"reduce {name} {dtype}")
            whole = torch.cat([values(rank, dtype=dtype, num=5) for r in range(size)]).to(dtype)
            part = torch.empty(5, dtype=dtype)
            dist.reduce_scatter_tensor(part, whole, op=op)
            expected = functools.reduce(function, [values(r, dtype=dtype, num=5) for r in range(size)])
            check(part, expected, f"reduce_scatter {name} {dtype}")
    mean = torch.full((3,), float(rank))
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    check(mean, torch.full((3,), (size - 1) / 2), "mean")
    means()
    rows = torch.arange(12.0).view(3, 4).t() * (rank + 1)  # not contiguous
    dist.all_reduce(rows)
    check(rows, torch.arange(12.0).view(3, 4).t() * (size * (size + 1) / 2), "not contiguous")
    outputs = [torch.full((r + 1,), float(rank + 1)) for r in range(size)]  # uneven
    part = torch.empty(rank + 1)
    dist.reduce_scatter(part, outputs)
    check(part, torch.full((rank + 1,), size * (size + 1) / 2), "uneven reduce_scatter")
    for dtype in (torch.float32, torch.int64, torch.uint8):
        # Large enough that each rank sums a slice of it.
        whole = (torch.arange(size * 70_001) % 17).to(dtype)
        mine = whole * (rank + 1)
        dist.all_reduce(mine)
        check(mine, whole * (size * (size + 1) // 2), f"large all_reduce {dtype}")
        part = torch.empty(70_001, dtype=dtype)
        dist.reduce_scatter_tensor(part, whole * (rank + 1))
        check(part, mine[rank * 70_001 : (rank + 1) * 70_001], f"large reduce_scatter {dtype}")
    # In a ring, in several pieces and none.
    counts = [300_000 * r + 7 * (r > 0) for r in range(size)]
    outputs = [(torch.arange(count) % 1009).float() * (rank + 1) + r for r, count in enumerate(counts)]
    part = torch.empty(counts[rank])
    dist.reduce_scatter(part, outputs)
    expected = (torch.arange(counts[rank]) % 1009) * (size * (size + 1) / 2) + size * rank
    check(part, expected.float(), "uneven reduce_scatter in a ring")
    indices = torch.tensor([[0, rank]])
    sparse = torch.sparse_coo_tensor(indices, torch.ones(2, 3), (size, 3))
    dist.all_reduce(sparse)
    expected = torch.ones(size, 3)
    expected[0] += size
    check(sparse.to_dense(), expected, "sparse")
    works = [dist.all_reduce(torch.full((4,), float(rank)), async_op=True) for _ in range(5)]
    for work in works:
        assert work.wait()
        assert work.is_success()
        check(work.result()[0], torch.full((4,), size * (size - 1) / 2), "behind")


def means() -> None:
    """Means whose sums overflow; of half types rounded once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    largest = {torch.uint8: 200, torch.int32: 2**31 - 1, torch.float16: 40_000.0}
    for dtype, value in largest.items():
        for num in (3, 200_000):
            mine = torch.full((num,), value, dtype=dtype)
            dist.all_reduce(mine, op=dist.ReduceOp.AVG)
            check(mine, torch.full((num,), value, dtype=dtype), f"mean of large {dtype}")
            part = torch.empty(num, dtype=dtype)
            dist.reduce_scatter_tensor(part, mine.repeat(size), op=dist.ReduceOp.AVG)
            check(part, mine, f"reduce_scatter, mean of large {dtype}")
    for dtype in (torch.float16, torch.bfloat16):
        parts = [
            torch.rand(5000, generator=torch.Generator().manual_seed(r)).add(0.5).to(dtype)
            for r in range(size)
        ]
        expected = (functools.reduce(torch.add, [part.float() for part in parts]) / size).to(dtype)
        mine = parts[rank].clone()
        dist.all_reduce(mine, op=dist.ReduceOp.AVG)
        check(mine, expected, f"mean of {dtype}")
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([40_000.0]).half(), (2,))
    dist.all_reduce(sparse, op=dist.ReduceOp.AVG)
    check(sparse.to_dense(), torch.tensor([40_000.0, 0.0]).half(), "sparse mean")


def callbacks() -> None:
    """Operations of futures' callbacks come in the same order on every rank, however long each rank takes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    futures = []
    for number in range(6):

        def follow(done: torch.futures.Future[list[torch.Tensor]], number: int = number) -> torch.Tensor:
            time.sleep(0.01 * ((rank + number) % 3))
            second = torch.full((3,), 100.0 * number)
            third = dist.all_reduce(second, async_op=True).get_future().wait()[0]
            dist.all_reduce(third)
            return third + done.value()[0]

        work = dist.all_reduce(torch.full((3,), float(number)), async_op=True)
        futures.append(work.get_future().then(follow).then(lambda future: future.value() + 1))
        time.sleep(0.01 * ((rank + number) % 2))
    for number, future in enumerate(futures):
        check(future.wait(), torch.full((3,), 100.0 * number * size**2 + number * size + 1), "callback")
    # A callback that waits for what was asked for before.
    first, second = (dist.all_reduce(torch.full((3,), value), async_op=True) for value in (1.0, 2.0))
    chained = first.get_future().then(lambda _: second.get_future().wait())
    dist.all_reduce(torch.ones(3))
    check(chained.wait()[0], torch.full((3,), 2.0 * size), "a callback that waits")


def lengths() -> None:
    """A message of another length is an error on the receiving rank, in whichever thread it is found."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return
    for num in (5, 20):
        for late in (False, True):
            if rank == 0:
                dist.send(torch.ones(num), 1, tag=3)
            if rank == 1:
                work = dist.irecv(torch.empty(10), 0, tag=3)
                if late:
                    time.sleep(0.5)  # the thread of the messages sees it
                    assert work.is_completed()
                    assert not work.is_success()
                for _ in range(2):
                    text = "no error"
                    try:
                        work.wait()
                    except CommunicationError as error:
                        text = str(error)
                    assert "the 40" in text, f"{num} elements arrived as 10: {text}"
                    assert "from rank 0 with tag 3" in text, text
            dist.barrier()
    if rank == 0:
        dist.send(torch.ones(10), 1, tag=3)
    if rank == 1:
        found = torch.empty(10)
        dist.recv(found, 0, tag=3)
        check(found, torch.ones(10), "after errors")


def movements() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in [*DTYPES, torch.complex64]:
        mine = values(rank, dtype=dtype)
        everyone = [values(r, dtype=dtype) for r in range(size)]
        gathered = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(gathered, mine)
        for found, expected in zip(gathered, everyone, strict=True):
            check(found, expected, f"all_gather {dtype}")
        whole = torch.empty(size * 12, dtype=dtype)
        own = whole[12 * rank : 12 * rank + 12]
        own.copy_(mine)
        dist.all_gather_into_tensor(whole, own)
        check(whole, torch.cat(everyone), f"all_gather_into_tensor {dtype}")
        copied = values(rank, dtype=dtype)
        dist.broadcast(copied, src=size - 1)
        check(copied, everyone[-1], f"broadcast {dtype}")
        received = [torch.empty_like(mine) for _ in range(size)] if rank == 0 else None
        dist.gather(mine, received, dst=0)
        for found, expected in zip(received or [], everyone, strict=False):
            check(found, expected, f"gather {dtype}")
        part = torch.empty_like(mine)
        dist.scatter(part, everyone if rank == size - 1 else None, src=size - 1)
        check(part, mine, f"scatter {dtype}")
        sent = [torch.full((rank + r + 1, 2), rank).to(dtype) for r in range(size)]
        taken = [torch.empty(rank + r + 1, 2, dtype=dtype) for r in range(size)]
        dist.all_to_all(taken, sent)
        for r, found in enumerate(taken):
            check(found, torch.full((rank + r + 1, 2), r).to(dtype), f"all_to_all {dtype}")
        rows = [rank + r + 1 for r in range(size)]
        output = torch.empty(sum(rows), 2, dtype=dtype)
        dist.all_to_all_single(output, torch.cat(sent), rows, rows)
        check(output, torch.cat(taken), f"all_to_all_single {dtype}")
    counts = [300_000 * r + 7 * (r > 0) for r in range(size)]
    gathered = [torch.empty(count, dtype=torch.int32) for count in counts]
    dist.all_gather(gathered, torch.arange(counts[rank], dtype=torch.int32) + rank)
    for r, found in enumerate(gathered):
        check(found, torch.arange(counts[r], dtype=torch.int32) + r, "uneven all_gather in a ring")
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    sent_object: list[object] = [f"from {rank}"]
    dist.broadcast_object_list(sent_object, src=size - 1)
    assert sent_object == [f"from {size - 1}"]
    with dist._coalescing_manager(async_ops=True) as works:
        outputs = [torch.empty(size), torch.empty(2 * size)]
        dist.all_gather_into_tensor(outputs[0], torch.full((1,), float(rank)))
        dist.all_gather_into_tensor(outputs[1], torch.full((2,), float(rank)))
    works.wait()
    check(outputs[1], torch.arange(float(size)).repeat_interleave(2), "coalesced")
    dist.barrier()


def messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return
    right, left = (rank + 1) % size, (rank - 1) % size
    received = torch.empty(3, 2)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, torch.full((3, 2), float(rank)), right),
        dist.P2POp(dist.irecv, received, left),
    ])  # fmt: skip
    for work in works:
        work.wait()
    check(received, torch.full((3, 2), float(left)), "around")
    # Tags in the other order than they were sent in.
    if rank == 0:
        first, second = torch.empty(1), torch.empty(1)
        dist.recv(second, src=1, tag=7)
        dist.recv(first, src=1, tag=5)
        assert (first.item(), second.item()) == (5.0, 7.0)
        found = set()
        for _ in range(1, size):
            number = torch.empty(1)
            source = dist.recv(number, tag=9)
            assert number.item() == source
            found.add(source)
        assert found == set(range(1, size))
    else:
        if rank == 1:
            works = [dist.isend(torch.tensor([float(tag)]), 0, tag=tag) for tag in (5, 7)]
            for work in works:
                work.wait()
        dist.send(torch.tensor([float(rank)]), 0, tag=9)


def messages_of_a_transport(session: hpctrain.Session) -> None:
    """Messages with one tag between each two ranks, of lengths around that of a piece, arrive whole and in order."""
    transport = session.world.transport(session.topology)
    if transport is None:
        return
    rank, size = session.rank, session.world_size
    lengths = [1, 999, 1000, 1001, 54_321]

    def content(source: int, to: int, length: int) -> torch.Tensor:
        return ((torch.arange(length) * (3 * source + to + 1)) % 251).to(torch.uint8)

    others = [other for other in range(size) if other != rank]
    arriving = {(other, n): torch.zeros(n, dtype=torch.uint8) for other in others for n in lengths}
    pending = [transport.receive(buffer, source=other, tag=3) for (other, _), buffer in arriving.items()]
    pending += [transport.send(content(rank, other, n), to=other, tag=3) for other in others for n in lengths]
    while not transport.all_done(pending):
        time.sleep(1e-4)
    for (other, n), buffer in arriving.items():
        check(buffer, content(other, rank, n), f"{n} bytes from rank {other}")
    transport.close()


def in_small_pieces() -> None:
    """Has messages travel as between hosts over TCP, in pieces of 1,000 bytes."""
    from hpctrain.comm.backends import mpi_group, mpi_world as mpi_transport

    for module in (mpi_group, mpi_transport):
        module.piece_bytes = lambda mpi, comm: 1000  # type: ignore[attr-defined]
    mpi_group._EXCHANGED_BYTES = 5000


def groups() -> None:
    """Groups of some ranks, made while others do other things; the same ranks twice; in another order.

    After it ranks name groups of other backends differently: see "names".
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    even = dist.new_group(list(range(0, size, 2)), use_local_synchronization=True)
    if rank % 2 == 0:
        count = torch.ones(1)
        dist.all_reduce(count, group=even)
        assert count.item() == (size + 1) // 2
    again = [dist.new_group(list(range(size))) for _ in range(2)]
    works = []
    for group in again:
        works.append(dist.all_reduce(torch.full((1000,), 1.0), group=group, async_op=True))
    for work in reversed(works):
        work.wait()
        check(work.result()[0], torch.full((1000,), float(size)), "two groups at once")
    if size > 1:
        mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
        assert mesh.get_local_rank() == rank


def others() -> None:
    """Groups of gloo, of all and of some ranks, and a store that all ranks share."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for members in (list(range(size)), list(range(1, size))):
        group = dist.new_group(members, backend="gloo") if members else None
        if rank in members:
            count = torch.ones(2)
            dist.all_reduce(count, group=group)
            check(count, torch.full((2,), float(len(members))), "gloo")
            dist.destroy_process_group(group)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"of rank {rank}", bytes([rank, 200]))
    assert store.get(f"of rank {(rank + 1) % size}") == bytes([(rank + 1) % size, 200])
    store.add("all", 1)
    dist.barrier()
    assert store.add("all", 0) == size
    assert not store.check(["nothing"])
    assert store.compare_set("of rank 0", "other", "new") == bytes([0, 200])
    dist.barrier()  # rank 0 serves the store


def endings() -> None:
    """A group that is destroyed leaves no communicator, no thread and nothing that is watched."""
    before = handle(), set(threading.enumerate())
    for members in [*[[0, dist.get_world_size() - 1]] * 10, None]:
        group = dist.new_group(sorted(set(members)) if members else None)
        if members is None or dist.get_rank() in members:
            dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
            dist.destroy_process_group(group)
    dist.barrier()
    assert (handle(), set(threading.enumerate())) == before


def handle() -> int:
    """Returns MPI's number of a new communicator: the lowest that is free on all ranks. Collective."""
    if "mpi4py.MPI" not in sys.modules:
        return 0
    comm = sys.modules["mpi4py.MPI"].COMM_WORLD.Dup()
    found = int(comm.py2f())
    comm.Free()
    return found


def refusals() -> None:
    """Errors come before anything is sent, and the group still works afterwards."""
    for wrong in (
        lambda: dist.all_reduce(torch.empty(2, dtype=torch.float8_e4m3fn)),
        lambda: dist.all_gather_into_tensor(torch.empty(3 * dist.get_world_size() + 1), torch.empty(3)),
        lambda: dist.isend(torch.ones(1), (dist.get_rank() + 1) % dist.get_world_size(), tag=1 << 20),
        hpctrain.init_process_group,
    ):
        try:
            wrong()
        except (hpctrain.HpctrainError, ValueError):
            continue
        raise AssertionError("no error")
    count = torch.ones(1)
    dist.all_reduce(count)
    assert count.item() == dist.get_world_size()


if __name__ == "__main__":
    if sys.argv[1:2] == ["absent"]:
        session = hpctrain.init_process_group(timeout_s=12, watch_folder=sys.argv[2])
        if session.rank == 1:
            time.sleep(3600)
        dist.all_reduce(torch.ones(3))
    if sys.argv[1:2] == ["names"]:
        session = hpctrain.init_process_group(timeout_s=8)
        if session.rank == 0:
            dist.new_group([0], use_local_synchronization=RELEASE >= (2, 14))
        dist.new_group(backend="gloo")
    if sys.argv[1:2] == ["pieces"]:
        in_small_pieces()
    session = hpctrain.init_process_group(timeout_s=300)
    if sys.argv[1:2] == ["mismatch"]:
        dist.all_reduce(torch.ones(3 + session.rank))
    for case in (reductions, movements, messages, others, groups, refusals, callbacks, lengths, endings):
        case()
    messages_of_a_transport(session)
    dist.destroy_process_group()
    print(f"rank {session.rank} has seen everything", flush=True)
