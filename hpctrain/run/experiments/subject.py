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
        not_finite: (row, field) for rows with NaN or infinity.
    """

    indices: Sequence[int] | None
    hashes: Sequence[int]
    not_finite: Sequence[tuple[int, str]] = ()

    def names(self) -> list[int]:
        """Returns the identifiers of the samples: their indices in the dataset, else the hashes of their content."""
        return list(self.hashes if self.indices is None else self.indices)


class Trial(Protocol):
    """One training from its start, with its own objects.

    Methods are collective over `session`, a `hpctrain.run.Session`, whose type is in a higher layer.
    """

    session: Any
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    updater: DistributedOptimizer
    drawing: Axis | None
    """The ranks that draw different random numbers; see `TrainingState`."""

    also: Mapping[str, Stateful | None]
    """Other objects that are in its checkpoints, by name."""

    is_split: bool
    """The ranks hold parts of the model: gradients and parameters are compared where they are whole."""

    @property
    def batches_per_epoch(self) -> int: ...
    @property
    def has_epochs(self) -> bool:
        """True if `batches` can start with any epoch. Otherwise each call continues with the next epoch."""

    def batches(self, epoch: int, *, skip: int = 0) -> Iterator[Any]:
        """Yields this rank's batches of an epoch, after the first `skip`. Closing the iterator ends it early."""

    def step(self, batch: Any, *, micro_batches: int = 1) -> float:
        """Trains one step. Returns the mean loss of this rank's samples; see `Subject.loss_is_share`."""

    def rows(self, batch: Any) -> BatchRows: ...

    def part(self, batch: Any, rows: Sequence[int]) -> Any:
        """Returns some rows of a batch. A row may occur several times."""

    def repeated(self, batch: Any, copies: int) -> Any:
        """Returns a batch that each of `copies` ranks computes completely, with a share of 1/copies on each."""

    def poisoned(self, batch: Any) -> Any | None:
        """Returns the batch with one NaN in each floating-point field; None if it has no such field."""

    def cleaned(self, batch: Any) -> Any:
        """Returns the batch with each NaN or infinity replaced by 0."""

    def loss(self, batch: Any) -> tuple[float, float | None]:
        """Returns the mean loss of a batch without training, and the weight that the task gives it.

        The weight is in any unit; None if losses count by samples. Not collective on one rank.
        """

    def evaluate(self) -> Mapping[str, float] | None:
        """Returns the metrics of an evaluation as in a run; None if there is none."""

    def roots(self) -> Mapping[str, Any]:
        """Returns the user's objects by name, which may hold state that is not in the checkpoint."""

    def close(self) -> None:
        """Ends the trial's updater, loaders and groups. Communication stays open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How a trial differs from the run.

    double: whether it computes in float64. seed_change: the number that is added to the generators' seed.
    """

    double: bool = True
    seed_change: int = 0


class Subject(Protocol):
    """Creates trials of a user's training.

    Attributes:
        splits: Whether the user's run uses micro-batches.
        can_split: Whether micro-batches are possible.
        asks_double: Whether the user's run computes in float64.
        repeats_samples: Whether samples are drawn with replacement, so that repetitions are intended.
        is_shuffled: Whether epochs should have different orders; None: unknown.
        loss_is_share: Whether `step` returns the loss times the rank's share of the global batch.
        scratch: A folder that all ranks see.
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
        """Creates a trial. Collective over the session."""

    def variables(self) -> Mapping[str, Any]:
        """Returns the variables of the user's modules by name, which a new process would initialise again."""


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
