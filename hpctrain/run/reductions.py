"""Creates the reductions of a session, and frees their memory when it is closed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch

from hpctrain.comm import (
    NCCL_VARIABLES,
    HorovodBuild,
    World,
    is_true_everywhere,
    make_two_level,
    nccl_in_effect,
    why_no_nccl,
)
from hpctrain.distributed import Shard
from hpctrain.launch import RankCores, cpu_share, in_effect
from hpctrain.reduce import (
    AUTO,
    TWO_LEVELS,
    Algorithm,
    BucketReducer,
    Means,
    Reduction,
    ReductionPlan,
    ScatterReducer,
    decide,
    make_reduction,
    parse_algorithm,
)
from hpctrain.topology import Topology

# A function that sums a buffer over all ranks, in place; collective.
InPlaceSum = Callable[[torch.Tensor], None]


@final
class Reductions:
    """Creates reducers that sum gradients, and sums of other buffers, over the ranks of a session."""

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
            horovod: How Horovod was built; None if it does not run.
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
        self._reducers: list[BucketReducer | ScatterReducer] = []
        self._sums: list[World] = []

    def make(
        self, plan: ReductionPlan, *, gradient_bytes: int, shard: Shard = "none", computes: bool = True
    ) -> Reduction:
        """Returns a reduction for the buckets of one updater. Its memory is freed by `close`. Collective.

        Args:
            gradient_bytes: The size of one rank's gradients.
            shard: `optimizer` or `gradients` for a `ScatterUpdater`.
            computes: Whether the ranks compute while they reduce.
        """
        spare_core = self.has_spare_core()
        made = make_reduction(
            self._world, plan, topology=self._topology, device=self._device, gradient_bytes=gradient_bytes, shard=shard,
            overlap=self.overlap(spare_core=spare_core), spare_core=spare_core, crowded=computes and self.crowded(),
            nccl=self.nccl(plan.algorithm), note=self._note,
        )  # fmt: skip
        self._reducers.append(made.reducer)
        return made

    def overlap(self, *, spare_core: bool) -> bool:
        """Returns True if reductions are faster when they run during backward. Not collective.

        They are if they wait for a network or a device, or have a spare core. On one node whose ranks use every core
        they would take cores from backward and add context switches.
        """
        return spare_core or self._topology.num_nodes > 1 or self._device.type != "cpu"

    def has_spare_core(self) -> bool:
        """Returns True if every rank has a core that its threads leave free. Collective."""
        share = cpu_share(self._cores(), self._world.rank)
        return is_true_everywhere(self._world, share >= torch.get_num_threads() + 1)

    def crowded(self) -> bool:
        """Returns True if some rank has less than one core per thread. Collective.

        This follows from the ranks' affinities, or from their launcher. A launcher that finds more ranks than the cores
        it was given, which may be fewer than the affinities show, preloads a library (`launch/yielding.py`).
        """
        share = cpu_share(self._cores(), self._world.rank)
        roomy = share >= torch.get_num_threads() and not in_effect()
        return not is_true_everywhere(self._world, roomy)

    def in_place_sum(self, *, algorithm: str = AUTO) -> InPlaceSum:
        """Returns a function that sums a buffer of any size over all ranks, in place. Collective.

        It uses the backend's own operations on a separate communicator, by the algorithm `flat` or `hierarchical-flat`.
        `auto` means the latter on several nodes with several ranks per node. With the backend `horovod`, Horovod runs
        from this call until the session is closed.
        """
        asked = Algorithm.HIERARCHICAL_FLAT if algorithm == AUTO else parse_algorithm(algorithm)
        means = Means(backend=self._world.reduction_backend, topology=self._topology, messages=False)
        two_levels = decide(Algorithm.HIERARCHICAL_FLAT, wire="fp32", means=means).note is None
        runs = Algorithm.HIERARCHICAL_FLAT if two_levels and asked in TWO_LEVELS else Algorithm.FLAT
        if algorithm != AUTO and runs is not asked:
            why = "buffers of any size are reduced by the backend's operations"
            if asked in TWO_LEVELS and not two_levels:
                why = self._topology.describe()
            self._note(f"reduction: {asked.value} was asked for, {runs.value} is used: {why}")
        if self._world.num_ranks == 1:
            return lambda buffer: None
        world = self._world.open_reduction_world()
        self._sums.append(world)
        return (
            world.all_reduce if runs is Algorithm.FLAT else make_two_level(world, self._topology).all_reduce
        )

    def close(self, *, free: bool) -> None:
        """Ends the reductions. `free=False` keeps the buckets' memory, which a thread may still use. Collective."""
        if free:
            while self._reducers:
                self._reducers.pop(0).close()
        while self._sums:
            self._sums.pop().close()

    def nccl(self, asked: str) -> Algorithm | None:
        """Returns which of Horovod's own two-level sums runs in this process. Notes if it was not asked for."""
        device_type = self._device.type
        found = nccl_in_effect(self._horovod, topology=self._topology, device_type=device_type)
        if asked in NCCL_VARIABLES:
            why = why_no_nccl(asked, build=self._horovod, topology=self._topology, device_type=device_type)
            if why is not None:
                self._note(f"reduction: {asked}: {why}")
        elif found is not None:
            self._note(f"reduction: Horovod's all-reduce runs {found}, as {NCCL_VARIABLES[found]} asks")
        return Algorithm(found) if found is not None else None
