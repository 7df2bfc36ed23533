"""Evaluates a trial twice and watches what that does."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hpctrain.run.experiments.measuring.probes import EvaluationFacts, unchanged
from hpctrain.run.experiments.measuring.randomness import GeneratorWatch
from hpctrain.run.experiments.measuring.trace import keep
from hpctrain.run.experiments.subject import Trial


def probe_evaluation(trial: Trial, *, tolerance: float) -> EvaluationFacts | None:
    """Evaluates twice, from the same parameters but other states of the generators. Collective. None without one."""
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
    """Returns the metrics of `reference` that `other` lacks or has otherwise, with the relative difference; infinite
    where one of the two is not finite."""
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
