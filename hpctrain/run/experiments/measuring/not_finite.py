"""Where NaN or infinities come from: in what was recorded of a trial, and in the modules of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from hpctrain.run.experiments.measuring.probes import ModuleOutputs, unchanged
from hpctrain.run.experiments.measuring.randomness import NoDropout
from hpctrain.run.experiments.measuring.trace import RunTrace, StepTrace
from hpctrain.run.experiments.subject import Trial

_SHOWN = 5


def first_not_finite(trace: RunTrace) -> list[str]:
    """Returns what is not finite in the first step that has such a thing, in the order in which a step computes it:
    a line each for samples, loss, gradients and buffers. Before the first step: the parameters. [] if all is finite."""
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
    """Computes the loss of `batch`, which is finite, and says where that first is not; None if it is finite all over.

    Not collective on one rank. Nothing of the trial changes.
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
