"""A reducer that uses for each bucket the algorithm chosen for its size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch

from hpctrain.comm import Collective
from hpctrain.errors import UsageError
from hpctrain.reduce.autotune.link_speed import Candidate
from hpctrain.reduce.autotune.trials import MakeReducer
from hpctrain.reduce.autotune.tune import AutoChoice
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import (
    BucketReducer,
    Finishing,
    InBackground,
    Numbers,
    Reduced,
    Shapes,
    StateTensor,
    check_same_plan,
)
from hpctrain.reduce.shared_memory.summation import in_order


@final
class AutoReducer:
    """`BucketReducer` that passes each bucket to the reducer for its size.

    comm: communicator of all ranks, used only by `plan`.
    make: creates the reducer of a candidate; called by `plan` for each candidate that the bucket sizes need.

    A reducer that a later plan does not need is kept, since earlier buckets in its memory may still be referenced. A
    wire format with state has one candidate for all sizes (`TrialResults.settle`), so the state is that reducer's,
    under the same names as without `auto`.
    """

    def __init__(self, auto: AutoChoice, *, comm: Collective, make: MakeReducer) -> None:
        self._auto = auto
        self._comm = comm
        self._make = make
        self._reducers: dict[Candidate, BucketReducer] = {}
        self._places: list[tuple[BucketReducer, int]] = []  # per bucket: its reducer, its number there
        self._used: list[BucketReducer] = []  # reducers that have buckets in the last plan
        self._squares = False

    @property
    def algorithm(self) -> str:
        """Text such as `auto: flat up to 64 KB, then hierarchical-ring`."""
        return self._auto.describe()

    @property
    def wire(self) -> str:
        return self._auto.wire

    def record(self) -> dict[str, Any]:
        """Returns the choice and its measurements as JSON, for the run's record."""
        return self._auto.record()

    def choice_state(self) -> dict[str, Any]:
        """Returns the choice as JSON, for a checkpoint."""
        return self._auto.state()

    def recall(self, saved: Mapping[str, Any]) -> int:
        """Restores the saved choice for the next `plan`, if it is valid here. Returns the bucket size in bytes.

        Not collective: `saved` and `AutoChoice.key` are the same on every rank, so all ranks decide alike.
        """
        self._auto = self._auto.recalled(saved)
        return self._auto.bucket_bytes

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        # Check here, as well as in the reducers: ranks with different sizes would use different reducers.
        check_same_plan(self._comm, buckets, how=f"{self.algorithm}, {self.wire}")
        by_candidate: dict[Candidate, list[int]] = {}
        for number, bucket in enumerate(buckets):
            size = bucket.numel * bucket.dtype.itemsize
            by_candidate.setdefault(self._auto.choice.choose(size), []).append(number)
        memory: dict[int, torch.Tensor] = {}
        places: dict[int, tuple[BucketReducer, int]] = {}
        for candidate, numbers in by_candidate.items():
            reducer = self._reducer_for(candidate)
            if self._squares:
                reducer.keep_squares()
            given = reducer.plan([buckets[number] for number in numbers], device=device)
            for place, (number, tensor) in enumerate(zip(numbers, given, strict=True)):
                memory[number] = tensor
                places[number] = (reducer, place)
        self._places = [places[number] for number in range(len(buckets))]
        self._used = list(dict.fromkeys(reducer for reducer, _ in self._places))
        return [memory[number] for number in range(len(buckets))]

    def _reducer_for(self, candidate: Candidate) -> BucketReducer:
        if candidate not in self._reducers:
            self._reducers[candidate] = self._make(*candidate)
        return self._reducers[candidate]

    def reduce(self, number: int) -> Iterator[bool]:
        """See `BucketReducer.reduce`. Raises UsageError if there is no bucket of this number."""
        if not 0 <= number < len(self._places):
            raise UsageError(f"no bucket {number} to reduce: {len(self._places)} are planned")
        reducer, place = self._places[number]
        return reducer.reduce(place)

    def in_background(self, number: int) -> bool:
        reducer, place = self._places[number]
        return isinstance(reducer, InBackground) and reducer.in_background(place)

    def keep_squares(self) -> None:
        self._squares = True

    def begin_step(self, factor: float) -> float:
        if len(self._used) == 1:
            return self._used[0].begin_step(factor)
        for reducer in self._used:
            reducer.begin_step(1.0)
        return 1.0

    def filled(self, number: int, num_elems: int) -> None:
        reducer, place = self._places[number]
        reducer.filled(place, num_elems)

    def finish(self, numbers: Numbers, *, comm: Collective) -> Finishing:
        first, *others = self._used
        return _finish_all(
            [first.finish(numbers, comm=comm), *(r.finish(np.empty(0), comm=comm) for r in others)], numbers
        )

    def settle(self, *, applied: bool, rescale: float) -> None:
        for reducer in self._used:
            reducer.settle(applied=applied, rescale=rescale)

    def bytes_sent(self) -> int:
        return sum(reducer.bytes_sent() for reducer in self._reducers.values())

    def state(self) -> list[StateTensor]:
        return [tensor for reducer in self._used for tensor in reducer.state()]

    def rows_to_load(self, shapes: Shapes) -> dict[str, list[range]]:
        return {name: rows for reducer in self._used for name, rows in reducer.rows_to_load(shapes).items()}

    def load_state(self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None = None) -> None:
        """See `BucketReducer.load_state`."""
        for reducer in self._used:
            reducer.load_state(tensors, shapes)

    def close(self) -> None:
        self._places, self._used = [], []
        while self._reducers:
            self._reducers.pop(next(iter(self._reducers))).close()


def _finish_all(turns: Sequence[Finishing], numbers: Numbers) -> Finishing:
    """Ends the step of each reducer, in the order of the buckets, which is the same on every rank."""
    squares = []
    for each in turns:
        squares.append((yield from each).norm_square)
    return Reduced(in_order(squares), numbers)
