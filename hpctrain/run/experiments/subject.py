"""`Subject`, what the experiments train: a recipe or a loop of the user's."""

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
class Rows:
    """The samples of a batch on one rank, by row.

    indices: number in the dataset; None if unknown. hashes: of the content. not_finite: (row, field) with NaN or inf.
    """

    indices: Sequence[int] | None
    hashes: Sequence[int]
    not_finite: Sequence[tuple[int, str]] = ()

    def names(self) -> list[int]:
        """Returns what tells the samples apart: their numbers in the dataset, or else the hashes of their content."""
        return list(self.hashes if self.indices is None else self.indices)


class Trial(Protocol):
    """One training from its beginning, with objects of its own. Methods are collective over `session`, a
    `hpctrain.run.Session`, which is in a higher layer."""

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
        """Whether `batches` can begin with any epoch; else each call goes on to the next one."""

    def batches(self, epoch: int, *, skip: int = 0) -> Iterator[Any]:
        """Returns this rank's batches of an epoch, after the first `skip`. Closing the iterator ends it early."""

    def step(self, batch: Any, *, micro_batches: int = 1) -> float:
        """Trains one step. Returns the mean loss of this rank's samples; see `Subject.loss_is_share`."""

    def rows(self, batch: Any) -> Rows: ...

    def part(self, batch: Any, rows: Sequence[int]) -> Any:
        """Returns the given rows of a batch, which may be repeated."""

    def repeated(self, batch: Any, copies: int) -> Any:
        """Returns a batch that each of `copies` ranks computes completely: its share is 1/copies on each."""

    def poisoned(self, batch: Any) -> Any | None:
        """Returns the batch with one NaN in each floating-point field; None if it has no such field."""

    def cleaned(self, batch: Any) -> Any:
        """Returns the batch with 0 for each NaN or infinity."""

    def loss(self, batch: Any) -> tuple[float, float | None]:
        """Returns the mean loss of a batch, without training, and the weight that the task gives it, in any unit; None
        if losses count by samples. Not collective on one rank."""

    def evaluate(self) -> Mapping[str, float] | None:
        """Returns the metrics of an evaluation as in a run; None if there is none."""

    def roots(self) -> Mapping[str, Any]:
        """Returns the user's objects, by name, in which state outside of the checkpoint may be."""

    def close(self) -> None:
        """Ends the trial's updater, loaders and groups, not the communication."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How a trial differs from the run. double: compute in float64. seed_change: added to the generators' seed."""

    double: bool = True
    seed_change: int = 0


class Subject(Protocol):
    """Makes trials. asks_double: the user's own run computes in float64. can_split: micro-batches are possible.
    splits: the user's own run uses them. repeats_samples: the order draws samples with replacement, so that repeated
    samples are intended. is_shuffled: whether epochs should have other orders; None: unknown. loss_is_share: `step`
    returns the loss times the rank's share of the global batch. scratch: a folder that all ranks see."""

    name: str
    splits: bool
    is_shuffled: bool | None
    loss_is_share: bool
    asks_double: bool
    can_split: bool
    repeats_samples: bool
    scratch: Path

    def open(self, session: Any, setting: Setting) -> Trial:
        """Builds a trial. Collective over the session."""

    def variables(self) -> Mapping[str, Any]:
        """Returns the variables of the user's modules, by name, which a new process would begin with anew."""


# A folder for the checkpoints of a check, removed afterwards.


@contextmanager
def scratch_folder(parent: Path, *, comm: Collective) -> Iterator[Path]:
    """Makes a folder in `parent`, which all nodes see, and removes it after the block. Collective."""
    made = on_rank_0(comm, lambda: tempfile.mkdtemp(prefix=".hpctrain-check-", dir=parent))
    folder = Path(made)
    make_shared_folder(folder, comm=comm)
    try:
        yield folder
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
