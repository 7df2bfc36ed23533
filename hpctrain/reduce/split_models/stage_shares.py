"""ZeRO-1 in a pipeline: the optimizer of a stage, divided into shares over the stage's data-parallel ranks.

A pipeline's schedule calls backward itself, once per micro-batch. So gradients are summed once, after the last
micro-batch.

Source: Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import final

import torch

from hpctrain.comm import Collective
from hpctrain.errors import UsageError
from hpctrain.reduce.contract.bucket_plan import plan_buckets
from hpctrain.reduce.data_parallel.gradient_memory import describe_gradient
from hpctrain.reduce.data_parallel.one_pass import OptimizerStep
from hpctrain.reduce.zero.bucket_division import BucketDivision
from hpctrain.reduce.zero.owned_parts import OwnedParts, ParameterCopies, check_zero_optimizer

_UNIT_BYTES = 25_000_000  # size of the gradients that are copied and summed at once


@final
class StageShares:
    """This rank's share of a pipeline stage: the elements that the rank owns.

    The optimizer holds these elements until `release`.

    parameters: parameters of the optimizer, the same on every rank of `replicas`.
    replicas: communicator of the ranks that hold the same stage. Each element is owned by one of these ranks.
    optimizer_step: makes the steps of `optimizer`.

    The constructor is not collective.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        *,
        replicas: Collective,
        optimizer_step: OptimizerStep,
    ) -> None:
        self._replicas = replicas
        self._parameters = parameters
        buckets = plan_buckets([describe_gradient(p) for p in parameters], bucket_bytes=_UNIT_BYTES)
        self._plan = plan = BucketDivision.of(buckets, num_ranks=replicas.num_ranks, unit_bytes=_UNIT_BYTES)
        self._copies = ParameterCopies(parameters, plan=plan, rank=replicas.rank)
        self._owned = OwnedParts(
            optimizer, parameters, plan=plan, rank=replicas.rank, optimizer_step=optimizer_step
        )
        self._gathered = [self._copies.gathered(number) for number in range(len(plan.units))]
        self._used = [False] * len(parameters)

    def sum(self) -> None:
        """Sums the gradients over the replicas; each rank gets the sums of the elements that it owns.

        Collective over the replicas.

        Afterwards `.grad` of each parameter is None; whole gradients are dropped bucket by bucket.
        """
        used = torch.tensor([p.grad is not None for p in self._parameters], dtype=torch.int32)
        self._replicas.all_reduce(used)
        self._used = [count > 0 for count in used.tolist()]
        for bucket, units in groupby(enumerate(self._plan.units), key=lambda numbered: numbered[1].bucket):
            indices = [slot.parameter for slot in self._plan.buckets[bucket].slots]
            gradients = self._copies.take_gradients(indices)
            share = self._plan.shares[bucket][self._replicas.rank]
            for number, unit in units:
                values = torch.empty(unit.numel, dtype=unit.dtype)
                self._copies.pack(number, gradients, factor=1.0, into=values)
                counts = [part.numel for part in unit.parts]
                total = self._replicas.reduce_scatter(values, counts=counts)
                own = unit.parts[self._replicas.rank]
                self._owned.gradients[bucket][own.begin - share.begin : own.end - share.begin] = total
            del gradients
            self._drop_whole(indices)

    def square(self) -> float:
        """Returns the sum of the squares of this rank's part of the summed gradients.

        The result is infinite or NaN if one of these gradients is infinite or NaN.
        """
        return self._owned.square()

    def update(self, *, factor: float) -> float:
        """Steps the optimizer on this rank's part of the sums, times `factor`, and gathers the parameters.

        Collective over the replicas. Returns the seconds that the gathering took.
        """
        factor = self._owned.scale_copied(factor)
        self._owned.set_gradients(self._used)
        self._owned.step(factor)
        began = time.perf_counter()
        for gathered in self._gathered:
            mine = torch.empty(gathered.num_bytes[self._replicas.rank], dtype=torch.uint8)
            gathered.read(mine)
            parts = self._replicas.all_gather(mine, counts=gathered.num_bytes).split(list(gathered.num_bytes))
            for owner, part in enumerate(parts):
                if owner != self._replicas.rank:
                    gathered.write(owner, part)
        return time.perf_counter() - began

    def drop_gradients(self) -> None:
        """Drops the gradients of the parameters, and the summed gradients of this rank's elements."""
        self._owned.forget()
        self._drop_whole(range(len(self._parameters)))

    def release(self) -> None:
        """Gives the optimizer the whole parameters of the stage back, without state."""
        self._owned.release()

    def _drop_whole(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._parameters[index].grad = None


def check_stage(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Raises UsageError for an optimizer or parameters that `StageShares` cannot divide."""
    check_zero_optimizer(optimizer, parameters)
    if any(parameter.dtype is torch.float16 for parameter in parameters):
        raise UsageError(
            "a parameter of a pipeline is float16, in which a summed gradient may overflow: keep parameters in float32 "
            "(run.precision = 'fp16' does), or leave shard = 'optimizer' out"
        )
