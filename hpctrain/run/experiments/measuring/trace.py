"""Records trials step by step (losses, samples, gradients, parameters, buffers, random numbers), and compares trials.

A trial is one run of the checked training, for a few steps, under chosen conditions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import xxhash

from hpctrain.run.experiments.measuring.own_state import GeneratorWatch
from hpctrain.run.experiments.subject import BatchRows, Trial

# The number of evenly spaced elements of a tensor that are kept for comparison; hashes cover all elements.
MAX_KEPT = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSample:
    """Tensors at one moment, by name.

    values: up to MAX_KEPT elements of each tensor, flat, float64.
    hashes: a hash of all bytes of each tensor.
    """

    values: Mapping[str, torch.Tensor]
    hashes: Mapping[str, int]


@dataclass(kw_only=True, slots=True)
class StepTrace:
    """One step, on this rank, of a trial: a short run of the checked training.

    Attributes:
        parameters_before: The parameters when the optimizer was called; None if the step was skipped.
        gradients: The gradients when the optimizer was called, after the sum over the ranks; None if the step was
            skipped.
        own_gradients: This rank's gradients as backward computed them, summed over its backward passes.
        options: The options of the optimizer's groups; empty if the step was skipped.
        parameters: The parameters after the step.
        buffers: The buffers after the step.
        draws: The generators that forward or backward used.
    """

    loss: float
    rows: BatchRows
    parameters_before: TensorSample | None = None
    gradients: TensorSample | None = None
    own_gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    parameters: TensorSample
    buffers: TensorSample
    options: list[dict[str, Any]] = field(default_factory=list)
    draws: frozenset[str] = frozenset()

    @property
    def applied(self) -> bool:
        return self.parameters_before is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An error that ended a trial, which is a short run of the checked training.

    kind: the name of the error's class.
    step: the step, from 1; 0: while the trial's model and optimizer were built.
    """

    kind: str
    text: str
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """The state after a step that ended with an error.

    before: the parameters when the optimizer was called; None if it was not called.
    gradients: the gradients when the optimizer was called; None if it was not called.
    options: the options of the optimizer's groups when it was called, or after the error if it was not called.
    parameters: the parameters after the error.
    """

    before: TensorSample | None
    gradients: TensorSample | None
    options: list[dict[str, Any]]
    parameters: TensorSample


@dataclass(kw_only=True, slots=True)
class RunTrace:
    """The record of a trial, which is a short run of the checked training.

    initial: the parameters before the first step.
    failure: the error that ended the trial, if any.
    unfinished: the state after the step that failed.
    """

    initial: TensorSample
    steps: list[StepTrace] = field(default_factory=list)
    failure: Failure | None = None
    unfinished: Unfinished | None = None


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, detached. Collective for a sharded tensor, which is gathered."""
    tensor = tensor.detach()
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Returns up to MAX_KEPT evenly spaced elements as a flat float64 copy on the CPU."""
    flat = (tensor.to_dense() if tensor.layout != torch.strided else tensor).reshape(-1)
    stride = -(-flat.numel() // MAX_KEPT)
    return flat[:: max(1, stride)].to(device="cpu", dtype=torch.float64, copy=True)


def keep(named: Iterable[tuple[str, torch.Tensor]]) -> TensorSample:
    """Returns a copy of some elements, and a hash, of each tensor, for later comparison.

    named: the tensors with their names.
    """
    values, hashes = {}, {}
    for name, tensor in named:
        full = gather_whole(tensor)
        if full.is_complex():
            full = torch.view_as_real(full)
        values[name] = sampled(full)
        raw = full.to("cpu").contiguous().reshape(-1).view(torch.uint8)
        hashes[name] = xxhash.xxh3_64_intdigest(raw.numpy().data)
    return TensorSample(values=values, hashes=hashes)


class StepRecorder:
    """Records the steps of a trial (a short training) with hooks on optimizer and parameters. A context manager."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._parameters = [(name, p) for name, p in trial.model.named_parameters() if p.requires_grad]
        self.trace = RunTrace(initial=keep(trial.model.named_parameters()))
        self._own: dict[str, torch.Tensor] = {}
        self._before: TensorSample | None = None
        self._gradients: TensorSample | None = None
        self._options: list[dict[str, Any]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> StepRecorder:
        self._handles.append(self._trial.optimizer.register_step_pre_hook(self._optimizer_called))
        for name, parameter in self._parameters:
            if not hasattr(parameter, "full_tensor"):  # the pieces of sharded ones come and go
                self._handles.append(parameter.register_hook(self._adds(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _adds(self, name: str) -> Any:
        def add(gradient: torch.Tensor) -> None:
            found = sampled(gradient)
            self._own[name] = self._own[name] + found if name in self._own else found

        return add

    def _optimizer_called(self, *_: object) -> None:
        named = self._trial.model.named_parameters()
        self._before = keep(named)
        gradients = ((name, p.grad) for name, p in self._parameters)
        self._gradients = keep((name, grad) for name, grad in gradients if grad is not None)
        self._options = self._current_options()

    def unfinished(self) -> Unfinished:
        """Returns what is known of a step that ended with an error."""
        options = self._options or self._current_options()
        parameters = keep(self._trial.model.named_parameters())
        return Unfinished(
            before=self._before, gradients=self._gradients, options=options, parameters=parameters
        )

    def _current_options(self) -> list[dict[str, Any]]:
        return [
            {key: _plain(value) for key, value in group.items() if key != "params"}
            for group in self._trial.optimizer.param_groups
        ]

    @contextmanager
    def step(self, batch: Any) -> Iterator[list[float]]:
        """Records the step that the `with` block trains on `batch`. The block appends the loss to the yielded list."""
        self._own, self._before, self._gradients, self._options = {}, None, None, []
        rows = self._trial.rows(batch)
        losses: list[float] = []
        with GeneratorWatch(self._trial.session.device) as watch:
            yield losses
        self._trial.updater.wait_for_parameters()
        self.trace.steps.append(
            StepTrace(
                loss=losses[0], rows=rows, parameters_before=self._before, gradients=self._gradients,
                own_gradients=self._own, parameters=keep(self._trial.model.named_parameters()),
                buffers=keep(self._trial.model.named_buffers()), options=self._options, draws=watch.used,
            )
        )  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | bool) or value is None else type(value).__name__


# Compares two traces of a training. Pure.


# In the order in which a step computes them.
KINDS = ("initial", "samples", "loss", "gradient", "option", "parameter", "buffer")
# A gradient below this share of the largest one is mostly rounding, which optimizers like Adam enlarge.
_NOISE = 1e-5
# Such rounding moves running statistics too: the bias of a convolution before a batch norm has the gradient 0.
_NOISE_ALLOWED = 1e-7


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDifference:
    """The first difference of one kind between two trials, which are short runs of the checked training.

    Attributes:
        kind: What differs, such as `loss` or `gradient`; one of `KINDS`.
        step: The step, from 1; 0: before the first step.
        tensor: The tensor or other value that differs.
        relative: The difference relative to the largest value of the tensor; for a gradient, of all gradients.
        worst: The largest relative difference in any step.
    """

    kind: str
    step: int
    tensor: str
    relative: float
    absolute: float
    worst: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialComparison:
    """The comparison of a trial (a short training) with a reference trial that should give the same results.

    Attributes:
        first: The first difference of each kind.
        worst: The largest relative difference, even if below the tolerance.
        factor: The common factor of all gradients of the first step, relative to the reference; None if they have no
            common factor.
        failure: Text of the error that ended the trial but not the reference; None if no such error occurred.
        steps: The number of steps of the trial.
        applied: The number of steps in which the trial called the optimizer.
        expected: The number of steps in which the reference called the optimizer.
    """

    first: Mapping[str, FirstDifference]
    worst: float
    factor: float | None = None
    failure: str | None = None
    failed_step: int = 0
    steps: int = 0
    applied: int = 0
    expected: int = 0

    @property
    def equal(self) -> bool:
        return not self.first and self.failure is None

    @property
    def earliest(self) -> FirstDifference | None:
        """The difference in the earliest step and, within that step, in the value that is computed first.

        None if all is equal.
        """
        found = sorted(self.first.values(), key=lambda d: (d.step, KINDS.index(d.kind)))
        return found[0] if found else None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "equal": self.equal}

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> TrialComparison:
        first = {kind: FirstDifference(**found) for kind, found in value["first"].items()}
        return cls(
            first=first, worst=value["worst"], factor=value["factor"], failure=value["failure"],
            failed_step=value["failed_step"], steps=value["steps"], applied=value["applied"],
            expected=value["expected"],
        )  # fmt: skip


class _Found:
    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.first: dict[str, FirstDifference] = {}
        self.worst = 0.0

    def add(self, kind: str, step: int, tensor: str, *, absolute: float, scale: float) -> None:
        if math.isnan(absolute):
            absolute = math.inf
        relative = 0.0 if absolute == 0 else absolute / scale if scale > 0 else math.inf
        self.worst = max(self.worst, relative)
        if relative <= self.tolerance:
            return
        known = self.first.get(kind)
        if known is None or (known.step == step and relative > known.relative):
            worst = max(relative, known.worst if known else 0.0)
            self.first[kind] = FirstDifference(
                kind=kind, step=step, tensor=tensor, relative=relative, absolute=absolute, worst=worst
            )
        elif relative > known.worst:
            self.first[kind] = FirstDifference(**{**asdict(known), "worst": relative})


def compare_traces(
    reference: RunTrace, other: RunTrace, *, tolerance: float, samples: bool = True, from_step: int = 1
) -> TrialComparison:
    """Compares two traces, which are records of two trials on one rank.

    Args:
        tolerance: The largest relative difference that counts as equal.
        samples: Whether this rank should get the same samples in both traces.
        from_step: The step of `reference` that corresponds to the first step of `other`.
    """
    found = _Found(tolerance)
    if from_step == 1:
        _compare_kept(found, "initial", 0, reference.initial, other.initial)
    noisy: dict[str, torch.Tensor] = {}
    factor, excused = None, False
    for number, mine in enumerate(other.steps, start=from_step):
        if number > len(reference.steps):
            break
        theirs = reference.steps[number - 1]
        if samples and theirs.rows.names() != mine.rows.names():
            found.add("samples", number, "the samples", absolute=1.0, scale=1.0)
        found.add(
            "loss",
            number,
            "the loss",
            absolute=_distance(theirs.loss, mine.loss),
            scale=abs(theirs.loss) or 1.0,
        )
        if theirs.gradients is not None and mine.gradients is not None:
            _compare_gradients(found, number, theirs.gradients, mine.gradients, noisy)
            if number == from_step:
                factor = factor_between(theirs.gradients.values, mine.gradients.values)
        elif (theirs.gradients is None) != (mine.gradients is None):
            found.add(
                "gradient", number, "all (the step is skipped in one of the two)", absolute=1.0, scale=1.0
            )
        _compare_options(found, number, theirs.options, mine.options)
        excused |= _compare_kept(found, "parameter", number, theirs.parameters, mine.parameters, noisy)
        allowed = _NOISE_ALLOWED if excused else 0.0
        _compare_kept(found, "buffer", number, theirs.buffers, mine.buffers, allowed=allowed)
    failure = other.failure if reference.failure is None else None
    same_steps = reference.steps[from_step - 1 : from_step - 1 + len(other.steps)]
    return TrialComparison(
        steps=len(other.steps), applied=sum(step.applied for step in other.steps),
        expected=sum(step.applied for step in same_steps),
        first=found.first, worst=found.worst, factor=factor,
        failure=f"{failure.kind}: {failure.text}" if failure else None, failed_step=failure.step if failure else 0,
    )  # fmt: skip


def _distance(a: float, b: float) -> float:
    return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b)


def _apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns |a - b| per element; 0 where both are NaN or the same infinity."""
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, torch.zeros_like(a), (a - b).abs())


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _compare_kept(
    found: _Found,
    kind: str,
    step: int,
    reference: TensorSample,
    other: TensorSample,
    noisy: Mapping[str, torch.Tensor] | None = None,
    *,
    allowed: float = 0.0,
) -> bool:
    """Adds the differences of two sets of tensors to `found`. Returns True if a difference was ignored as rounding.

    noisy: for each tensor, a mask of the elements in which a relative difference up to `_NOISE_ALLOWED` is ignored.
    allowed: the relative difference that is ignored in all elements.
    """
    excused = False
    least = 1e-3 * max((_largest(t) for t in reference.values.values()), default=0.0)
    for name, mine in other.values.items():
        theirs = reference.values.get(name)
        if theirs is None or theirs.shape != mine.shape or reference.hashes[name] == other.hashes[name]:
            continue
        apart, scale = _apart(theirs, mine), max(_largest(theirs), least) or 1.0
        noise = (noisy or {}).get(name)
        if noise is not None and noise.shape == apart.shape:
            small = noise & (apart <= _NOISE_ALLOWED * scale)
            excused |= bool((small & (apart > 0)).any())
            apart = torch.where(small, torch.zeros_like(apart), apart)
        apart = torch.where(apart <= allowed * scale, torch.zeros_like(apart), apart)
        found.add(kind, step, name, absolute=float(apart.max()) if apart.numel() else 0.0, scale=scale)
    return excused


def _compare_gradients(
    found: _Found, step: int, reference: TensorSample, other: TensorSample, noisy: dict[str, torch.Tensor]
) -> None:
    scale = max((_largest(t) for t in reference.values.values()), default=0.0)
    for name, theirs in reference.values.items():
        small = theirs.abs() < _NOISE * scale
        noisy[name] = small | noisy[name] if name in noisy else small
        mine = other.values.get(name)
        if mine is not None and mine.shape == theirs.shape and reference.hashes[name] != other.hashes[name]:
            apart = _apart(theirs, mine)
            found.add(
                "gradient",
                step,
                name,
                absolute=float(apart.max()) if apart.numel() else 0.0,
                scale=scale or 1.0,
            )


def _compare_options(
    found: _Found, step: int, reference: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]
) -> None:
    """Compares the options of the optimizer's groups in steps in which both runs called the optimizer."""
    for theirs, mine in zip(reference, other, strict=False):
        for name, value in theirs.items():
            now = mine.get(name)
            if now == value:
                continue
            is_number = isinstance(value, int | float) and isinstance(now, int | float)
            absolute, scale = (abs(value - now), abs(value) or 1.0) if is_number else (1.0, 1.0)
            found.add("option", step, f"{name} ({now} instead of {value})", absolute=absolute, scale=scale)


def factor_between(
    reference: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], *, accuracy: float = 1e-9
) -> float | None:
    """Returns c if `other` equals c times `reference` over all tensors, within `accuracy` of the norm; else None."""
    residual = collinearity(reference, other)
    return residual.factor if residual is not None and residual.relative <= accuracy else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """The distance of tensors from the closest multiple of a reference.

    Attributes:
        factor: The factor of that multiple.
        relative: The norm of the difference, relative to the norm of the tensors.
        tensor: The tensor that differs most.
    """

    factor: float
    relative: float
    tensor: str


def collinearity(reference: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> Residual | None:
    """Returns how far `other` is from a multiple of `reference`; None if the two cannot be compared."""
    names = [n for n, t in reference.items() if n in other and other[n].shape == t.shape]
    square = sum(float((reference[n] * reference[n]).sum()) for n in names)
    norm = math.sqrt(sum(float((other[n] * other[n]).sum()) for n in names))
    if not square > 0 or not norm > 0 or not math.isfinite(square + norm):
        return None
    factor = sum(float((reference[n] * other[n]).sum()) for n in names) / square
    rests = {n: float((other[n] - factor * reference[n]).norm()) for n in names}
    worst = max(rests, key=lambda n: rests[n])
    return Residual(
        factor=factor, relative=math.sqrt(sum(r * r for r in rests.values())) / norm, tensor=worst
    )


def merge(by_rank: Sequence[TrialComparison]) -> TrialComparison:
    """Merges the comparisons of all ranks into one: the earliest difference of each kind, and the largest values."""
    first: dict[str, FirstDifference] = {}
    for found in by_rank:
        for kind, difference in found.first.items():
            known = first.get(kind)
            if known is None:
                first[kind] = difference
                continue
            chosen = min((known, difference), key=lambda d: (d.step, -d.relative))
            worst = max(known.worst, difference.worst)
            first[kind] = FirstDifference(**{**asdict(chosen), "worst": worst})
    failed = next((found for found in by_rank if found.failure is not None), None)
    factors = {found.factor for found in by_rank}
    return TrialComparison(
        first=first, worst=max(found.worst for found in by_rank), steps=max(found.steps for found in by_rank),
        applied=max(found.applied for found in by_rank), expected=max(found.expected for found in by_rank),
        factor=by_rank[0].factor if None not in factors else None,
        failure=failed.failure if failed else None, failed_step=failed.failed_step if failed else 0,
    )  # fmt: skip


def with_losses(trace: RunTrace, losses: Sequence[float]) -> RunTrace:
    """Returns the record `trace` of a trial with the loss of each step replaced by the loss over all ranks.

    losses: the loss over all ranks, by step.
    """

    steps: list[StepTrace] = [
        replace(step, loss=loss) for step, loss in zip(trace.steps, losses, strict=True)
    ]
    return RunTrace(initial=trace.initial, steps=steps, failure=trace.failure)
