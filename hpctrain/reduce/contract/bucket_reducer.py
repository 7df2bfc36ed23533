"""`BucketReducer`, the interface between the updater and the algorithms that sum a bucket over all ranks."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.comm import Collective
from hpctrain.reduce.contract.bucket_plan import Bucket

Numbers: TypeAlias = NDArray[np.float64]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A block of a global tensor, for a checkpoint. A block that is the whole tensor is the same on all ranks."""

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
        """Returns the chosen algorithms and bucket size as JSON for a checkpoint; the same on every rank."""

    def recall(self, saved: Mapping[str, Any]) -> int:
        """Restores a saved choice, from the next plan on. Returns the bucket size in bytes. Not collective."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """What the ranks know when the reductions of a step have ended: the same bits on every rank.

    norm_square: sum of the squares of all gradients as they are in the buckets; infinite or NaN if one of them is.
    numbers: sums over the ranks of the numbers that `finish` was given, shape (n,), float64.
    """

    norm_square: float
    numbers: Numbers


# Turns, as those of `BucketReducer.reduce`; the last one returns the result.
Finishing: TypeAlias = Generator[bool, None, Reduced]


@runtime_checkable
class InBackground(Protocol):
    """Optional: reductions that a thread outside Python continues once they have begun."""

    def in_background(self, number: int) -> bool:
        """Returns True if the reduction of bucket `number` is one of these; the same on every rank. Not collective.

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

    def keep_squares(self) -> None:
        """From the next plan on, each step ends with `finish`. Not collective."""

    def begin_step(self, factor: float) -> float:
        """Asks for sums that are multiplied by `factor`, until this is called again. Not collective.

        factor: the same on every rank. Returns the factor by which they are multiplied, the same on every rank:
        `factor` where that costs no further pass over the gradients, else 1.
        """

    def filled(self, number: int, num_elems: int) -> None:
        """Announces that the first `num_elems` elements of bucket `number` are written. Not collective.

        Its reduction may begin with them, and overwrite them. A rank need not announce anything.
        """

    def finish(self, numbers: Numbers, *, comm: Collective) -> Finishing:
        """Ends the reductions of a step: returns turns that compute the norm and sum `numbers`. Collective.

        numbers: shape (n,), float64, overwritten with the sums; n is the same on every rank. comm: all ranks, for
        reducers without a faster way. Call it, on every rank alike, before the first reduction of the step begins, so
        that the numbers can travel with it, or after the last has ended; take the turns after the last has ended.
        """

    def settle(self, *, applied: bool, rescale: float) -> None:
        """Ends the step for error feedback: its values count as sent only if the step was `applied`.

        applied: the same on every rank. rescale: next loss scale divided by this step's. Not collective.
        """

    def bytes_sent(self) -> int:
        """Returns the payload bytes that this rank has sent to other nodes so far. Not collective."""

    def state(self) -> list[StateTensor]:
        """Returns what a checkpoint must hold: error feedback, low-rank factors. Not collective; may be empty."""

    def rows_to_load(self, shapes: Shapes) -> dict[str, list[range]]:
        """Returns which rows of a checkpoint's tensors `load_state` needs on this rank; it needs all of the others.

        shapes: of the whole tensors, by name; the checkpoint may be of another number of ranks. Ascending rows. Call it
        after `plan`. Not collective.
        """

    def load_state(self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None = None) -> None:
        """Restores `state`. Collective. Call it after `plan`.

        tensors: of a checkpoint, by name: whole, or only the rows (along the first dimension) of `rows_to_load`, one
        after another. shapes: of the whole tensors; None: `tensors` are whole. Missing tensors (of another wire format)
        start as in a new run; unknown names are ignored. Raises CheckpointError on every rank if they are of another
        model.
        """

    def close(self) -> None:
        """Frees memory and communicators. Collective."""
