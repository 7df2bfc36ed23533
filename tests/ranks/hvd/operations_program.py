"""Every rank calls the operations of hpctrain.hvd, and compares the results with what they must be."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable

import torch

import hpctrain.hvd as hvd
from hpctrain.errors import UsageError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
]
OPS: dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    hvd.Sum: torch.add, hvd.Min: torch.minimum, hvd.Max: torch.maximum, hvd.Product: torch.mul,
}  # fmt: skip


def values(rank: int, *, dtype: torch.dtype = torch.float32, rows: int = 12) -> torch.Tensor:
    """Small numbers, so that sums and products of a few of them are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(0, 3, (rows, 2), generator=generator).to(dtype)


def check(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    assert torch.equal(found, expected), f"{what}: {found} instead of {expected}"


def everyone(**options: object) -> list[torch.Tensor]:
    return [values(rank, **options) for rank in range(hvd.size())]  # type: ignore[arg-type]


def reductions() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        for op, function in OPS.items():
            expected = functools.reduce(function, everyone(dtype=dtype))
            mine = values(rank, dtype=dtype)
            check(hvd.allreduce(mine, op=op), expected, f"{op} {dtype}")
            check(mine, values(rank, dtype=dtype), "allreduce leaves its argument alone")
            assert hvd.allreduce_(mine, op=op) is mine
            check(mine, expected, f"in place {op} {dtype}")
    total = functools.reduce(torch.add, everyone())
    check(hvd.allreduce(values(rank)), total / size, "average")
    check(
        hvd.allreduce(values(rank), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
        2 * total,
        "factors",
    )
    whole = hvd.allreduce(torch.tensor([7]), op=hvd.Sum, prescale_factor=0.5)
    check(whole, torch.tensor([3 * size]), "factor of integers")
    rows = values(rank).t()  # not contiguous
    hvd.allreduce_(rows, op=hvd.Sum)
    check(rows, total.t(), "not contiguous")
    check(hvd.allreduce(values(rank), compression=hvd.Compression.fp16, op=hvd.Sum), total, "compressed")
    mixed = [values(rank, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.float32)]
    for found, like in zip(hvd.grouped_allreduce(mixed, op=hvd.Sum), mixed, strict=True):
        check(found, total.to(like.dtype), "grouped")
    hvd.grouped_allreduce_(mixed, op=hvd.Sum)
    check(mixed[1], total.double(), "grouped in place")
    handles = [hvd.allreduce_async(torch.full((4,), float(rank)), name=f"{i}", op=hvd.Sum) for i in range(5)]
    for handle in reversed(handles):
        check(hvd.synchronize(handle), torch.full((4,), size * (size - 1) / 2), "asynchronous")
        assert hvd.poll(handle)
    entries = torch.sparse_coo_tensor(torch.tensor([[0, rank]]), torch.ones(2, 3), (size, 3))
    expected = torch.ones(size, 3)
    expected[0] += size
    handle = hvd.sparse_allreduce_async(entries, name="sparse", op=hvd.Sum)
    check(hvd.synchronize(handle).to_dense(), expected, "sparse")
    check(
        hvd.sparse_allreduce_async(entries, "sparse", hvd.Average)().to_dense(),
        expected / size,
        "sparse average",
    )
    for num_rows in (size * 2, size * 2 + 1, 1):  # the first ranks have one more
        counts = [num_rows // size + (r < num_rows % size) for r in range(size)]
        parts = functools.reduce(torch.add, everyone(rows=num_rows)).split(counts)
        check(hvd.reducescatter(values(rank, rows=num_rows), op=hvd.Sum), parts[rank], "reducescatter")
        both = hvd.grouped_reducescatter([values(rank, rows=num_rows)] * 2, postscale_factor=2.0)
        check(both[1], 2 * (parts[rank] / size), "grouped reducescatter, average")


def movements() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in [*DTYPES, torch.bool, torch.complex64]:
        parts = [values(r, dtype=dtype, rows=r + 1) for r in range(size)]
        check(hvd.allgather(parts[rank]), torch.cat(parts), f"allgather {dtype}")
        pair = hvd.grouped_allgather([parts[rank], values(rank, dtype=dtype)])
        check(pair[0], torch.cat(parts), f"grouped allgather {dtype}")
        check(pair[1], torch.cat(everyone(dtype=dtype)), f"grouped allgather {dtype}")
        mine = values(rank, dtype=dtype)
        check(hvd.broadcast(mine, size - 1), values(size - 1, dtype=dtype), f"broadcast {dtype}")
        check(mine, values(rank, dtype=dtype), "broadcast leaves its argument alone")
        hvd.broadcast_(mine, root_rank=size - 1)
        check(mine, values(size - 1, dtype=dtype), f"broadcast in place {dtype}")
        splits = [rank + r for r in range(size)]  # none from rank 0 to itself
        sent = torch.cat([torch.full((count, 2), 2 * rank).to(dtype) for count in splits])
        received, rows = hvd.alltoall(sent, splits=torch.tensor(splits, dtype=torch.int32))
        check(rows, torch.tensor(splits, dtype=torch.int32), "received splits")
        expected = torch.cat([torch.full((rank + r, 2), 2 * r).to(dtype) for r in range(size)])
        check(received, expected, f"alltoall {dtype}")
        check(hvd.synchronize(hvd.alltoall_async(sent, splits))[0], expected, "alltoall_async")
    even = hvd.alltoall(torch.arange(2.0 * size) + 100 * rank)
    check(even, torch.cat([torch.arange(2.0) + 2 * rank + 100 * r for r in range(size)]), "alltoall, evenly")
    hvd.barrier()


def gradients() -> None:
    """Of a loss on this rank, as Horovod defines them."""
    rank, size = hvd.rank(), hvd.size()

    def gradient(function: Callable[[torch.Tensor], torch.Tensor], rows: int = 12) -> torch.Tensor:
        leaf = values(rank, rows=rows).requires_grad_()
        result = function(leaf)
        (result * weights(rank, len(result))).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    def weights(of: int, rows: int) -> torch.Tensor:
        return (torch.arange(2.0 * rows) + 10 * of).view(rows, 2)

    total = functools.reduce(torch.add, [weights(r, 12) for r in range(size)])
    check(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, name="s")), total, "gradient of a sum")
    check(gradient(hvd.allreduce), total / size, "gradient of an average")
    check(gradient(lambda x: hvd.grouped_allreduce([x, x * 1], op=hvd.Sum)[0]), total, "gradient of a group")
    offset = sum(range(1, rank + 1))
    whole = functools.reduce(torch.add, [weights(r, sum(range(size + 1))) for r in range(size)]) / size
    check(gradient(hvd.allgather, rank + 1), whole[offset : offset + rank + 1], "gradient of allgather")
    root = total / size if rank == size - 1 else torch.zeros(12, 2)
    check(gradient(lambda x: hvd.broadcast(x, size - 1)), root, "gradient of broadcast")
    found = gradient(lambda x: hvd.alltoall(x, [rank + 1] * size)[0], (rank + 1) * size)
    # Rank r has received this rank's rows after those of the ranks before it.
    rows = [weights(r, sum(range(size + 1)))[offset : offset + rank + 1] for r in range(size)]
    check(found, torch.cat(rows), "gradient of alltoall")
    counts = [12 // size + (r < 12 % size) for r in range(size)]
    kept = torch.cat([weights(r, count) for r, count in enumerate(counts)])
    check(gradient(hvd.reducescatter), kept, "gradient of reducescatter, average")
    check(gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum)), kept * size, "gradient of reducescatter, sum")


def adasum() -> None:
    """Against the formula in float64: pairs of neighbours, the odd one waiting for the next round."""
    rank, size = hvd.rank(), hvd.size()

    def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        both = (a * b).sum()
        return a * (1 - both / (2 * (a * a).sum())) + b * (1 - both / (2 * (b * b).sum()))

    def tree(parts: list[torch.Tensor]) -> torch.Tensor:
        while len(parts) > 1:
            parts = [
                combine(*parts[i : i + 2]) if len(parts) > i + 1 else parts[i]
                for i in range(0, len(parts), 2)
            ]
        return parts[0]

    def part(of: int, rows: int) -> torch.Tensor:
        return torch.randn(rows, 3, generator=torch.Generator().manual_seed(of), dtype=torch.float64)

    for rows in (5, 1000):
        expected = tree([part(r, rows) for r in range(size)])
        for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-5), (torch.float16, 1e-2)):
            found = hvd.allreduce(part(rank, rows).to(dtype), op=hvd.Adasum)
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    pair = hvd.grouped_allreduce([part(rank, 5), part(rank, 1000)], op=hvd.Adasum)  # each by itself
    torch.testing.assert_close(pair[0], tree([part(r, 5) for r in range(size)]), rtol=1e-14, atol=1e-14)
    check(hvd.allreduce(torch.ones(4), op=hvd.Adasum), torch.ones(4), "Adasum of equal tensors")


def process_sets() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert (hvd.global_process_set.process_set_id, hvd.global_process_set.size()) == (0, size)
    last = hvd.ProcessSet([size - 1]) if size < 3 else hvd.ProcessSet([2, 1])
    assert last.size() is None
    if size > 1:
        assert hvd.add_process_set(last) is last
        assert (last.process_set_id, last.included()) == (1, rank in last.ranks)
        if last.included():
            members = last.ranks
            assert last.rank() == members.index(rank)
            total = torch.tensor([float(sum(members))])
            check(hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum, process_set=last), total, "set")
            check(
                hvd.broadcast(torch.tensor([rank]), members[-1], process_set=last),
                torch.tensor([members[-1]]),
                "root",
            )
            assert hvd.broadcast_object(rank, members[-1], process_set=last) == members[-1]
        else:
            raises(ValueError, lambda: hvd.allreduce(torch.ones(1), process_set=last))
        raises(ValueError, lambda: hvd.add_process_set(last.ranks))
        assert hvd.remove_process_set(last)
        assert not hvd.remove_process_set(last)
        assert last.process_set_id is None
        again = hvd.add_process_set(list(range(size - 1)))
        if again.included():
            check(hvd.allgather(torch.tensor([rank]), process_set=again), torch.arange(size - 1), "a new set")
    assert not hvd.remove_process_set(hvd.global_process_set)


def objects() -> None:
    rank, size = hvd.rank(), hvd.size()
    sent = {"rank": rank, "pair": (1, 2.5), "tensor": torch.arange(3)}
    found = hvd.broadcast_object(sent if rank == 0 else None, root_rank=0, name="object")
    assert (found["rank"], found["pair"], found["tensor"].tolist()) == (0, (1, 2.5), [0, 1, 2])
    assert [each["rank"] for each in hvd.allgather_object(sent)] == list(range(size))
    assert hvd.allgather_object(complex(rank, 1)) == [complex(r, 1) for r in range(size)]
    raises(UsageError, lambda: hvd.allgather_object(lambda: 0))

    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1), betas=(0.5, 0.75))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if rank == 0:  # the others have no state yet
        for _ in range(2):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
        schedule.step()
    for params in (model.state_dict(), list(model.named_parameters()), model.parameters()):
        hvd.broadcast_parameters(params, root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    states = hvd.allgather_object([*model.state_dict().values(), *optimizer.state[model[0].weight].values()])
    for state in states:
        for mine, other in zip(states[0], state, strict=True):
            check(other, mine, "broadcast state")
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    schedule.step()  # it holds the same groups still
    assert optimizer.param_groups[0]["lr"] < 0.05 + rank


def queries() -> None:
    size = hvd.size()
    local = int(os.environ.get("HPCTRAIN_RANKS_PER_NODE", size))
    places = (hvd.local_size(), hvd.local_rank(), hvd.cross_size(), hvd.cross_rank())
    assert places == (local, hvd.rank() % local, size // local, hvd.rank() // local)
    assert hvd.is_homogeneous()
    assert hvd.mpi_enabled()
    assert hvd.mpi_threads_supported()
    assert not any([hvd.nccl_built(), hvd.gloo_built(), hvd.cuda_built(), hvd.rocm_built(), hvd.ddl_built()])
    hvd.init()  # again


def large() -> None:
    """Of these sums are made within the nodes, then between them, if there are several of several ranks."""
    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.float32, torch.float64, torch.float16):
        values = (torch.arange(70_001) % 31).to(dtype)
        total = hvd.allreduce(values * (rank + 1), op=hvd.Sum)
        check(total, values * (size * (size + 1) // 2), f"large sum of {dtype}")
    if rank == 0:
        hvd.join()
    else:
        check(
            hvd.allreduce(torch.ones(70_001), op=hvd.Sum),
            torch.full((70_001,), size - 1.0),
            "large sum of the rest",
        )
        hvd.join()


def joins() -> None:
    """Rank r has r + 1 tensors; the rank with most is the last."""
    rank, size = hvd.rank(), hvd.size()
    for i in range(rank + 1):
        mean = hvd.allreduce(torch.full((5,), float(rank + 1)), name=f"batch {i}")
        check(
            mean, torch.full((5,), sum(range(i + 1, size + 1))) / size, "average with ranks that have joined"
        )
        both = hvd.grouped_allreduce([torch.ones(2), torch.ones(3).double()], op=hvd.Sum)
        check(both[1], torch.full((3,), float(size - i)).double(), "sum with ranks that have joined")
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    assert hvd.join() == size - 1
    check(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.ones(1) * size, "after the join")
    assert hvd.join() == size - 1  # all with as many


def batch_norm() -> None:
    rank, size = hvd.rank(), hvd.size()
    layer, alone = hvd.SyncBatchNorm(2).double(), torch.nn.BatchNorm1d(2).double()
    parts = [values(r, dtype=torch.float64, rows=r + 2) for r in range(size)]
    expected = alone(torch.cat(parts)).split([len(part) for part in parts])[rank]
    torch.testing.assert_close(layer(parts[rank]), expected)
    torch.testing.assert_close(layer.running_var, alone.running_var)


def raises(kind: type[BaseException], function: Callable[[], object]) -> BaseException:
    try:
        function()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def refusals() -> None:
    """Errors that come before anything is sent; everything works afterwards."""
    size = hvd.size()
    raises(ValueError, lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum))
    raises(ValueError, lambda: hvd.allreduce(torch.ones(1), op=17))
    raises(ValueError, lambda: hvd.broadcast(torch.ones(1), root_rank=size))
    raises(ValueError, lambda: hvd.alltoall(torch.ones(3), splits=[1] * (size + 1)))
    raises(ValueError, lambda: hvd.allgather(torch.tensor(1.0)))
    raises(UsageError, lambda: hvd.allreduce(torch.ones(1).to(torch.float8_e4m3fn)))
    raises(UsageError, lambda: hvd.allreduce(torch.ones(2, 2).to_sparse()))
    raises(UsageError, lambda: hvd.start_timeline("timeline.json"))
    assert "launch -n 3 -- python" in str(raises(UsageError, lambda: hvd.run(refusals, np=3)))
    check(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.full((1,), float(size)), "after refusals")


def elastic() -> None:
    """All ranks call something different once; what was committed comes back, and training goes on."""
    rank, size = hvd.rank(), hvd.size()
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, batch=rank, start_bias=model.bias.detach().clone()
    )
    resets, seen = [], []
    state.register_reset_callbacks([lambda: resets.append(state.batch)])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> str:
        while state.batch < 4:
            seen.append(state.batch)
            optimizer.zero_grad()
            model(torch.full((1, 2), float(rank))).sum().backward()
            if state.batch == 2 and not resets:
                hvd.allreduce(torch.ones(2 + (rank if size > 1 else 0)), name="other")
                if size == 1:
                    raise hvd.HorovodInternalError("as if", agreed=True)
            optimizer.step()
            state.batch += 1
            if state.batch == 2:
                state.commit()
        return "trained"

    assert train(state) == "trained"
    assert (resets, seen) == ([2], [0, 1, 2, 2, 3])  # rank 0's batch counts at the start
    # Four steps of 0.1 with the mean gradient of all ranks: 1 + 1.9 + 2.71 + 3.439 times.
    bias = state.start_bias - 0.1 * 9.049
    torch.testing.assert_close(model.bias.detach(), bias)
    weights = hvd.allgather(model.weight.detach())
    assert torch.equal(weights, weights[:1].expand(size, 2))
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    sampler.record_batch(0, batch_size=1)
    sampler.reset()
    found = hvd.allgather_object(list(sampler))
    assert {index for of_rank in found for index in of_rank} == set(range(size, 10))


def different_calls() -> None:
    """Ends every rank, with code 6 and a message that has what each has called."""
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(3), name="loss")
    else:
        hvd.allgather(torch.ones(3), name="accuracy")


def missing() -> None:
    """Rank 1 does not come to an operation of rank 0."""
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(3), name="loss")
    else:
        time.sleep(60)


def main() -> None:
    raises(ValueError, hvd.size)
    if sys.argv[1:2] == ["missing"]:
        hvd.init(timeout_s=10, watch_folder=sys.argv[2])
        missing()
    hvd.init(timeout_s=300)
    if len(sys.argv) > 1:
        different_calls()
    for case in (
        queries, reductions, large, movements, gradients, adasum, process_sets, objects, joins, batch_norm, refusals,
        elastic, reductions,
    ):  # fmt: skip
        case()
    size = hvd.size()
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init(list(range(size)), process_sets=[hvd.ProcessSet([0])] if size > 1 else "dynamic")
    check(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.full((1,), float(size)), "initialised again")
    hvd.shutdown()
    print("has seen everything", flush=True)


if __name__ == "__main__":
    main()
