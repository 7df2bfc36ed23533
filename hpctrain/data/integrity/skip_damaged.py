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

# For a disk that fails intermittently: the read finds damage, but a second check finds none.
_TRIES = 3


def without_damaged(plan: BatchPlan, *, sound: NDArray[np.bool_], keep_length: bool) -> BatchPlan:
    """Returns `plan` with only its sound samples, in their order; the others are counted in `num_skipped`.

    sound: bool, shape of `plan.indices`. keep_length: sound samples are repeated as padding until there are as many
    rows as before; no rows if no sample is sound.
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
    """Reads the sound samples of `plan`. Returns the plan of the samples that were read, and the result of `read`.

    sound: returns for each sample if it lies in no damaged block, as `BlockChecker.sound`.
    Raises DamagedData if the headers of a shard are damaged, or if reading fails three times on samples that are
    found to be sound; DataError if a shard is missing or truncated.
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
