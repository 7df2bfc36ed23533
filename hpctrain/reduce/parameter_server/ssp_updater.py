"""Bounded staleness: each rank reads parameters from servers that may lag, and leaves its gradients there.

Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, final

import torch
from torch.utils.hooks import RemovableHandle

from hpctrain.comm import Collective, World, agreed
from hpctrain.errors import DivergedError, UsageError
from hpctrain.reduce.contract.bucket_plan import GradientSpec, plan_buckets
from hpctrain.reduce.contract.bucket_reducer import (
    LONGEST_WAIT_OVERSUBSCRIBED_S,
    LONGEST_WAIT_S,
    Shapes,
    StateTensor,
)
from hpctrain.reduce.contract.step_end import square_of_all
from hpctrain.reduce.contract.updater import Accepts, ReductionObserver, StepOutcome
from hpctrain.reduce.data_parallel.fused_kernels import keep_layouts
from hpctrain.reduce.data_parallel.gradient_memory import refuse_grad_scaler
from hpctrain.reduce.data_parallel.loss_scale import LossScale
from hpctrain.reduce.data_parallel.one_pass import OptimizerStep
from hpctrain.reduce.data_parallel.parameter_checks import (
    ParameterChecks,
    check_open,
    check_updater_options,
    trainable,
)
from hpctrain.reduce.parameter_server.parameter_client import (
    OrderPart,
    ParameterClient,
    ParameterRead,
    StalenessFigures,
)
from hpctrain.reduce.parameter_server.server_memory import (
    COUNTER,
    WORD_BYTES,
    ServerMemory,
    shares_of_servers,
    words_of,
)
from hpctrain.reduce.parameter_server.shard_server import BeforeUpdate, ShardServer
from hpctrain.reduce.schedules.schedule import Ssp
from hpctrain.reduce.shared_memory.shared_buckets import ElemRange
from hpctrain.reduce.watch.step_watch import Watched, watched
from hpctrain.reduce.zero.bucket_division import BucketDivision
from hpctrain.reduce.zero.owned_parts import OwnedParts, check_zero_optimizer

# Consecutive parts of one rank with gradients that are not finite, after which the run ends.
_MAX_NOT_FINITE = 20


@final
class SspUpdater(Watched):
    """`DistributedOptimizer` with a parameter server, whose ranks may be up to `staleness` steps ahead of another.

    The parameters and the optimizer's state are divided into shares, one per server. A worker repeats: `take` a part of
    a global batch from the common order, which also reads the parameters; `backward`; `step`, which leaves the
    gradients on the servers. `step` waits for no rank's gradients: it does not sum numbers, clip, or scale. The servers
    step the optimizer with the sum of all parts of a global batch; see `ShardServer`. `complete` ends a run of steps on
    all ranks, with the same parameters on each.

    The constructor is collective.

    Attributes:
        comm: All ranks.
        schedule: Staleness and servers.
        num_workers: Number of ranks that train.

    Args:
        optimizer: Optimizer that updates each element independently of other elements. Until `close` it holds this
            rank's share of the parameters.
        world: All ranks.
        schedule: Staleness and servers.
        model: The model, whole on every rank, in host memory, of float32 or float64.
        loss_scale: None; other values are refused.
        clip_norm: None; other values are refused.
        oversubscribed: True if there are more ranks than cores; looks for messages are then further apart.

    Raises:
        UsageError: On every rank, if an argument is invalid or the parts do not compose.
        CommunicationError: If MPI has no one-sided operations between these ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        world: World,
        schedule: Ssp,
        model: torch.nn.Module,
        loss_scale: LossScale | None = None,
        clip_norm: float | None = None,
        oversubscribed: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self.comm: Collective = world
        self.schedule = schedule
        self._parameters = trainable(optimizer)
        everyone = tuple(range(world.num_ranks))
        self._servers = everyone if schedule.servers == "all" else tuple(map(int, schedule.servers))
        workers = everyone if schedule.servers == "all" else tuple(sorted(set(everyone) - set(self._servers)))
        agreed(
            world,
            lambda: _check(
                optimizer, self._parameters, model=model, servers=self._servers, workers=workers,
                num_ranks=world.num_ranks, clip_norm=clip_norm, loss_scale=loss_scale,
            ),
            os_error=UsageError,
        )  # fmt: skip
        self.num_workers = len(workers)
        self._worker = workers.index(world.rank) if world.rank in workers else None
        self._checks = ParameterChecks(optimizer, self._parameters, model=model)
        longest_wait_s = LONGEST_WAIT_OVERSUBSCRIBED_S if oversubscribed else LONGEST_WAIT_S
        division = _division(self._parameters, num_servers=len(self._servers))
        dtypes = [bucket.dtype for bucket in division.buckets]
        counts = [[share.numel for share in of_bucket[:-1]] for of_bucket in division.shares]
        layouts = [
            ServerMemory(shares=shares, num_workers=self.num_workers, num_parameters=len(self._parameters))
            for shares in shares_of_servers(counts, dtypes)
        ]
        place = self._servers.index(world.rank) if world.rank in self._servers else None
        memory = world.remote_memory(0 if place is None else layouts[place].num_bytes)
        if memory is None:
            raise UsageError(
                f"schedule ssp needs MPI, which the backend {world.backend} does not use: start the run with mpirun or "
                "srun, or leave the schedule out",
                agreed=True,
            )
        memory.local[:] = 0
        self._memory = memory
        self._hooks: list[RemovableHandle] = keep_layouts(optimizer)
        self._owned = OwnedParts(
            optimizer, self._parameters, plan=division, rank=len(self._servers) if place is None else place,
            optimizer_step=OptimizerStep(optimizer, comm=world, own_hooks=self._hooks),
            copied=True,  # the model's parameters are what this rank has read
        )  # fmt: skip
        spans = [division.owned_by(number) for number in range(len(self._servers))]
        self._server: ShardServer | None = None
        self._before_update: BeforeUpdate | None = None
        if place is not None:
            self._server = ShardServer(
                memory, layout=layouts[place], owned=self._owned, parameters=self._parameters,
                spans=spans[place], staleness=schedule.staleness, longest_wait_s=longest_wait_s,
            )  # fmt: skip
        self._client = ParameterClient(
            memory, servers=self._servers, layouts=layouts, spans=spans, parameters=self._parameters,
            worker=self._worker, check=self._raise_error_of_server, longest_wait_s=longest_wait_s,
        )  # fmt: skip
        self._part: OrderPart | None = None
        self._last_read: ParameterRead | None = None
        self._is_running = False
        self._weighted = False
        self._not_finite = 0
        self._closed = False
        self._clock = 0
        self._begin(0)

    # ------------------------------------------------------------------ the common order

    @property
    def clock(self) -> int:
        """Number of updates up to the last `complete` or `load_state`."""
        return self._clock

    @property
    def trains(self) -> bool:
        """False on a rank that only serves."""
        return self._worker is not None

    @property
    def figures(self) -> StalenessFigures:
        """What this rank has read and sent so far."""
        return self._client.figures

    @property
    def last_read(self) -> ParameterRead | None:
        """What this rank has read for the last part that it has taken; None before the first part."""
        return self._last_read

    @property
    def before_update(self) -> BeforeUpdate | None:
        """A function that the servers call with the number of an update (from 0) before they make it.

        It runs in the server's thread, on every rank that serves, and may set the learning rate in `param_groups`. Set
        the same function on every rank.
        """
        return self._before_update

    @before_update.setter
    def before_update(self, function: BeforeUpdate | None) -> None:
        self._before_update = function
        if self._server is not None:
            self._server.before_update = function

    def take(self, *, until: int) -> OrderPart | None:
        """Takes the next part of the common order, and reads the parameters for it. Not collective.

        Waits until the parameters contain all updates that the staleness requires. Each part goes to exactly one rank.

        Args:
            until: The clock before which to stop; the same on every rank.

        Returns:
            The part; None if all parts before `until` are taken, and on a rank that only serves.
        """
        check_open(closed=self._closed)
        if self._part is not None:
            raise UsageError(
                "step() was not called for the last batch: call backward() and step() for each batch"
            )
        self._is_running = True
        if self._worker is None:
            return None
        part, staleness = self._client.take(until=until), self.schedule.staleness
        if part is None:
            return None
        at_least = 0 if isinstance(staleness, str) else part.clock - staleness
        self._last_read = read = self._client.read(at_least=at_least, clock=part.clock)
        figures = self.figures
        figures.num_reads += 1
        figures.largest_staleness = max(figures.largest_staleness, read.staleness)
        self._part = part
        return part

    def skip(self) -> None:
        """Ends a part without samples: the servers count it, and add no gradients. Not collective."""
        self._drop_gradients()
        self._leave([None] * len(self._parameters), finite=False)

    def complete(self, clock: int) -> None:
        """Waits until all updates before `clock` are made, and reads the parameters. Collective.

        Afterwards all ranks have the same parameters. Call it when `take` has returned None on every rank.
        """
        check_open(closed=self._closed)
        self._client.read(at_least=clock, clock=clock)
        self.comm.barrier()
        if self.comm.rank == self._servers[0]:
            self._set_counter(clock)
        self.comm.barrier()
        self._clock, self._is_running = clock, False

    # ------------------------------------------------------------------ `DistributedOptimizer`

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The wrapped optimizer, which holds this rank's share of the parameters."""
        return self._optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's `param_groups`. Raises UsageError for a GradScaler."""
        refuse_grad_scaler(sys._getframe(1))
        return self._optimizer.param_groups

    @property
    def loss_scale(self) -> LossScale:
        return LossScale()

    def backward(self, loss: torch.Tensor, *, weight: float, last: bool = True) -> None:
        """See `DistributedOptimizer.backward`. Nothing is sent before `step`."""
        self._weighted = True
        LossScale().scaled(loss, weight=weight).backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Does nothing, since nothing is sent before `step`."""
        yield

    def zero_grad(self) -> None:
        """Drops the gradients of the current part."""
        self._drop_gradients()
        self._weighted = False

    def synchronize(self) -> None:
        """Raises UsageError: no rank has the sums of all gradients."""
        raise UsageError("schedule ssp: no rank has the sums of the gradients, which the servers add up")

    @watched
    def step(
        self,
        *,
        sums: Mapping[str, float] | None = None,
        accepts: Accepts | None = None,
        divide_by: str | None = None,
    ) -> StepOutcome:
        """Leaves the gradients of the current part on the servers. Not collective.

        Waits only until the servers have taken this rank's gradients of the part before.

        Returns:
            The outcome. `applied` is False if the gradients were not finite; they are then left out. `grad_norm` is the
                norm of this part's gradients, which are weighted by its share of the global batch.

        Raises:
            UsageError: `sums`, `accepts` or `divide_by` was given, for which a step would wait for all ranks; or no
                part was taken.
            DivergedError: Too many parts in a row had gradients that were not finite.
        """
        check_open(closed=self._closed)
        if sums or accepts is not None or divide_by is not None:
            raise UsageError(
                "schedule ssp: step() waits for no other rank, so that sums, accepts and divide_by are not possible: "
                "call session.all_reduce after the loop over the batches"
            )
        if self._part is None:
            raise UsageError("step() was called without a batch of session.shared_batches")
        self._checks.check_kinds()
        began = time.perf_counter()
        gradients = [None if p.grad is None else p.grad.detach() for p in self._parameters]
        square = square_of_all(g.to_dense() if g.is_sparse else g for g in gradients if g is not None)
        finite = 0 <= square < math.inf
        self._leave(gradients, finite=finite)
        self.zero_grad()
        self._not_finite = 0 if finite else self._not_finite + 1
        if self._not_finite > _MAX_NOT_FINITE:
            raise DivergedError(
                f"{self._not_finite} parts in a row had gradients that are not finite: lower the learning rate, or "
                "look for the first sample that makes them so"
            )
        taken_s = time.perf_counter() - began
        return StepOutcome(
            applied=finite, grad_norm=math.sqrt(square) if finite else math.nan, loss_scale=1.0, sync_s=taken_s,
            exposed_sync_s=taken_s,
        )  # fmt: skip

    def wait_for_parameters(self) -> None:
        """Does nothing: the parameters that were read are complete."""

    def observe_reductions(self, observer: ReductionObserver | None) -> None:
        """Does nothing: no buckets are reduced."""

    def state(self) -> dict[str, Any]:
        """See `DistributedOptimizer.state`. Raises UsageError between `take` and `complete`."""
        if self._is_running:
            raise UsageError(
                "a checkpoint was asked for within the loop over session.shared_batches, when the ranks have different "
                "parameters: save after the loop"
            )
        return {"loss_scale": asdict(LossScale()), "order": None, "clock": self._clock}

    def state_tensors(self) -> list[StateTensor]:
        """Returns nothing: a checkpoint holds the parameters, and the optimizer's state of each server's share."""
        return []

    def prepare_to_load(self, state: Mapping[str, Any]) -> None:
        """Does nothing."""

    def rows_to_load(self, state: Mapping[str, Any], shapes: Shapes) -> dict[str, list[range]]:
        return {}

    def load_state(
        self,
        state: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor] | None = None,
        shapes: Shapes | None = None,
    ) -> None:
        """See `DistributedOptimizer.load_state`: the servers take the values of the model's parameters. Collective."""
        if self._is_running:
            raise UsageError(
                "a checkpoint was loaded within the loop over session.shared_batches: load it before"
            )
        self.comm.barrier()  # no rank still reads
        self._begin(int(state.get("clock", 0)))

    def close(self) -> bool:
        """Ends the server's thread, and gives the optimizer the whole parameters back, without state."""
        if not self._closed:
            self._closed = True
            for hook in self._hooks:
                hook.remove()
            if self._server is not None:
                self._server.close()
            self._owned.release()
            self.step_watch = None
        return True

    def free(self) -> None:
        """Frees the memory of the servers. Collective; call it after `close`."""
        self.comm.barrier()  # no rank still reads
        self._memory.close()

    # ------------------------------------------------------------------ implementation

    def _begin(self, clock: int) -> None:
        """Makes the model's parameters the version `clock` on all servers. Collective."""
        self._clock = clock
        self._client.forget()
        if self._server is not None:
            self._server.begin(clock)
        if self.comm.rank == self._servers[0]:
            self._set_counter(clock)
        self.comm.barrier()

    def _leave(self, gradients: Sequence[torch.Tensor | None], *, finite: bool) -> None:
        assert self._part is not None
        factor = 1.0 if self._weighted else 1.0 / self.num_workers
        self._client.leave(self._part, gradients, finite=finite, factor=factor)
        self._part = None

    def _raise_error_of_server(self) -> None:
        if self._server is not None and self._server.error is not None:
            raise self._server.error

    def _set_counter(self, clock: int) -> None:
        words_of(self._memory.local, count=1)[COUNTER // WORD_BYTES] = clock * self.num_workers
        self._memory.sync()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _division(parameters: Sequence[torch.nn.Parameter], *, num_servers: int) -> BucketDivision:
    """Returns one bucket per dtype, divided over the servers; the last share is empty, for ranks that do not serve."""
    specs = [GradientSpec(p.numel(), p.dtype) for p in parameters]
    order = list(range(len(specs)))
    buckets = plan_buckets(specs, bucket_bytes=sys.maxsize, order=order)
    division = BucketDivision.of(buckets, num_ranks=num_servers, unit_bytes=sys.maxsize)
    shares = tuple(
        (*of_bucket, ElemRange(bucket.num_gradients, bucket.num_gradients))
        for bucket, of_bucket in zip(buckets, division.shares, strict=True)
    )
    return replace(division, shares=shares)


def _check(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    *,
    model: torch.nn.Module,
    servers: Sequence[int],
    workers: Sequence[int],
    num_ranks: int,
    clip_norm: float | None,
    loss_scale: LossScale | None,
) -> None:
    """Raises UsageError unless the parts compose with a parameter server."""
    check_updater_options(parameters, clip_norm=None)
    check_zero_optimizer(optimizer, parameters)
    absent = [rank for rank in servers if rank >= num_ranks]
    if absent:
        raise UsageError(
            f"schedule ssp: servers has rank {absent[0]}, but the run has the ranks 0 to {num_ranks - 1}"
        )
    if not workers:
        raise UsageError(
            f"schedule ssp: servers lists all {num_ranks} ranks, so that no rank trains: list fewer, or give 'all', "
            "with which each rank serves a part and trains"
        )
    if clip_norm is not None:
        raise UsageError(
            "schedule ssp cannot be combined with clip_norm: no rank and no server has the whole gradient of a step; "
            "leave one of them out"
        )
    if loss_scale is not None and loss_scale != LossScale():
        raise UsageError(
            "schedule ssp cannot be combined with a loss scale: gradients are sent as float32; leave it out"
        )
    for parameter in parameters:
        if parameter.device.type != "cpu" or parameter.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"schedule ssp serves parameters of float32 or float64 in host memory, but one of shape "
                f"{tuple(parameter.shape)} is {parameter.dtype} on {parameter.device}: use device 'cpu', or leave the "
                "schedule out"
            )
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    if buffers and 0 not in workers:
        raise UsageError(
            f"schedule ssp: rank 0 only serves, but checkpoints take the model's buffers, such as {buffers[0]!r}, from "
            "rank 0, which never runs forward: list another rank in servers"
        )
