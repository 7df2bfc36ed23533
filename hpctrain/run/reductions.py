"""Creates the reductions of a session, and frees their memory when the session is closed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch

from hpctrain.comm import (
    NCCL_VARIABLES,
    HorovodBuild,
    World,
    agreed,
    check_same,
    is_true_everywhere,
    nccl_in_effect,
    why_no_nccl,
)
from hpctrain.distributed import ShardKind, pipeline_of, shard_of, split_of
from hpctrain.errors import UsageError
from hpctrain.launch import RankCores, cpu_share, in_effect
from hpctrain.reduce import (
    Algorithm,
    AllReduceUpdater,
    BucketReducer,
    LocalSteps,
    LossScale,
    Reduction,
    ReductionRequest,
    Schedule,
    ScheduledUpdater,
    SparseUpdater,
    SplitModelUpdater,
    Ssp,
    SspUpdater,
    ZeroUpdater,
    checked_schedule,
    gradient_bytes,
    make_reduction,
    make_scheduled,
    reduce_gradients_by,
    table_of,
)
from hpctrain.topology import Topology

# If ranks outnumber their cores, smaller gradients are reduced after backward: while a rank waits for the network,
# another rank computes. Larger gradients take a link so long that it should be in use during backward.
_OVERLAPS_FROM_BYTES = 8 << 20


@final
class Reductions:
    """Creates reducers that sum gradients over the ranks of a session."""

    def __init__(
        self,
        world: World,
        *,
        topology: Topology,
        device: torch.device,
        horovod: HorovodBuild | None,
        note: Callable[[str], None],
        cores: Callable[[], Sequence[RankCores]],
    ) -> None:
        """Stores what reductions are created from. Does not communicate.

        Args:
            horovod: How Horovod was built; None if Horovod does not run in this session.
            note: A function that prints a note for the user.
            cores: A function that returns the cores of all ranks; it is collective.
        """
        self._world = world
        self._topology = topology
        self._device = device
        self._horovod = horovod
        self._note = note
        self._cores = cores
        # In creation order, which is the same on all ranks.
        self._made: list[Reduction] = []
        self._kept: list[BucketReducer] = []
        self._served: list[SspUpdater] = []

    def make(self, plan: ReductionRequest, *, gradient_bytes: int, shard: ShardKind = "none") -> Reduction:
        """Returns a reduction for the buckets of one updater. `close` frees the memory of the reduction. Collective.

        Args:
            gradient_bytes: The size of one rank's gradients.
            shard: What a `ZeroUpdater` shards, `optimizer` or `gradients`; `none` for other updaters.
        """
        spare_core, oversubscribed = self.has_spare_core(), self.oversubscribed()
        after_backward = oversubscribed and shard == "none" and gradient_bytes < _OVERLAPS_FROM_BYTES
        overlap = self.overlap(spare_core=spare_core, after_backward=after_backward)
        made = make_reduction(
            self._world, plan, topology=self._topology, device=self._device, gradient_bytes=gradient_bytes, shard=shard,
            overlap=overlap, spare_core=spare_core, oversubscribed=oversubscribed and overlap,
            nccl=self.nccl(plan.algorithm), note=self._note,
        )  # fmt: skip
        self._made.append(made)
        return made

    def split(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        algorithm: str,
        wire: str,
        loss_scale: LossScale | None,
        clip_norm: float | None,
    ) -> SplitModelUpdater:
        """Returns the updater of a model that is split over the ranks; see `SplitModelUpdater`. Collective.

        algorithm, wire: how the gradients of sharded parameters are summed; see `reduce_gradients_by`.
        """
        end_sums: Callable[[], object] | None = None
        if shard_of(model) == "parameters" and split_of(model) is None and pipeline_of(model) is None:
            end_sums = reduce_gradients_by(
                algorithm, wire=wire, model=model, world=self._world, topology=self._topology, note=self._note
            )
        return SplitModelUpdater(
            model, optimizer, comm=self._world, loss_scale=loss_scale, clip_norm=clip_norm, end_sums=end_sums
        )

    def planned(
        self,
        schedule: Mapping[str, Any] | None,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        algorithm: str,
        wire: str,
    ) -> Schedule | None:
        """Returns the schedule of an updater; see `checked_schedule`. Collective.

        Raises UsageError on every rank if a rank's schedule is not valid, or the ranks have different ones.
        """
        found = agreed(
            self._world,
            lambda: checked_schedule(schedule, model, optimizer, algorithm=algorithm, wire=wire),
            os_error=UsageError,
        )
        table = None if found is None else table_of(found)
        check_same(self._world, name="the schedule of an updater", value=table, error=UsageError)
        return found

    def updater(
        self,
        schedule: Schedule | None,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        request: ReductionRequest,
        reduction: Reduction | None,
        shard: ShardKind,
        loss_scale: LossScale | None,
        clip_norm: float | None,
    ) -> AllReduceUpdater | ZeroUpdater | SparseUpdater | ScheduledUpdater | SspUpdater:
        """Returns the updater of a model that is whole on each rank. Collective.

        Args:
            schedule: A result of `checked_schedule`; None: the ranks sum gradients in each step.
            request: The reduction that was asked for; with local steps, that of the gradients of synchronous steps.
            reduction: A reduction that was made before, with local steps that of the averages; None: one is made.
            shard: What a `ZeroUpdater` shards.
        """
        make = partial(self.make, gradient_bytes=gradient_bytes(model))
        if isinstance(schedule, Ssp):
            served = SspUpdater(
                optimizer, world=self._world, schedule=schedule, model=model, loss_scale=loss_scale,
                clip_norm=clip_norm, oversubscribed=self.oversubscribed(),
            )  # fmt: skip
            self._served.append(served)
            return served
        if isinstance(schedule, LocalSteps):
            return make_scheduled(
                schedule, model, optimizer, world=self._world, topology=self._topology, request=request, make=make,
                averages=reduction, loss_scale=loss_scale, clip_norm=clip_norm, on_close=self._kept.append,
            )  # fmt: skip
        made = reduction or make(replace(request, adasum=schedule), shard=shard)
        return made.updater(
            optimizer, comm=self._world, model=model, loss_scale=loss_scale, clip_norm=clip_norm
        )

    def overlap(self, *, spare_core: bool, after_backward: bool = False) -> bool:
        """Returns True if reductions are faster when they run during backward. Not collective.

        Reductions during backward are faster if reductions wait for a network or a device, or if each rank has a spare
        core. On a single node on which the ranks use every core, reductions would take cores from backward and add
        context switches.

        spare_core: The result of `has_spare_core`.
        after_backward: True if a wait for the network costs less than a thread that reduces during backward.
        """
        waits_for_network = self._topology.num_nodes > 1 and not after_backward
        return spare_core or waits_for_network or self._device.type != "cpu"

    def has_spare_core(self) -> bool:
        """Returns True if every rank has a core that its threads leave free. Collective."""
        share = cpu_share(self._cores(), self._world.rank)
        return is_true_everywhere(self._world, share >= torch.get_num_threads() + 1)

    def oversubscribed(self) -> bool:
        """Returns True if some rank has less than one core per thread. Collective.

        Either the ranks' CPU affinities show this, or the launcher has found out. A launcher that starts more ranks
        than it was given cores preloads a library (`launch/yielding.py`). The launcher may have been given fewer cores
        than the affinities show.
        """
        share = cpu_share(self._cores(), self._world.rank)
        roomy = share >= torch.get_num_threads() and not in_effect()
        return not is_true_everywhere(self._world, roomy)

    def close(self, *, free: bool) -> None:
        """Ends the reductions. `free=False` keeps the buckets' memory, which a thread may still use. Collective."""
        if free:
            while self._made:
                self._made.pop(0).reducer.close()
            while self._kept:
                self._kept.pop(0).close()
            while self._served:
                self._served.pop(0).free()

    def nccl(self, asked: str) -> Algorithm | None:
        """Returns which of Horovod's own two-level sums runs in this process; None if no such sum runs.

        Adds a note if `asked` is such a sum but cannot run, or if such a sum runs that was not asked for.
        """
        device_type = self._device.type
        found = nccl_in_effect(self._horovod, topology=self._topology, device_type=device_type)
        if asked in NCCL_VARIABLES:
            why = why_no_nccl(asked, build=self._horovod, topology=self._topology, device_type=device_type)
            if why is not None:
                self._note(f"reduction: {asked}: {why}")
        elif found is not None:
            self._note(f"reduction: Horovod's all-reduce runs {found}, as {NCCL_VARIABLES[found]} asks")
        return Algorithm(found) if found is not None else None
