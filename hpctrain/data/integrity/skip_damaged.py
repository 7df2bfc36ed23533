"""Reads a batch without the samples that lie in damaged blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.integrity.read_checker import DamagedData
from hpctrain.data.order.batch_plan import BatchPlan

T = TypeVar("T")

# A disk that fails now and then: damage is met, but when one looks again all is sound.
_TRIES = 3


def without_damaged(plan: BatchPlan, *, sound: NDArray[np.bool_], keep_length: bool) -> BatchPlan:
    """`plan` with its sound samples only, in their order; those left out are counted in `num_skipped`.

    sound: bool, shape of `plan.indices`. keep_length: sound samples are repeated, as ones that do not count, until
    there are as many rows as before; none if no sample is sound.
    """
    real = plan.indices[: plan.num_samples][sound[: plan.num_samples]]
    padding = plan.indices[plan.num_samples :][sound[plan.num_samples :]]
    if keep_length:
        pool = np.concatenate([real, padding])
        padding = np.resize(pool, len(plan.indices) - len(real)) if len(pool) else pool
    return replace(
        plan,
        indices=np.concatenate([real, padding]),
        num_samples=len(real),
        num_skipped=plan.num_skipped + plan.num_samples - len(real),
    )


def read_around_damage(
    plan: BatchPlan,
    *,
    read: Callable[[NDArray[np.int64]], T],
    sound: Callable[[NDArray[np.int64]], NDArray[np.bool_]],
    keep_length: bool,
) -> tuple[BatchPlan, T]:
    """What `read` gives for the sound samples of `plan`, and the plan of what was read.

    sound: which of the samples lie in no damaged block, as `BlockChecker.sound` tells.
    Raises DamagedData if the headers of a shard are damaged, or if reading fails again and again on samples that
    are found to be sound; DataError if a shard is missing or cut short.
    """
    tries = 0
    while True:
        try:
            return plan, read(plan.indices)
        except DamagedData as error:
            found = sound(plan.indices)
            tries += bool(found.all())
            if error.damage.field is None or tries == _TRIES:
                raise
            plan = without_damaged(plan, sound=found, keep_length=keep_length)
