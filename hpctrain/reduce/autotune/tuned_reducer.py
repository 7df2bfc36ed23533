"""Each bucket by the algorithm that was chosen for its size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch

from hpctrain.comm import Collective
from hpctrain.errors import UsageError
from hpctrain.reduce.autotune.cost_model import Candidate
from hpctrain.reduce.autotune.trials import MakeReducer
from hpctrain.reduce.autotune.tune import AutoChoice
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import (
    BucketReducer,
    InBackground,
    Numbers,
    StateTensor,
    StepSums,
)
from hpctrain.reduce.contract.plan_agreement import check_same_plan
from hpctrain.reduce.shared_memory.summation import in_order


@final
class AutoReducer:
    """`BucketReducer` that hands each bucket to a reducer made for it.

    comm: all ranks, used by `plan` alone. make: used by `plan`, for each candidate whose sizes the buckets have.
    A reducer that a later plan has no bucket for is kept: whoever holds the earlier buckets may still look at them.
    A wire that keeps state has one candidate for all sizes (`Measured.settle`), so its state is that reducer's,
    under the same names as without `auto`.
    """

    def __init__(self, auto: AutoChoice, *, comm: Collective, make: MakeReducer) -> None:
        self._auto = auto
        self._comm = comm
        self._make = make
        self._reducers: dict[Candidate, BucketReducer] = {}
        self._places: list[tuple[BucketReducer, int]] = []  # of each bucket: its reducer, its number there
        self._used: list[BucketReducer] = []  # those that the last plan has buckets for
        self._step_sums: list[StepSums | None] = []  # of each bucket: its reducer, if it is one
        self._only: StepSums | None = None  # where it reduces all buckets
        self._squares = False

    @property
    def algorithm(self) -> str:
        """In words: `auto: flat up to 64 KB, then hierarchical-ring`."""
        return self._auto.describe()

    @property
    def wire(self) -> str:
        return self._auto.wire

    def record(self) -> dict[str, Any]:
        """The choice and its numbers, for the run's record."""
        return self._auto.record()

    def choice_state(self) -> dict[str, Any]:
        """The choice, as JSON, for a checkpoint."""
        return self._auto.state()

    def recall(self, saved: Mapping[str, Any]) -> int:
        """Choose as the run did that saved `saved`, where its choice holds here. The bucket size to plan with.

        Not collective: `saved` and `AutoChoice.key` are the same on every rank, so all decide alike. It counts from
        the next `plan` on.
        """
        self._auto = self._auto.recalled(saved)
        return self._auto.bucket_bytes

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        # Here too, and not only in the reducers: ranks with other sizes would meet in other ones.
        check_same_plan(self._comm, buckets, how=f"{self.algorithm}, {self.wire}")
        by_candidate: dict[Candidate, list[int]] = {}
        for number, bucket in enumerate(buckets):
            size = bucket.numel * bucket.dtype.itemsize
            by_candidate.setdefault(self._auto.choice.choose(size), []).append(number)
        memory: dict[int, torch.Tensor] = {}
        places: dict[int, tuple[BucketReducer, int]] = {}
        for candidate, numbers in by_candidate.items():
            reducer = self._reducer_for(candidate)
            if self._squares and isinstance(reducer, StepSums):
                reducer.keep_squares()
            given = reducer.plan([buckets[number] for number in numbers], device=device)
            for place, (number, tensor) in enumerate(zip(numbers, given, strict=True)):
                memory[number] = tensor
                places[number] = (reducer, place)
        self._places = [places[number] for number in range(len(buckets))]
        self._used = list(dict.fromkeys(reducer for reducer, _ in self._places))
        self._step_sums = [reducer if isinstance(reducer, StepSums) else None for reducer, _ in self._places]
        self._only = self._step_sums[0] if len(self._used) == 1 else None
        return [memory[number] for number in range(len(buckets))]

    def _reducer_for(self, candidate: Candidate) -> BucketReducer:
        if candidate not in self._reducers:
            self._reducers[candidate] = self._make(*candidate)
        return self._reducers[candidate]

    def reduce(self, number: int) -> Iterator[bool]:
        if not 0 <= number < len(self._places):
            raise UsageError(f"no bucket {number} to reduce: {len(self._places)} are planned")
        reducer, place = self._places[number]
        return reducer.reduce(place)

    def in_background(self, number: int) -> bool:
        reducer, place = self._places[number]
        return isinstance(reducer, InBackground) and reducer.in_background(place)

    def keep_squares(self) -> None:
        self._squares = True

    def filled(self, number: int, num_elems: int) -> None:
        if (reducer := self._step_sums[number]) is not None:
            reducer.filled(self._places[number][1], num_elems)

    def scale_sums(self, factor: float) -> bool:
        return self._only is not None and self._only.scale_sums(factor)

    def square(self) -> float | None:
        squares = [reducer.square() if isinstance(reducer, StepSums) else None for reducer in self._used]
        known = [square for square in squares if square is not None]
        return in_order(known) if len(known) == len(squares) else None

    def carry(self, numbers: Numbers) -> bool:
        return self._only is not None and self._only.carry(numbers)

    def sum_numbers(self, numbers: Numbers) -> Iterator[bool] | None:
        for reducer in self._used:
            if isinstance(reducer, StepSums) and (turns := reducer.sum_numbers(numbers)) is not None:
                return turns
        return None

    def settle(self, *, applied: bool, rescale: float) -> None:
        for reducer in self._used:
            reducer.settle(applied=applied, rescale=rescale)

    def bytes_sent(self) -> int:
        return sum(reducer.bytes_sent() for reducer in self._reducers.values())

    def state(self) -> list[StateTensor]:
        return [tensor for reducer in self._used for tensor in reducer.state()]

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        for reducer in self._used:
            reducer.load_state(tensors)

    def close(self) -> None:
        self._places, self._used, self._step_sums, self._only = [], [], [], None
        while self._reducers:
            self._reducers.pop(next(iter(self._reducers))).close()
