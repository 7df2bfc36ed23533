"""Every rank makes mistakes that all ranks see, one after another in one process, and continues each time."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import hpctrain.hvd as hvd


def refused(kind: type[BaseException], function: Callable[[], object]) -> None:
    """Calls `function`, which must raise `kind`; a sum over the ranks works afterwards."""
    try:
        function()
    except kind:
        pass
    else:
        raise AssertionError(f"no {kind.__name__}")
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == hvd.size()


def different_calls() -> None:
    rank, size = hvd.rank(), hvd.size()
    other_dtype = torch.ones(4, dtype=torch.int32 if rank % 2 else torch.float32)
    rows = torch.ones(2 * size, 1 + rank)
    refused(RuntimeError, lambda: hvd.allreduce(torch.ones(3 + rank)))
    refused(RuntimeError, lambda: hvd.allreduce(torch.ones(6) if rank else torch.ones(2, 3)))
    for function in (hvd.allreduce, hvd.allgather, hvd.reducescatter):
        refused(RuntimeError, lambda: function(other_dtype))  # noqa: B023
    refused(RuntimeError, lambda: hvd.broadcast(other_dtype, 0))
    refused(RuntimeError, lambda: hvd.broadcast(torch.ones(3), rank))
    refused(RuntimeError, lambda: hvd.allgather(rows))
    refused(RuntimeError, lambda: hvd.alltoall(rows))
    refused(RuntimeError, lambda: hvd.reducescatter(torch.tensor(1.0)))
    refused(RuntimeError, lambda: hvd.reducescatter(torch.ones(size), op=hvd.Adasum))
    refused(ValueError, lambda: hvd.alltoall(torch.ones(size + 1)))
    refused(ValueError, lambda: hvd.alltoall(torch.ones(size), torch.ones(size)))
    refused(ValueError, lambda: hvd.broadcast_object(threading.Lock() if rank == 0 else None))
    refused(ValueError, lambda: hvd.allgather_object(threading.Lock() if rank == 1 else None))
    assert hvd.broadcast_object("afterwards") == "afterwards"


def names_in_use() -> None:
    size = hvd.size()
    rows = torch.ones(size, 2)
    starts: list[Callable[[], hvd.Handle]] = [
        lambda: hvd.allreduce_async(rows, name="twice"),
        lambda: hvd.allgather_async(rows, name="twice"),
        lambda: hvd.broadcast_async(rows, 0, name="twice"),
        lambda: hvd.reducescatter_async(rows, name="twice"),
        lambda: hvd.alltoall_async(rows, name="twice"),
    ]
    for start in starts:
        start()
        refused(ValueError, start)
        hvd.synchronize(start())  # a later operation was waited for: the name is free
        hvd.synchronize(start())


def different_orders() -> None:
    """Rank 0 has started an operation that the others start later: nobody waits for a rank that has its error."""
    rank, rows = hvd.rank(), torch.ones(3)
    first: list[Callable[[], object]] = [
        hvd.barrier,
        lambda: hvd.allreduce(torch.ones(2)),
        lambda: hvd.broadcast_object("value"),
        lambda: hvd.synchronize(hvd.allgather_async(rows)),
    ]
    for function in first:
        if rank == 0:
            hvd.allreduce_async(rows, name="early")
        refused(RuntimeError, function)
    # As a Horovod program does to see that a name is in use.
    for early in (0, 1):
        if (rank == 0) == (early == 0):
            hvd.allreduce_async(rows, name="duplicate")
            refused_at_once(lambda: hvd.allreduce_async(rows, name="duplicate"))
        refused(RuntimeError, hvd.barrier)
    # Two that were started, and differ: both ranks see it at the next wait.
    handle = hvd.allreduce_async(torch.ones(2 + rank))
    refused(RuntimeError, lambda: hvd.synchronize(handle))


def refused_at_once(function: Callable[[], object]) -> None:
    try:
        function()
    except ValueError:
        return
    raise AssertionError("no ValueError")


def joined() -> None:
    """Rank 0 has joined: others may only sum, and rank 0 stays joined when they do something else."""
    rank, size = hvd.rank(), hvd.size()
    wrong: list[Callable[[], object]] = [
        lambda: hvd.allgather(torch.ones(2)),
        lambda: hvd.broadcast(torch.ones(2), 1),
        lambda: hvd.alltoall(torch.ones(size)),
        lambda: hvd.allreduce(torch.ones(2), op=hvd.Max),
    ]
    if size > 2:
        wrong.append(lambda: hvd.allreduce(torch.ones(1 + rank)))
    if rank > 0:
        for function in wrong:
            try:
                function()
            except hvd.HorovodInternalError:
                pass
            else:
                raise AssertionError("called with a rank that has joined")
            assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == size - 1
    assert hvd.join() > 0
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == size


def joined_for_long() -> None:
    """A rank that has joined waits longer than the limit of an operation."""
    hvd.shutdown()
    hvd.init(timeout_s=8)
    if hvd.rank() > 0:
        for _ in range(12):
            time.sleep(1)
            hvd.allreduce(torch.ones(1))
    hvd.join()
    hvd.shutdown()
    hvd.init(timeout_s=300)


def model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def optimizers_made_anew() -> None:
    """The newest optimizer of a parameter reduces its gradient, once."""
    size = hvd.size()
    for keeps_first in (False, True):
        layer = nn.Linear(2, 1, bias=False)
        hvd.broadcast_parameters(layer.state_dict(), 0)
        first = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), op=hvd.Sum)
        kept = [first] if keeps_first else []
        del first
        gc.collect()
        second = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), op=hvd.Sum)
        for _ in range(2):
            layer(torch.ones(1, 2)).sum().backward()
            second.synchronize()
            assert layer.weight.grad is not None
            assert torch.equal(layer.weight.grad, torch.full((1, 2), float(size)))
            with second.skip_synchronize():
                second.step()
            second.zero_grad()
        kept.clear()


def parameters_added_to_adasum() -> None:
    first, added = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first], lr=0.1), op=hvd.Adasum)
    optimizer.add_param_group({"params": [added]})
    ((first.sum() + added.sum()) * (1 + hvd.rank())).backward()
    optimizer.step()
    for parameter in (first, added):
        everyone = hvd.allgather(parameter.detach()[None])
        assert torch.equal(everyone, everyone[:1].expand_as(everyone))


def new_optimizers() -> None:
    """State of optimizers that made no step, with options of NumPy's types; frozen parameters."""
    trained = model()
    frozen = next(trained.parameters()).requires_grad_(False)
    inner = torch.optim.SGD(trained.parameters(), lr=0.1 * np.sqrt(hvd.size()), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert frozen.grad is None
    gradients = [parameter.grad for parameter in trained.parameters() if parameter.requires_grad]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def a_second_reduction_warns() -> None:
    trained = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(trained.parameters(), lr=0.1))
    functional.mse_loss(trained(torch.ones(1, 3)), torch.ones(1, 2)).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as found:
        optimizer.step()
    assert ["called without optimizer.skip_synchronize()" in str(one.message) for one in found] == [True]


def main() -> None:
    hvd.init(timeout_s=300)
    for case in (
        different_calls, names_in_use, different_orders, joined, joined_for_long, optimizers_made_anew,
        parameters_added_to_adasum, new_optimizers, a_second_reduction_warns, different_calls,
    ):  # fmt: skip
        case()
    hvd.shutdown()
    print("continued", flush=True)


if __name__ == "__main__":
    main()
