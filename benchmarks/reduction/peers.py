"""Gradient reductions of peers: Horovod, torch DDP on Gloo, MPI. Each sums one buffer.

Peers run with their own defaults; all methods have the same threads and cores. A family is a set of methods that are
started and ended together: Horovod's thread communicates every millisecond even when idle, so it runs only
while Horovod's methods are measured.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

DDP_PARAMETERS = 16


def _nothing() -> None: ...


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of reducing `numel` float32 gradients over all ranks.

    fill: sets this rank's gradients to `values`, shape (numel,); not timed. reduce: the timed function; collective.
    result: returns the reduced gradients, shape (numel,); None if nothing is reduced. averages: whether the result is
    the mean instead of the sum.
    bits: size of an element on the wire. close: releases the method's resources; collective.
    runs: returns a description of what `auto` chose.
    """

    name: str
    bits: int
    fill: Callable[[torch.Tensor], None]
    reduce: Callable[[], None]
    result: Callable[[], torch.Tensor] | None
    averages: bool = True
    close: Callable[[], None] = _nothing
    runs: str = ""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Methods that are started and ended together. All functions are collective.

    methods: makes the methods for a given number of elements. forgets: whether the first call after a start is slow;
    then it is not timed.
    """

    name: str
    methods: Callable[[int], Sequence[Method]]
    forgets: bool = False
    begin: Callable[[], None] = _nothing
    end: Callable[[], None] = _nothing


# ---------------------------------------------------------------- MPI


def mpi_family(comm: Any) -> Family:
    """Returns MPI_Allreduce of the whole buffer, with the library's own choice of algorithm."""
    from mpi4py import MPI

    def methods(numel: int) -> list[Method]:
        buffer = torch.empty(numel)
        view = buffer.numpy()
        return [
            Method(
                name="mpi-fp32",
                bits=32,
                fill=lambda values: _copy(values, buffer),
                reduce=lambda: comm.Allreduce(MPI.IN_PLACE, view, op=MPI.SUM),
                result=lambda: buffer,
                averages=False,
            )
        ]

    return Family(name="mpi", methods=methods)


# ---------------------------------------------------------------- Horovod


def horovod_family(comm: Any) -> Family:
    """Returns Horovod's reduction, as DistributedOptimizer applies it to a gradient: compress, all-reduce,
    decompress."""
    import horovod.torch as hvd

    def methods(numel: int) -> list[Method]:
        return [
            _horovod(hvd, numel=numel, bits=bits, compression=compression)
            for bits, compression in ((32, hvd.Compression.none), (16, hvd.Compression.fp16))
        ]

    return Family(
        name="horovod", methods=methods, forgets=True, begin=lambda: hvd.init(comm), end=hvd.shutdown
    )


def _horovod(hvd: Any, *, numel: int, bits: int, compression: Any) -> Method:
    buffer = torch.empty(numel)
    name = f"horovod-fp{bits}"

    def reduce() -> None:
        compressed, context = compression.compress(buffer)
        handle = hvd.allreduce_async_(compressed, name=f"{name}.{numel}", op=hvd.Average)
        reduced = compression.decompress(hvd.synchronize(handle), context)
        if reduced is not buffer:
            buffer.set_(reduced)

    # `set_` as in DistributedOptimizer: the decompressed tensor becomes the gradient, nothing is copied.
    def fill(values: torch.Tensor) -> None:
        buffer.copy_(values)

    return Method(name=name, bits=bits, fill=fill, reduce=reduce, result=lambda: buffer)


# ---------------------------------------------------------------- Gloo


def start_gloo(comm: Any) -> None:
    """Starts torch's default process group on Gloo, with the store on rank 0's node. Collective."""
    rank, num_ranks = comm.Get_rank(), comm.Get_size()
    host, port = comm.bcast(_free_port() if rank == 0 else None, root=0)
    store = dist.TCPStore(
        host, port, num_ranks, is_master=rank == 0, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)


def _free_port() -> tuple[str, int]:
    on_loopback = os.environ.get("GLOO_SOCKET_IFNAME", "lo") == "lo"
    host = "127.0.0.1" if on_loopback else socket.gethostbyname(socket.gethostname())
    with socket.socket() as probe:
        probe.bind((host, 0))
        return host, int(probe.getsockname()[1])


def gloo_family(num_ranks: int) -> Family:
    """Returns the reductions of DDP's communication hooks on one buffer, and DDP itself on a module of parameters."""

    def methods(numel: int) -> list[Method]:
        made = [_gloo(numel=numel, bits=bits, num_ranks=num_ranks) for bits in (32, 16)]
        return made + [_ddp(numel=numel, bits=bits) for bits in (32, 16)]

    return Family(name="gloo", methods=methods)


def _gloo(*, numel: int, bits: int, num_ranks: int) -> Method:
    """Returns dist.all_reduce as DDP's hooks call it: divide, all-reduce; for fp16 cast before it and copy back
    after."""
    buffer = torch.empty(numel)

    def fp32() -> None:
        buffer.div_(num_ranks)
        dist.all_reduce(buffer)

    def fp16() -> None:
        compressed = buffer.to(torch.float16).div_(num_ranks)
        dist.all_reduce(compressed)
        buffer.copy_(compressed)

    return Method(
        name=f"gloo-fp{bits}",
        bits=bits,
        fill=lambda values: _copy(values, buffer),
        reduce=fp32 if bits == 32 else fp16,
        result=lambda: buffer,
    )


class Parameters(torch.nn.Module):
    """A module whose gradients are set to `gradients`: its backward pass only copies them."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        counts = [len(part) for part in torch.arange(numel).tensor_split(min(DDP_PARAMETERS, max(1, numel)))]
        self.gradients = torch.zeros(numel)
        self.parts = list(self.gradients.split(counts))
        self.all = torch.nn.ParameterList(torch.zeros(count) for count in counts)

    def forward(self) -> torch.Tensor:
        products = [torch.dot(parameter, part) for parameter, part in zip(self.all, self.parts, strict=True)]
        return torch.stack(products).sum()


def _ddp(*, numel: int, bits: int) -> Method:
    """Returns DistributedDataParallel, timed from forward to the end of backward."""
    module = Parameters(numel)
    wrapped = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    if bits == 16:
        wrapped.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)

    def fill(values: torch.Tensor) -> None:
        module.gradients.copy_(values)
        module.zero_grad(set_to_none=True)

    def result() -> torch.Tensor:
        return torch.cat([parameter.grad for parameter in module.all if parameter.grad is not None])

    return Method(
        name=f"ddp-fp{bits}", bits=bits, fill=fill, reduce=lambda: wrapped().backward(), result=result
    )


def _copy(values: torch.Tensor, buffer: torch.Tensor) -> None:
    buffer.copy_(values)
