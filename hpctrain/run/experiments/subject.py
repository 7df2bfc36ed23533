"""`Subject`, the interface of what the experiments train: a recipe or a user's own loop."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from hpctrain.comm import Collective, make_shared_folder, on_rank_0
from hpctrain.reduce import DistributedOptimizer
from hpctrain.topology import Axis
from hpctrain.train import Stateful


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRows:
    """The samples of a batch on one rank, by row.

    Attributes:
        indices: The indices of the samples in the dataset; None if unknown.
        hashes: Hashes of the samples' content.
        not_finite: A pair (sample, field) for each field of a sample that has NaN or infinity. A sample is given by its
            index in the dataset if `indices` is not None, else by its row in the batch.
    """

    indices: Sequence[int] | None
    hashes: Sequence[int]
    not_finite: Sequence[tuple[int, str]] = ()

    def names(self) -> list[int]:
        """Returns the identifiers of the samples: their indices in the dataset, else the hashes of their content."""
        return list(self.hashes if self.indices is None else self.indices)


class Trial(Protocol):
    """One run of a training from its start, with a model, an optimizer and other objects of its own.

    Methods are collective over `session`, an `hpctrain.run.Session`. The attribute is typed `Any`, since the class
    `Session` is in a higher layer.
    """

    session: Any
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    updater: DistributedOptimizer
    drawing: Axis | None
    """The ranks that draw different random numbers; see `TrainingState`."""

    also: Mapping[str, Stateful | None]
    """Other objects that the trial's checkpoints contain, by name."""

    is_split: bool
    """True if a rank holds only a part of the model. Gradients and parameters are compared where they are whole."""

    @property
    def batches_per_epoch(self) -> int: ...
    @property
    def has_epochs(self) -> bool:
        """True if `batches` can start with any epoch. Otherwise each call continues with the next epoch."""

    def batches(self, epoch: int, *, skip: int = 0) -> Iterator[Any]:
        """Yields this rank's batches of an epoch except for the first `skip`. Closing the iterator ends the epoch."""

    def step(self, batch: Any, *, micro_batches: int = 1) -> float:
        """Trains one step. Returns the mean loss of this rank's samples; see `Subject.loss_is_share`."""

    def rows(self, batch: Any) -> BatchRows: ...

    def part(self, batch: Any, rows: Sequence[int]) -> Any:
        """Returns some rows of a batch. A row may occur several times."""

    def repeated(self, batch: Any, copies: int) -> Any:
        """Returns the batch for a step in which each of `copies` ranks computes all samples of the batch.

        Each rank's loss then counts as 1/`copies` of the global batch.
        """

    def poisoned(self, batch: Any) -> Any | None:
        """Returns the batch with one NaN in each floating-point field; None if the batch has no such field."""

    def cleaned(self, batch: Any) -> Any:
        """Returns the batch with each NaN or infinity replaced by 0."""

    def loss(self, batch: Any) -> tuple[float, float | None]:
        """Returns the mean loss of a batch without training, and the weight that the task gives the batch.

        The task chooses the unit of the weight, such as tokens. The weight is None if losses are weighted by numbers of
        samples. Not collective in a trial on one rank.
        """

    def evaluate(self) -> Mapping[str, float] | None:
        """Evaluates as a run does, and returns the metrics; None if the training has no evaluation."""

    def roots(self) -> Mapping[str, Any]:
        """Returns the user's objects by name. They may hold state that is not in the checkpoint."""

    def close(self) -> None:
        """Ends the updater, loaders and groups of this training run. Communication stays open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How a trial (a short run of the user's training) differs from the user's own run.

    double: whether the trial computes in float64.
    seed_change: the number that is added to the generators' seed.
    """

    double: bool = True
    seed_change: int = 0


class Subject(Protocol):
    """Creates trials of a user's training: short runs under chosen conditions.

    Attributes:
        splits: Whether the user's run uses micro-batches.
        can_split: Whether micro-batches are possible.
        asks_double: Whether the user's run computes in float64.
        repeats_samples: Whether samples are drawn with replacement, so that repetitions are intended.
        is_shuffled: Whether epochs should have different orders; None: unknown.
        loss_is_share: Whether `Trial.step` returns the mean loss times the rank's share of the global batch.
        scratch: A folder that all ranks see, for the trials' checkpoints.
    """

    name: str
    splits: bool
    is_shuffled: bool | None
    loss_is_share: bool
    asks_double: bool
    can_split: bool
    repeats_samples: bool
    scratch: Path

    def open(self, session: Any, setting: Setting) -> Trial:
        """Creates a trial, which is one run of the training from its start. Collective over the session."""

    def variables(self) -> Mapping[str, Any]:
        """Returns the global variables of the user's Python modules.

        A new process would initialise these variables again.
        """


# A folder for the checkpoints of a check, removed afterwards.


@contextmanager
def scratch_folder(parent: Path, *, comm: Collective) -> Iterator[Path]:
    """Creates a folder in `parent`, which all nodes see, and removes it after the `with` block. Collective."""
    made = on_rank_0(comm, lambda: tempfile.mkdtemp(prefix=".hpctrain-check-", dir=parent))
    folder = Path(made)
    make_shared_folder(folder, comm=comm)
    try:
        yield folder
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
