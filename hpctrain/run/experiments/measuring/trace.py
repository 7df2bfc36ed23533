"""What a trial did, step by step: losses, samples, gradients, parameters, buffers, random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from hpctrain.run.experiments.measuring.randomness import GeneratorWatch
from hpctrain.run.experiments.subject import Rows, Trial

# Elements of a tensor that are kept for comparison, evenly spaced; hashes are of all.
MAX_KEPT = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Tensors at one moment, by name. values: up to MAX_KEPT elements in float64, flat. hashes: of all bytes."""

    values: Mapping[str, torch.Tensor]
    hashes: Mapping[str, int]


@dataclass(kw_only=True, slots=True)
class StepTrace:
    """One step on this rank. parameters_before, gradients: when the optimizer was called, after the sum over the ranks.

    own_gradients: this rank's own, as backward computed them, summed over its backward passes. draws: generators that
    forward or backward used. options: of the optimizer's groups. None or empty where the optimizer was not called
    because the step was skipped.
    """

    loss: float
    rows: Rows
    parameters_before: Kept | None = None
    gradients: Kept | None = None
    own_gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    parameters: Kept
    buffers: Kept
    options: list[dict[str, Any]] = field(default_factory=list)
    draws: frozenset[str] = frozenset()

    @property
    def applied(self) -> bool:
        return self.parameters_before is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An error that ended a trial in a step (from 1; 0: while it was built). agreed: every rank raised it."""

    kind: str
    text: str
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """What a step left that ended with an error; before, gradients and options as in `StepTrace`."""

    before: Kept | None
    gradients: Kept | None
    options: list[dict[str, Any]]
    parameters: Kept


@dataclass(kw_only=True, slots=True)
class RunTrace:
    """initial: parameters before the first step. unfinished: of the step that failed."""

    initial: Kept
    steps: list[StepTrace] = field(default_factory=list)
    failure: Failure | None = None
    unfinished: Unfinished | None = None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor without its graph; of a sharded one all of it, for which all ranks must call this."""
    tensor = tensor.detach()
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Returns up to MAX_KEPT elements, evenly spaced, as a copy in float64 on the CPU, flat."""
    flat = (tensor.to_dense() if tensor.layout != torch.strided else tensor).reshape(-1)
    stride = -(-flat.numel() // MAX_KEPT)
    return flat[:: max(1, stride)].to(device="cpu", dtype=torch.float64, copy=True)


def keep(named: Iterable[tuple[str, torch.Tensor]]) -> Kept:
    """Keeps floating-point and integer tensors for comparison."""
    values, hashes = {}, {}
    for name, tensor in named:
        full = whole(tensor)
        if full.is_complex():
            full = torch.view_as_real(full)
        values[name] = sampled(full)
        raw = full.to("cpu").contiguous().reshape(-1).view(torch.uint8)
        hashes[name] = xxhash.xxh3_64_intdigest(raw.numpy().data)
    return Kept(values=values, hashes=hashes)


class StepRecorder:
    """Records the steps of a trial, by hooks of its optimizer and parameters. Used as a context manager."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._parameters = [(name, p) for name, p in trial.model.named_parameters() if p.requires_grad]
        self.trace = RunTrace(initial=keep(trial.model.named_parameters()))
        self._own: dict[str, torch.Tensor] = {}
        self._before: Kept | None = None
        self._gradients: Kept | None = None
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
        """The block trains one step on `batch`, and appends its loss to the list."""
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
