"""`BucketReducer`, the interface between the updater and the algorithms that sum a bucket over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.reduce.contract.bucket_plan import Bucket

Numbers: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A block of a global tensor, for a checkpoint. A block that is the whole tensor is held by all ranks alike."""

    name: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


@runtime_checkable
class Chooser(Protocol):
    """Optional: a reducer that chose its algorithms by measurement.

    Sums by different algorithms differ in the last bits, so a resumed run must choose the same ones.
    """

    def choice_state(self) -> dict[str, Any]:
        """Returns the choice as JSON for a checkpoint; the same on every rank."""

    def recall(self, saved: Mapping[str, Any]) -> int:
        """Restores a saved choice, from the next plan on. Returns the bucket size in bytes. Not collective."""


@runtime_checkable
class StepSums(Protocol):
    """Optional: computes the norm and adds up a few numbers during the reduction.

    That saves another pass over the gradients and one collective.
    """

    def keep_squares(self) -> None:
        """From the next plan on, also computes the squares of the sums. Not collective."""

    def filled(self, number: int, num_elems: int) -> None:
        """Announces that the first `num_elems` elements of bucket `number` are written.

        The next reduction may begin with them, and overwrite them. Not collective; a rank may leave it out.
        """

    def scale_sums(self, factor: float) -> bool:
        """From now on until the next plan, multiplies the sums by `factor`, which is the same on every rank.

        Returns False, on every rank, where it cannot; then nothing is multiplied. Not collective.
        """

    def square(self) -> float | None:
        """Returns the sum of the squares of all gradients of the last reduction: the same bits on every rank.

        Returns None, on every rank, where it was not computed. Not collective.
        """

    def carry(self, numbers: Numbers) -> bool:
        """Sums a few numbers over all ranks, in place, with the next reduction of all buckets. Collective.

        numbers: shape (n,), float64; n is the same on every rank. Call it before the first of these reductions; the
        sums are there when the last has ended. Returns False, on every rank, where it cannot; where it can, `square` is
        known too.
        """

    def sum_numbers(self, numbers: Numbers) -> Iterator[bool] | None:
        """Sums a few numbers over all ranks, in place. Collective; a generator of turns, as `reduce`.

        numbers: shape (n,), float64; n is the same on every rank. Call it after `plan`, while no reduction is in
        flight. The sums are the same bits on every rank. Returns None, on every rank, where it cannot.
        """


@runtime_checkable
class InBackground(Protocol):
    """Optional: reductions that a thread outside Python continues once they have begun."""

    def in_background(self, number: int) -> bool:
        """Returns whether the reduction of bucket `number` is one of these; the same on every rank. Not collective.

        Its first `next` then does not wait for other ranks, so it is started within backward even where no core is free
        for a thread of hpctrain.
        """


class BucketReducer(Protocol):
    """Sums buckets of gradients over all ranks, several at a time.

    Every rank plans the same buckets and reduces them in the same order.
    """

    @property
    def algorithm(self) -> str:
        """Name of the algorithm that runs, as in the recipe."""

    @property
    def wire(self) -> str:
        """Name of the wire format, as in the recipe."""

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        """Returns zeroed memory for each bucket: shape (bucket.numel,), dtype bucket.dtype, on `device`. Collective.

        A second call replaces the buckets of the first and keeps the error feedback of each parameter. Raises
        BufferMismatch on every rank, naming the rank that differs, unless all ranks plan the same.
        """

    def reduce(self, number: int) -> Iterator[bool]:
        """Sums bucket `number` over all ranks, in place, in the memory that `plan` returned. Collective.

        A generator: each `next` works as far as it can without waiting. It yields True when it made progress, False
        when it waits for another rank, and ends when the bucket holds the sum, the same bits on every rank. Several
        reductions may be in flight. Every rank begins them in the same order, but later turns come in an order that
        differs between ranks; so a reducer of blocking collectives calls all of them in the first `next`.
        """

    def settle(self, *, applied: bool, rescale: float) -> None:
        """Ends the step for error feedback: what was fed back counts as sent only if the step was `applied`.

        applied: the same on every rank. rescale: next loss scale divided by this step's. Not collective.
        """

    def bytes_sent(self) -> int:
        """Returns the payload bytes that this rank has sent to other nodes so far. Not collective."""

    def state(self) -> list[StateTensor]:
        """Returns what a checkpoint must hold: error feedback, low-rank factors. Not collective; may be empty."""

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restores `state`. Call it after `plan`.

        tensors: the whole tensors of a checkpoint by name, also of one with another number of ranks. What it does not
        hold (it was written with another wire format) starts as in a new run; other names are ignored.
        """

    def close(self) -> None:
        """Frees memory and communicators. Collective."""
