"""Reductions that are timed, each of one buffer: hpctrain's, and those of peers: Horovod, torch DDP on Gloo, MPI.

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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from hpctrain.errors import UsageError
from hpctrain.reduce.algorithms import Algorithm
from hpctrain.reduce.autotune.tune import CalibrationFiles
from hpctrain.reduce.contract.bucket_plan import GradientSpec, plan_buckets
from hpctrain.reduce.contract.bucket_reducer import BucketReducer
from hpctrain.reduce.data_parallel.reduction_thread import ReductionPipeline
from hpctrain.reduce.factory import ReducerMaker, ReductionRequest
from hpctrain.reduce.wire_formats import AUTO
from hpctrain.run import Session

CPU = torch.device("cpu")
DDP_PARAMETERS = 16


def _nothing() -> None: ...


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of reducing `numel` float32 gradients over all ranks.

    fill: sets this rank's gradients to `values`, shape (numel,); not timed. reduce: the timed function; collective.
    result: returns the reduced gradients, shape (numel,); None if nothing is reduced. averages: whether the result is
    the mean instead of the sum. close: releases the method's resources; collective. runs: describes what `auto` chose.
    """

    name: str
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


def _into(buffer: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Returns a method's `fill` that copies the values into `buffer`."""

    def fill(values: torch.Tensor) -> None:
        buffer.copy_(values)

    return fill


# ---------------------------------------------------------------- hpctrain


def our_family(session: Session, *, choices: Sequence[tuple[str, str]]) -> Family:
    """Returns hpctrain's methods. choices: pairs of algorithm and wire, by their names in the recipe."""

    def methods(numel: int) -> list[Method]:
        return [
            our_method(session, numel=numel, algorithm=algorithm, wire=wire) for algorithm, wire in choices
        ]

    return Family(name="ours", methods=methods)


def name_of(algorithm: str, wire: str) -> str:
    return f"{algorithm}/{wire}"


def our_method(
    session: Session, *, numel: int, algorithm: str, wire: str, calibration: Path | None = None
) -> Method:
    """Returns a method of hpctrain. Collective. Gradients are in the bucket's memory, where backward writes them.

    calibration: file in which `auto` stores its measurement, as a run does in its directory.
    """
    buckets = plan_buckets([GradientSpec(numel, torch.float32)], bucket_bytes=max(1, 4 * numel))
    auto = algorithm == AUTO
    if auto:
        reducer = _auto(session, num_bytes=4 * numel, wire=wire, calibration=calibration)
    else:
        reducer = _fixed(session, algorithm=algorithm, wire=wire)
    memory = reducer.plan(buckets, device=CPU)
    overlap = session.reductions.overlap(spare_core=session.reductions.has_spare_core())
    pipeline = ReductionPipeline(reducer.reduce, device=CPU, overlap=overlap)

    def fill(values: torch.Tensor) -> None:
        memory[0].zero_()
        memory[0][:numel].copy_(values)

    def reduce() -> None:
        pipeline.submit(0)
        pipeline.wait()

    def close() -> None:
        pipeline.close()
        memory.clear()
        if not auto:  # that one is the session's
            reducer.close()

    return Method(
        name=name_of(algorithm, wire), fill=fill, reduce=reduce, result=lambda: memory[0][:numel], close=close,
        averages=False, runs=f"{reducer.algorithm}, {reducer.wire}",
    )  # fmt: skip


def available(session: Session, choices: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns the choices that run here without being replaced by another algorithm. Collective."""
    maker = ReducerMaker(session.world, topology=session.topology)
    return [(name, wire) for name, wire in choices if name == AUTO or name in maker.candidates(wire=wire)]


def _auto(session: Session, *, num_bytes: int, wire: str, calibration: Path | None) -> BucketReducer:
    plan = ReductionRequest(
        algorithm=AUTO, wire=wire, bucket_bytes=max(1, num_bytes), files=CalibrationFiles(run=calibration)
    )
    return session.reductions.make(plan, gradient_bytes=num_bytes).reducer


def _fixed(session: Session, *, algorithm: str, wire: str) -> BucketReducer:
    maker = ReducerMaker(session.world, topology=session.topology)
    if algorithm not in maker.candidates(wire=wire):
        raise UsageError(
            f"{algorithm} with {wire} would be replaced by another algorithm here: pass only choices from `available`"
        )
    return maker.make(Algorithm(algorithm), wire=wire)


# ---------------------------------------------------------------- MPI


def mpi_family(comm: Any) -> Family:
    """Returns MPI_Allreduce of the whole buffer, with the library's own choice of algorithm."""
    from mpi4py import MPI

    def methods(numel: int) -> list[Method]:
        buffer = torch.empty(numel)
        view = buffer.numpy()
        return [
            Method(
                name="mpi-fp32", fill=_into(buffer),
                reduce=lambda: comm.Allreduce(MPI.IN_PLACE, view, op=MPI.SUM), result=lambda: buffer,
                averages=False,
            )
        ]  # fmt: skip

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
        if reduced is not buffer:  # as in DistributedOptimizer: it becomes the gradient, nothing is copied
            buffer.set_(reduced)

    return Method(name=name, fill=_into(buffer), reduce=reduce, result=lambda: buffer)


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
        name=f"gloo-fp{bits}", fill=_into(buffer), reduce=fp32 if bits == 32 else fp16,
        result=lambda: buffer,
    )  # fmt: skip


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

    return Method(name=f"ddp-fp{bits}", fill=fill, reduce=lambda: wrapped().backward(), result=result)
