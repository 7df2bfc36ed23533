"""A user's own training loop as the subject of experiments, for `Session.check`."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch

from hpctrain.data import Batch
from hpctrain.distributed import is_sharded, pipeline_of, split_of
from hpctrain.errors import UsageError
from hpctrain.run.experiments.causes.decide import find_causes
from hpctrain.run.experiments.causes.findings import CheckReport
from hpctrain.run.experiments.measuring.own_state import variables_of_module
from hpctrain.run.experiments.measuring.samples import as_fields, row_hashes, rows_not_finite
from hpctrain.run.experiments.observe import Experiments
from hpctrain.run.experiments.subject import BatchRows, Setting, scratch_folder
from hpctrain.run.experiments.trials import sum_exactly
from hpctrain.topology import Axis
from hpctrain.train import Stateful, check_also, seed_generators

_UNKNOWN = 1 << 30  # batches per epoch of a loader without a length
_LOOKED_AT = 64  # samples of a sampler, to see whether it shuffles


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnLoop:
    """The training that a function given to `Session.check` has built.

    Attributes:
        batches: An iterable of this rank's batches, or a function that takes the epoch and returns such an iterable. A
            batch is a tensor, a tuple, list or mapping of tensors with the samples along dimension 0, or an
            `hpctrain.Batch`.
        step: A function that trains on one batch and returns the mean loss of the batch. The function may take a
            keyword argument `micro_batches`, the number of parts over which it accumulates gradients.
        evaluate: A function that returns metrics of all ranks by name; None: evaluation is not checked.
        also: Other objects that the loop passes to `Session.save_state` and `load_state`, by name, such as schedulers.
    """

    batches: Iterable[Any] | Callable[[int], Iterable[Any]]
    step: Callable[..., Any]
    evaluate: Callable[[], Mapping[str, float]] | None = None
    also: Mapping[str, Stateful | None] = field(default_factory=dict)


Build = Callable[[Any], OwnLoop]


def check_loop(session: Any, build: Build, *, steps: int, show: bool, scratch: Path) -> CheckReport:
    """Runs the training that `build` creates on one rank and on all ranks, and compares the runs. Collective.

    Returns what was compared and the causes of the differences.

    Args:
        build: A function that takes a session, and must use this session instead of `session`. It builds model, updater
            and batches, and returns `(batches, step)`, `(batches, step, evaluate)` or `(batches, step, evaluate,
            also)`; see `OwnLoop` and guides/check.md.
        show: Whether rank 0 prints the result.
        scratch: A folder that all nodes share, for a few checkpoints, which are removed.

    Raises UsageError on every rank if there are fewer than two ranks or the training fails on one rank; LaunchError if
    no folder can be created in `scratch`; CheckpointError if the checkpoints cannot be written there.
    """
    name = getattr(build, "__name__", type(build).__name__)

    def say(text: str) -> None:
        if session.rank == 0 and show:
            print(f"checking: {text}", file=sys.stderr, flush=True)

    if session.world_size < 2:
        raise UsageError(
            "a check compares ranks: start it on 2 or more (hpctrain launch -n 2 -- ...)", agreed=True
        )
    with scratch_folder(scratch, comm=session.world) as folder:
        subject = LoopSubject(build, name=name, scratch=folder)
        observations = Experiments(subject, session, steps=steps, say=say).observe()
    report = CheckReport(name=name, observations=observations, findings=find_causes(observations))
    if session.rank == 0 and show:
        print("\n".join(report.lines()), flush=True)
    return report


@final
class LoopSubject:
    """A user's training loop as the training that the experiments compare (`Subject`)."""

    asks_double = False
    splits = True
    repeats_samples = False
    loss_is_share = False

    def __init__(self, build: Build, *, name: str, scratch: Path) -> None:
        self.build = build
        self.name = name
        self.scratch = scratch
        self.can_split = False
        self.is_shuffled: bool | None = None

    def variables(self) -> dict[str, Any]:
        return {"the script": variables_of_module(self.build)}

    def open(self, session: Any, setting: Setting) -> LoopTrial:
        return LoopTrial(self, session, setting)


def rows_of(batch: Any) -> BatchRows:
    """Returns the samples of a batch of a user's loop. Their indices are known only for a `Batch` of hpctrain."""
    fields = as_fields(batch)
    num_rows = next((len(t) for t in fields.values() if t.dim()), 0)
    found = batch.indices if isinstance(batch, Batch) else None
    indices = None if found is None else [int(i) for i in found[:num_rows]]
    not_finite = rows_not_finite(fields, num_rows)
    if indices is not None:
        not_finite = [(indices[row], name) for row, name in not_finite]
    return BatchRows(indices=indices, hashes=row_hashes(fields, num_rows), not_finite=not_finite)


@final
class LoopTrial:
    """A short run of a user's training loop for comparison (`Trial`)."""

    def __init__(self, subject: LoopSubject, session: Any, setting: Setting) -> None:
        self.session = session
        self._double = setting.double
        self._subject = subject
        sum_exactly(session)
        seed_generators(setting.seed_change)  # so that a loop without seeds does not differ for that reason
        with self._dtype():
            loop = subject.build(session)
        self._loop = loop if isinstance(loop, OwnLoop) else OwnLoop(**_as_parts(loop))
        updaters = session.trainings.updaters
        if len(updaters) != 1:
            raise UsageError(
                f"the function given to session.check made {len(updaters)} updaters with the session that it is "
                "given: it should make exactly one, by calling distributed_optimizer(model, optimizer) on the "
                "session that is its argument"
            )
        self.updater = updaters[0]
        self.model = session.trainings.model_of(self.updater)
        self.optimizer = self.updater.optimizer
        self.drawing: Axis | None = session.axes.drawing
        self.also = self._loop.also
        check_also(self.also)
        self.is_split = (
            pipeline_of(self.model) is not None or split_of(self.model) is not None or is_sharded(self.model)
        )
        subject.can_split = "micro_batches" in _parameters(self._loop.step)
        subject.is_shuffled = _is_shuffled(self._loop.batches)
        seed_generators(1 + setting.seed_change + 1000 * self.drawing.index)

    @contextlib.contextmanager
    def _dtype(self) -> Iterator[None]:
        """Makes float64 torch's default dtype within the `with` block, if the trial computes in float64."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if self._double else before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def _epoch(self, epoch: int) -> Iterable[Any]:
        batches = self._loop.batches
        if callable(batches):
            return batches(epoch)
        for holder in _with_epochs(batches):
            holder.set_epoch(epoch)
        return batches

    @property
    def has_epochs(self) -> bool:
        return callable(self._loop.batches) or bool(_with_epochs(self._loop.batches))

    @property
    def batches_per_epoch(self) -> int:
        batches = self._loop.batches
        if callable(batches):
            return _UNKNOWN
        try:
            return len(batches) or _UNKNOWN  # type: ignore[arg-type]
        except TypeError:
            return _UNKNOWN

    def batches(self, epoch: int, *, skip: int = 0) -> Iterator[Any]:
        iterator = iter(self._epoch(epoch))
        try:
            yield from itertools.islice(iterator, skip, None)
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    def step(self, batch: Any, *, micro_batches: int = 1) -> float:
        options = {"micro_batches": micro_batches} if self._subject.can_split else {}
        with self._dtype():
            return self._number(self._loop.step(self._cast(batch), **options))

    def _number(self, loss: Any) -> float:
        if loss is None:
            raise UsageError(
                "the step of the checked loop returns no loss: return the mean loss of the batch"
            )
        return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def _cast(self, batch: Any) -> Any:
        return _mapped(batch, lambda t: t.double() if self._double and t.is_floating_point() else t)

    def rows(self, batch: Any) -> BatchRows:
        return rows_of(batch)

    def part(self, batch: Any, rows: Sequence[int]) -> Any:
        return _mapped(batch, lambda t: t[list(rows)] if t.dim() else t)

    def repeated(self, batch: Any, copies: int) -> Any:
        return _mapped(batch, lambda t: t, copies=copies)

    def poisoned(self, batch: Any) -> Any | None:
        found = []

        def poison(tensor: torch.Tensor) -> torch.Tensor:
            if not (tensor.is_floating_point() and tensor.numel()):
                return tensor
            found.append(True)
            tensor = tensor.clone()
            tensor.reshape(-1)[0] = float("nan")
            return tensor

        changed = _mapped(batch, poison)
        return changed if found else None

    def cleaned(self, batch: Any) -> Any:
        return _mapped(batch, lambda t: torch.nan_to_num(t) if t.is_floating_point() else t)

    def loss(self, batch: Any) -> tuple[float, float | None]:
        return self.step(batch), None  # the caller restores everything

    def evaluate(self) -> Mapping[str, float] | None:
        if self._loop.evaluate is None:
            return None
        with self._dtype():
            return {name: float(value) for name, value in self._loop.evaluate().items()}

    def roots(self) -> dict[str, Any]:
        return {
            "model": self.model, "optimizer": self.optimizer, "step": self._loop.step, "also": self.also,
            "evaluate": self._loop.evaluate,
            **self._subject.variables(),
        }  # fmt: skip

    def close(self) -> None:
        """Does nothing, since the session ends the updater."""


def _as_parts(loop: Any) -> dict[str, Any]:
    if not isinstance(loop, tuple) or len(loop) not in (2, 3, 4) or not callable(loop[1]):
        raise UsageError(
            "the function given to session.check should return (batches, step), (batches, step, evaluate) or (batches, "
            f"step, evaluate, also), found {type(loop).__name__}"
            + (f" of {len(loop)}" if isinstance(loop, tuple) else "")
        )
    return dict(zip(("batches", "step", "evaluate", "also"), loop, strict=False))


def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # callables written in C have no signature
        return {}


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor], *, copies: int = 1) -> Any:
    """Returns the batch `value` with `change` applied to each tensor.

    copies: the factor by which `global_samples` of an `hpctrain.Batch` is multiplied.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Batch):
        fields = {name: change(tensor) for name, tensor in value.fields.items()}
        rows = next((len(t) for t in fields.values()), 0)
        return replace(
            value,
            fields=fields,
            num_samples=min(value.num_samples, rows),
            global_samples=value.global_samples * copies,
        )
    if isinstance(value, Mapping):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(inner, change) for inner in value))
    if isinstance(value, tuple | list):
        return type(value)(_mapped(inner, change) for inner in value)
    return value


def _with_epochs(batches: Any) -> list[Any]:
    """Returns `batches`, its samplers and its dataset, as far as they have a `set_epoch` to call before an epoch."""
    holders = [getattr(batches, name, None) for name in ("sampler", "batch_sampler", "dataset")]
    return [holder for holder in [batches, *holders] if callable(getattr(holder, "set_epoch", None))]


def _is_shuffled(batches: Any) -> bool | None:
    """Returns whether a DataLoader's sampler should order each epoch differently; None if unknown."""
    if callable(batches):
        try:
            batches = batches(0)
        except Exception:  # the user's code may raise anything; training with it will show it
            return None
    sampler = getattr(batches, "sampler", None)
    if sampler is None or isinstance(getattr(batches, "dataset", None), torch.utils.data.IterableDataset):
        return None
    shuffles = getattr(sampler, "shuffle", None)
    if shuffles is not None:
        return bool(shuffles)
    if isinstance(sampler, torch.utils.data.SequentialSampler):
        return None
    if type(sampler).__module__.startswith("torch."):
        return True
    try:
        order = list(itertools.islice(iter(copy.copy(sampler)), _LOOKED_AT))
        return None if order == sorted(order) else True
    except Exception:  # the user's code may raise anything
        return None
