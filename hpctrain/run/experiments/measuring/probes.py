"""Probes a model on one rank: what mixes samples, what the loss averages over, where float32 or NaN appears."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.run.experiments.measuring.own_state import GeneratorWatch, NoDropout, OwnState
from hpctrain.run.experiments.measuring.trace import RunTrace, StepTrace, keep
from hpctrain.run.experiments.subject import Trial
from hpctrain.train import capture_generators, restore_generators

MEAN, SUM, WEIGHTED, MIXED, WHOLE = "mean", "sum", "weighted", "mixed", "whole"
_FEW = 8  # number of samples that are copied
_RANK_2 = 1e-12
_LOW = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossFacts:
    """How the loss of a batch follows from the losses of its parts.

    Attributes:
        kind: `mean`: the mean over samples. `sum`: the sum over samples, possibly plus a mean. `weighted`: a mean with
            other weights than the numbers of samples. `mixed`: the sum of two weighted means with different weights.
            `whole`: the loss does not follow from the losses of the parts.
        off: The relative distance of the loss from the mean over samples.
        weights: For `weighted`, the relative weights of two parts with the same number of samples.
        is_weighed: Whether the task gives weights. The mean then uses these weights instead of numbers of samples.
        part_sizes: The numbers of samples of the parts that a step itself computes one after another; () if a step
            computes the batch as one part.
        mixes: The first module whose outputs for some samples depend on other samples of the batch, with its class and
            the relative difference; None: there is no such module.
    """

    kind: str
    off: float = 0.0
    weights: tuple[float, float] | None = None
    mixes: tuple[str, str, float] | None = None
    is_weighed: bool = False
    part_sizes: Sequence[int] = ()


@contextmanager
def unchanged(trial: Trial) -> Iterator[None]:
    """Restores model, optimizer, random generators and the user's other state of `trial` after the `with` block."""
    device = trial.session.device
    tensors = [(t, t.detach().clone()) for t in (*trial.model.parameters(), *trial.model.buffers())]
    gradients = [(p, p.grad) for p in trial.model.parameters()]
    buffers = [(module, dict(module._buffers)) for module in trial.model.modules()]
    modes = {name: module.training for name, module in trial.model.named_modules()}
    generators, own = capture_generators(device), OwnState.of(trial.roots())
    try:
        yield
    finally:
        for module, objects in buffers:  # which forward may replace
            module._buffers.update(objects)
        with torch.no_grad():
            for tensor, before in tensors:
                tensor.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for name, module in trial.model.named_modules():
            module.training = modes.get(name, module.training)
        restore_generators(generators, device=device, otherwise=0)
        changed = OwnState.of(trial.roots()).changed_since(own)
        own.put_into(trial.roots(), changed)


class ModuleOutputs:
    """Records (name, inputs, outputs) of a model's modules, in the order in which the modules return."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.seen: list[tuple[str, list[torch.Tensor], list[torch.Tensor]]] = []

    def __enter__(self) -> ModuleOutputs:
        self._handles = [
            module.register_forward_hook(self._returned(name)) for name, module in self._model.named_modules()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _returned(self, name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            self.seen.append((name, _tensors(args), _tensors(output)))

        return hook


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.detach().double().clone()] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, list | tuple) else []


def probe_loss(
    trial: Trial, batch: Any, *, num_rows: int, tolerance: float, divisions: int
) -> LossFacts | None:
    """Finds how the loss of a batch follows from the losses of its parts, computed from the same state.

    divisions: how many divisions of the batch are tried, at most, to find out what the loss averages over. A division
    into parts that are too similar does not show this. Returns None if the batch has fewer than 3 samples or no
    division has finite losses.
    """
    if num_rows < 3:
        return None
    found: LossFacts | None = None
    for number in range(divisions):
        rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(number)).tolist()
        facts = _divided(trial, batch, sorted(rows) if number == 0 else rows, tolerance=tolerance)
        if facts is not None and facts.kind not in (MEAN, WHOLE):
            return facts
        if facts is not None and (found is None or found.kind == MEAN):
            found = facts
    if found is not None and found.kind == MEAN and divisions > 1:
        return _unequal_parts(trial, batch, found, num_rows=num_rows, tolerance=tolerance)
    return found


def _loss_of(trial: Trial, batch: Any, rows: Sequence[int]) -> tuple[float, float, bool, ModuleOutputs]:
    """Computes the loss of some rows of a batch.

    Returns the loss, its weight (1 if the task gives no weight), whether the task gives a weight, and the outputs of
    the model's modules.
    """
    with unchanged(trial), NoDropout(), ModuleOutputs(trial.model) as outputs:
        loss, weight = trial.loss(trial.part(batch, rows))
        loss = 0.0 if weight == 0 else loss  # a mean over nothing
        return loss, 1.0 if weight is None else weight, weight is not None, outputs


def _unequal_parts(
    trial: Trial, batch: Any, found: LossFacts, *, num_rows: int, tolerance: float
) -> LossFacts:
    """Checks whether a loss that is the mean over parts of equal sizes is also the mean over parts of unequal sizes.

    Returns `found`, or a copy of it with the kind `whole` if it is not.
    """
    more = num_rows // 2 + 1
    full, _, _, outputs = _loss_of(trial, batch, range(num_rows))
    parts = [(rows, *_loss_of(trial, batch, rows)) for rows in (range(more), range(more, num_rows))]
    weights = [weight * (1 if found.is_weighed else len(rows)) for rows, _, weight, *_ in parts]
    mean = sum(weight * part[1] for weight, part in zip(weights, parts, strict=True)) / (sum(weights) or 1.0)
    off = abs(full - mean) / max(abs(full), abs(mean), 1e-30)
    if not math.isfinite(off) or off <= max(1e-9, 100 * tolerance):
        return found
    return replace(found, kind=WHOLE, off=off, part_sizes=_part_sizes(outputs, num_rows))


def _divided(trial: Trial, batch: Any, order: Sequence[int], *, tolerance: float) -> LossFacts | None:
    """Finds how the loss of a batch follows from the losses of three parts; see `probe_loss`.

    order: rows of the batch; each third of them is a part.
    """

    def of(*rows: int) -> tuple[float, float, bool, ModuleOutputs]:
        return _loss_of(trial, batch, rows)

    third = len(order) // 3
    a, b, c = (order[third * number : third * (number + 1)] for number in range(3))
    full, _, is_weighed, full_outputs = of(*a, *b, *c)
    parts = [of(*rows) for rows in (a, b, c)]
    if not all(math.isfinite(loss) for loss in (full, *(part[0] for part in parts))):
        return None
    mixes = _first_mixing(
        trial.model, full_outputs, [outputs for *_, outputs in parts], tolerance=max(1e-9, 100 * tolerance)
    )
    sizes = _part_sizes(full_outputs, 3 * third)

    def facts(kind: str, weights: tuple[float, float] | None = None) -> LossFacts:
        return LossFacts(
            kind=kind, off=off, weights=weights, mixes=mixes, is_weighed=is_weighed, part_sizes=sizes
        )

    of_a, of_b, of_c = (loss for loss, *_ in parts)
    mean = sum(loss * weight for loss, weight, *_ in parts) / (sum(weight for _, weight, *_ in parts) or 1.0)
    scale = max(abs(full), *(abs(x) for x in (of_a, of_b, of_c)), 1e-30)
    off = abs(full - mean) / scale
    accuracy = max(1e-9, 100 * tolerance)
    if off <= accuracy:
        return facts(MEAN)
    of_ab, of_bc, of_ac = of(*a, *b)[0], of(*b, *c)[0], of(*a, *c)[0]
    # For a mean plus a sum, the excess of two parts together over their means is half of what they sum.
    more_of_two = of_ab + of_bc + of_ac - (of_a + of_b + of_c)
    if abs(2 * more_of_two - 3 * (full - (of_a + of_b + of_c) / 3)) / scale <= accuracy:
        return facts(SUM)
    first, second = _ratio(of_ab, of_a, of_b), _ratio(of_bc, of_b, of_c)
    if first is not None and second is not None:
        weight_a, weight_b, weight_c = first * second, second, 1.0
        total = weight_a + weight_b + weight_c
        predicted = (weight_a * of_a + weight_b * of_b + weight_c * of_c) / total
        if abs(predicted - full) / scale <= 1e3 * accuracy:
            return facts(WEIGHTED, weights=(1.0, first))
    few = [*a[:_FEW]], [*b[:_FEW]]
    copies = [of(*few[0], *(few[1] * number))[0] for number in range(1, 9)]
    if tolerance < 1e-9 and _is_sum_of_two_means(copies):
        return facts(MIXED)
    return facts(WHOLE)


def _part_sizes(outputs: ModuleOutputs, num_rows: int) -> tuple[int, ...]:
    """Returns the number of samples in each call of the model, if they add up to `num_rows`; else ()."""
    calls = [values[0] for name, _, values in outputs.seen if not name and values]
    sizes = tuple(t.shape[0] if t.dim() else 0 for t in calls)
    return sizes if len(sizes) > 1 and sum(sizes) == num_rows else ()


def _ratio(both: float, left: float, right: float) -> float | None:
    """Returns the weight of the loss `left` divided by the weight of the loss `right`.

    both: loss of both parts together. If it is not a weighted mean of `left` and `right`, the result is None.
    """
    if both in (left, right) or (both - right) * (left - both) <= 0:
        return None
    ratio = (both - right) / (left - both)
    return ratio if math.isfinite(ratio) else None


def _is_sum_of_two_means(values: Sequence[float]) -> bool:
    """Returns True if the loss is the sum of two means with different weights.

    values: the losses of some samples together with 1, 2, 3, ... copies of other samples. As a function of the number
    of copies, a weighted mean is rational with one pole, and a sum of two means is rational with two poles. For two
    poles, the Loewner matrix of the values has rank 2.
    """
    even, odd = range(0, len(values), 2), range(1, len(values), 2)
    quotients = [[(values[i] - values[j]) / (i - j) for j in odd] for i in even]
    if not all(math.isfinite(q) for row in quotients for q in row):
        return False
    singular = torch.linalg.svdvals(torch.tensor(quotients, dtype=torch.float64))
    largest = max(float(singular[0]), 1e-3 * max(map(abs, values)))
    return largest > 0 and float(singular[2]) <= _RANK_2 * largest


def _first_mixing(
    model: torch.nn.Module, full: ModuleOutputs, parts: Sequence[ModuleOutputs], *, tolerance: float
) -> tuple[str, str, float] | None:
    if len({len(outputs.seen) for outputs in (full, *parts)}) != 1:
        return None
    for number, (name, inputs, outputs) in enumerate(full.seen):
        of_parts = [part.seen[number] for part in parts]
        if any(found[0] != name for found in of_parts):
            return None
        if _apart(inputs, [found[1] for found in of_parts]) > tolerance:
            continue  # its inputs already differ
        apart = _apart(outputs, [found[2] for found in of_parts])
        if apart > tolerance:
            return name or "the model", type(model.get_submodule(name)).__name__, apart
    return None


def _apart(full: Sequence[torch.Tensor], parts: Sequence[Sequence[torch.Tensor]]) -> float:
    """Returns the largest relative difference between tensors and the concatenation of their parts.

    Tensors without samples along dimension 0 count as equal.
    """
    worst = 0.0
    for number, tensor in enumerate(full):
        pieces = [part[number] for part in parts if number < len(part)]
        if len(pieces) != len(parts) or not tensor.dim() or any(p.dim() != tensor.dim() for p in pieces):
            continue
        if sum(p.shape[0] for p in pieces) != tensor.shape[0] or any(
            p.shape[1:] != tensor.shape[1:] for p in pieces
        ):
            continue
        largest = float(tensor.abs().max()) if tensor.numel() else 0.0
        if largest > 0 and math.isfinite(largest):
            worst = max(worst, float((torch.cat(list(pieces)) - tensor).abs().max()) / largest)
    return worst


@dataclass(frozen=True, kw_only=True, slots=True)
class LowPrecision:
    """An operation with float64 operands that computes in a shorter dtype.

    module: the module in whose forward the operation occurs; empty outside all modules.
    is_mixed: whether another operand has the shorter dtype but the result does not.
    """

    module: str
    operation: str
    dtype: str
    is_mixed: bool = False


class _DtypeWalk(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.modules: list[str] = []
        self.is_forward = True
        self.found: list[LowPrecision] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.is_forward and isinstance(output, torch.Tensor):
            given = [t for t in (*args, *(kwargs or {}).values()) if isinstance(t, torch.Tensor)]
            is_low = output.dtype in _LOW and output.dim() > 0
            low = [output] if is_low else [t for t in given if t.dtype in _LOW and "copy" not in str(func)]
            if low and any(t.dtype == torch.float64 for t in given):
                module, dtype = (
                    self.modules[-1] if self.modules else "",
                    str(low[0].dtype).removeprefix("torch."),
                )
                self.found.append(
                    LowPrecision(module=module, operation=str(func), dtype=dtype, is_mixed=not is_low)
                )
        return output


def find_low_precision(trial: Trial, batch: Any) -> list[LowPrecision]:
    """Returns the parameters, buffers and operations of a float64 model that have a shorter dtype.

    Operations are those of one forward of `batch`.

    At most one operation per module is returned.
    """
    found = [
        LowPrecision(module=name, operation="parameter or buffer", dtype=str(t.dtype).removeprefix("torch."))
        for name, t in (*trial.model.named_parameters(), *trial.model.named_buffers())
        if t.dtype in _LOW
    ]
    walk = _DtypeWalk()

    def entered(name: str) -> Callable[..., None]:
        return lambda *_: walk.modules.append(name or "the model itself")

    def left(*_: object) -> None:
        walk.modules.pop()

    def backward_begins(gradient: torch.Tensor) -> None:
        walk.is_forward = False  # a loop's step calls updater and optimizer too

    # FSDP2 does not call hooks of sharded parameters, and updaters refuse them.
    hooked = (p for p in trial.model.parameters() if p.requires_grad and not hasattr(p, "full_tensor"))
    handles: list[Any] = [p.register_hook(backward_begins) for p in hooked]
    for name, module in trial.model.named_modules():
        handles += [module.register_forward_pre_hook(entered(name)), module.register_forward_hook(left)]
    try:
        with unchanged(trial), walk:
            trial.loss(batch)
    finally:
        for handle in handles:
            handle.remove()
    entries = sorted(walk.found, key=lambda entry: entry.is_mixed)
    first = {entry.module: entry for entry in reversed(entries)}
    return [*found, *reversed(first.values())]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationFacts:
    """Results of two evaluations with the same parameters.

    Attributes:
        metrics: The metrics of the first evaluation.
        differs: The metrics that differ in the second evaluation, with the relative difference.
        training: The modules that were in training mode during the evaluation, with their classes.
        draws: The random number generators that forward used.
        changed: The parameters and buffers that the evaluation changed.
        modes: The modules whose mode, training or evaluation, differs after the evaluation.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    differs: Mapping[str, float] = field(default_factory=dict)
    training: Sequence[tuple[str, str]] = ()
    draws: Sequence[str] = ()
    changed: Sequence[str] = ()
    modes: Sequence[str] = ()


# Evaluates a trial twice and observes the effects.


def probe_evaluation(trial: Trial, *, tolerance: float) -> EvaluationFacts | None:
    """Evaluates twice with the same parameters but other generator states.

    Returns None if there is no evaluation. Collective.
    """
    model, training = trial.model, dict[str, str]()

    def entered(module: torch.nn.Module, *_: object) -> None:
        if module.training:
            training.setdefault(names[module], type(module).__name__)

    draws: set[str] = set()
    names = {module: name or "the model" for name, module in model.named_modules()}
    with unchanged(trial):
        before, modes = _state(model), [module.training for module in model.modules()]
        handles: list[Any] = [module.register_forward_pre_hook(entered) for module in model.modules()]
        watch = _Draws(trial, draws)
        handles += [model.register_forward_pre_hook(watch.begin), model.register_forward_hook(watch.end)]
        try:
            first = trial.evaluate()
            if first is None:
                return None
            after, now = _state(model), [module.training for module in model.modules()]
            torch.rand(3), np.random.rand(3), random.random()
            second = trial.evaluate() or {}
        finally:
            for handle in handles:
                handle.remove()
    differs = metrics_apart(first, second, tolerance=tolerance)
    moved = [names[module] for module, a, b in zip(model.modules(), modes, now, strict=True) if a != b]
    return EvaluationFacts(
        metrics=dict(first), differs=differs, training=tuple(training.items()), draws=sorted(draws),
        changed=[name for name, value in after.items() if before[name] != value], modes=moved,
    )  # fmt: skip


def metrics_apart(
    reference: Mapping[str, float], other: Mapping[str, float], *, tolerance: float
) -> dict[str, float]:
    """Returns the metrics of `reference` that differ in `other` or are missing there, with the relative difference.

    The difference is infinite if one of the values is missing or not finite.
    """
    apart = {}
    for name, value in reference.items():
        found = other.get(name)
        if found is not None and (value == found or (math.isnan(value) and math.isnan(found))):
            continue
        relative = math.inf
        if found is not None and math.isfinite(value) and math.isfinite(found):
            relative = abs(value - found) / max(abs(value), abs(found))
        if relative > tolerance:
            apart[name] = relative
    return apart


def _state(model: torch.nn.Module) -> dict[str, int]:
    return dict(keep([*model.named_parameters(), *model.named_buffers()]).hashes)


class _Draws:
    """Collects the generators that the model's forward uses."""

    def __init__(self, trial: Trial, found: set[str]) -> None:
        self._device = trial.session.device
        self._found = found
        self._watch: GeneratorWatch | None = None

    def begin(self, *_: object) -> None:
        self._watch = GeneratorWatch(self._device).__enter__()

    def end(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.__exit__()
            self._found |= self._watch.used


# Finds where NaN or infinities come from, in the records of a trial and in the modules of a model.


_SHOWN = 5


def first_not_finite(trace: RunTrace) -> list[str]:
    """Returns lines of text about what is not finite in the first step with such values; [] if all is finite.

    There is one line each for samples, loss, gradients and buffers, in the order of computation. If a parameter is not
    finite before the first step, one line says so.
    """
    name = _first(trace.initial.values)
    if name is not None:
        return [f"parameter {name} is not finite before the first step"]
    for number, step in enumerate(trace.steps, start=1):
        found = [f"step {number}: {text} is not finite" for text in _of_step(step)]
        if found:
            return found
    return []


def _of_step(step: StepTrace) -> list[str]:
    found = []
    fields: dict[str, list[int]] = {}
    for row, name in step.rows.not_finite:
        fields.setdefault(name, []).append(row)
    numbered = "samples" if step.rows.indices is not None else "rows"
    for name, rows in fields.items():
        found.append(f"field {name} in {_listed(numbered, sorted(rows))}")
    if not math.isfinite(step.loss):
        found.append(f"the loss ({step.loss})")
    gradient = _first(step.own_gradients)
    if gradient is not None:
        found.append(f"the gradient of {gradient}, the first that backward computes so,")
    buffer = _first(step.buffers.values)
    if buffer is not None:
        found.append(f"buffer {buffer}")
    return found


def _listed(what: str, rows: list[int]) -> str:
    more = f" and {len(rows) - _SHOWN} more between {rows[0]} and {rows[-1]}" if len(rows) > _SHOWN else ""
    return f"{what} {', '.join(map(str, rows[:_SHOWN]))}{more}"


def _first(values: Mapping[str, torch.Tensor]) -> str | None:
    return next((name for name, t in values.items() if not bool(t.isfinite().all())), None)


def probe_not_finite(trial: Trial, batch: object) -> str | None:
    """Returns a text that names the first module that returns values that are not finite, for finite inputs.

    The model computes `batch`, which must be finite. If no module does so but the loss is not finite, the text says
    that. Returns None if neither is the case.

    Not collective on one rank. Model, optimizer and data of `trial` are left unchanged.
    """
    with unchanged(trial), NoDropout(), ModuleOutputs(trial.model) as outputs:
        loss, _ = trial.loss(batch)
    for name, inputs, values in outputs.seen:
        if all(bool(t.isfinite().all()) for t in inputs) and not all(
            bool(t.isfinite().all()) for t in values
        ):
            kind = type(trial.model.get_submodule(name)).__name__
            return f"{name or 'the model'} ({kind}) returns values that are not finite, for finite inputs"
    return None if math.isfinite(loss) else f"the loss ({loss}) of finite outputs of the model is not finite"
