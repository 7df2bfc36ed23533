"""Creates the updater of a schedule: the workers, the sums within a worker, and the averages over the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hpctrain.comm import Collective, World
from hpctrain.distributed import is_sharded, pipeline_of, shard_of, split_of
from hpctrain.errors import UsageError
from hpctrain.reduce.autotune.decision import DEFAULT_BUCKET_BYTES
from hpctrain.reduce.codecs import codec_named
from hpctrain.reduce.collective_reducers.collective_reducer import CollectiveReducer
from hpctrain.reduce.contract.bucket_reducer import BucketReducer
from hpctrain.reduce.contract.updater import check_optimizer, takes_sparse_gradients
from hpctrain.reduce.data_parallel.all_reduce_updater import AllReduceUpdater
from hpctrain.reduce.data_parallel.loss_scale import LossScale
from hpctrain.reduce.data_parallel.parameter_checks import trainable
from hpctrain.reduce.factory import LocalReducer, Reduction, ReductionRequest
from hpctrain.reduce.schedules.parameter_average import ParameterAverage
from hpctrain.reduce.schedules.schedule import Adasum, Daso, LocalSteps, Schedule, Ssp, parse_schedule
from hpctrain.reduce.schedules.scheduled_updater import ScheduledUpdater
from hpctrain.reduce.schedules.worker_rows import WorkerPlace
from hpctrain.reduce.shared_memory.all_reduce_reducer import AllReduceReducer
from hpctrain.reduce.shared_memory.shared_buckets import only_node_of
from hpctrain.reduce.wire_formats import AUTO, needs_feedback
from hpctrain.reduce.zero.zero_reducer import ZeroReducer
from hpctrain.topology import Topology

MakeReduction = Callable[[ReductionRequest], Reduction]


def request_of_averages(schedule: LocalSteps, request: ReductionRequest) -> ReductionRequest:
    """Returns the request for the reducer of the averages: that of the gradients, in the schedule's wire format."""
    return replace(request, wire=schedule.wire)


def make_scheduled(
    schedule: LocalSteps,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    world: World,
    topology: Topology,
    request: ReductionRequest,
    make: MakeReduction,
    averages: Reduction | None,
    loss_scale: LossScale | None,
    clip_norm: float | None,
    on_close: Callable[[BucketReducer], object],
) -> ScheduledUpdater:
    """Creates the updater of a schedule with local steps. Collective; parameters must be the same on every rank.

    Args:
        schedule: A result of `checked_schedule` for `model` and `optimizer`.
        request: The reduction that the user asks for, of the gradients of synchronous steps.
        make: Makes a reduction; collective.
        averages: The reduction of the averages; None: it is made by `make`.
        on_close: Is called with the reducer of the sums within a worker, which must be closed after the updater.

    """
    by_node = isinstance(schedule, Daso)
    workers = topology.ranks_by_node if by_node else tuple((rank,) for rank in range(world.num_ranks))
    worker = topology.node_of(world.rank) if by_node else world.rank
    mine = workers[worker]
    averages = averages or make(request_of_averages(schedule, request))
    assert not isinstance(averages.reducer, ZeroReducer)
    scale = loss_scale or LossScale.for_wire(request.wire)
    reducer, comm = _within(mine, workers, world=world, topology=topology)
    on_close(reducer)
    make_synchronous = None
    if schedule.from_step > 0:
        gradients = make(request)
        make_synchronous = partial(
            _synchronous, gradients, optimizer, comm=world, model=model, clip_norm=clip_norm
        )
    share = 1.0 / (len(workers) * len(mine))
    return ScheduledUpdater(
        optimizer,
        schedule=schedule,
        comm=world,
        place=WorkerPlace(worker=worker, num_workers=len(workers), leads=world.rank == mine[0]),
        share=share,
        make_local=partial(
            _local,
            optimizer,
            reducer=reducer,
            comm=comm,
            model=model,
            clip_norm=clip_norm,
            plain_weight=len(workers) / world.num_ranks,
        ),
        make_synchronous=make_synchronous,
        average=ParameterAverage(
            trainable(optimizer),
            reducer=averages.reducer,
            bucket_bytes=averages.bucket_bytes,
            share=share,
            in_background=isinstance(schedule, Daso) and schedule.wait > 0 and world.num_ranks > 1,
        ),
        loss_scale=scale,
        model=model,
        choice=averages if averages.is_measured else None,
    )


def checked_schedule(
    given: Schedule | Mapping[str, Any] | None,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    algorithm: str,
    wire: str,
) -> Schedule | None:
    """Returns the schedule that `given` describes; see `parse_schedule`. Not collective.

    Raises UsageError if the schedule is not valid, or cannot be combined with the model, the optimizer, `algorithm`, or
    `wire`, the wire format of the gradients.
    """
    schedule = parse_schedule(given)
    if schedule is not None:
        _check(schedule, model, optimizer, algorithm=algorithm, wire=wire)
    return schedule


def _check(
    schedule: Schedule, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, algorithm: str, wire: str
) -> None:
    asked = f"schedule {schedule.METHOD!r}"
    if shard_of(model) != "none" or is_sharded(model) or split_of(model) or pipeline_of(model):
        raise UsageError(
            f"{asked} cannot be combined with a model that is sharded or split over the ranks: each rank needs the "
            "whole model and whole gradients. Leave the schedule or ParallelPlan out"
        )
    check_optimizer(optimizer, layout="none", model=model)
    if takes_sparse_gradients(optimizer):
        raise UsageError(
            f"{asked} cannot be combined with {type(optimizer).__name__}, which takes sparse gradients: use "
            "Embedding(sparse=False) and Adam, or leave the schedule out"
        )
    if isinstance(schedule, Adasum | Ssp) and (algorithm != AUTO or wire != "fp32"):
        found = f"algorithm={algorithm!r}" if algorithm != AUTO else f"wire={wire!r}"
        raise UsageError(
            f"{asked} cannot be combined with {found}, which is for sums of gradients over the ranks: gradients are "
            "sent as they are; leave it out"
        )
    if isinstance(schedule, Adasum):
        return
    if any(_is_over_ranks(module) for module in model.modules()):
        raise UsageError(
            f"{asked} cannot be combined with batch normalisation over the ranks, which waits for all ranks in each "
            "forward: leave one of them out. Without it, the running statistics are averaged when a round ends"
        )
    if wire == AUTO or needs_feedback(wire):
        raise UsageError(
            f"{asked} cannot be combined with wire = {wire!r}, which is the format of the gradients of synchronous "
            "steps: use fp32, fp16 or bf16 there. The format of the averages is the schedule's key wire"
        )


def _is_over_ranks(module: torch.nn.Module) -> bool:
    # By name: PyTorch's class, and hpctrain's, which is in a package above.
    return any(base.__name__ == "SyncBatchNorm" for base in type(module).__mro__)


def _within(
    mine: Sequence[int], workers: Sequence[Sequence[int]], *, world: World, topology: Topology
) -> tuple[BucketReducer, Collective]:
    """Returns the reducer of the sums within this rank's worker, and the communicator of its ranks. Collective."""
    comm, spare = world.split(workers), world.split(workers)
    assert comm is not None
    assert spare is not None
    transport = world.transport(topology) if any(len(ranks) > 1 for ranks in workers) else None
    if transport is not None:
        only = only_node_of(world.rank, topology)
        reducer = AllReduceReducer(
            transport, comm=spare, levels=only, algorithm="hierarchical", exchange="direct",
            codec=codec_named("fp32"),
        )  # fmt: skip
        return reducer, comm
    if len(mine) == 1:
        return LocalReducer(), comm
    one_node = Topology((tuple(range(len(mine))),), ("node",))
    return CollectiveReducer.flat(spare, topology=one_node), comm


def _local(
    optimizer: torch.optim.Optimizer,
    scale: LossScale,
    *,
    reducer: BucketReducer,
    comm: Collective,
    model: torch.nn.Module,
    clip_norm: float | None,
    plain_weight: float,
) -> AllReduceUpdater:
    # Sums within a node are fast; on a separate thread they would take cores from backward.
    return AllReduceUpdater(
        optimizer, comm=comm, reducer=reducer, bucket_bytes=DEFAULT_BUCKET_BYTES, loss_scale=scale,
        clip_norm=clip_norm, overlap=False, model=model, plain_weight=plain_weight,
    )  # fmt: skip


def _synchronous(
    gradients: Reduction,
    optimizer: torch.optim.Optimizer,
    scale: LossScale,
    *,
    comm: Collective,
    model: torch.nn.Module,
    clip_norm: float | None,
) -> AllReduceUpdater:
    made = gradients.updater(optimizer, comm=comm, model=model, loss_scale=scale, clip_norm=clip_norm)
    assert isinstance(made, AllReduceUpdater)
    return made
