"""Hides the gradients of split layers between backward and `step`, which sums them: until then a rank has those of its
own samples and layers alone, and a script that clipped them would train another model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch

from hpctrain.errors import GradientsInUse
from hpctrain.reduce.data_parallel.pending_gradient import NOT_READABLE_SPLIT, PendingGradient


@final
class HiddenGradients:
    """Hides the gradients of `parameters`, and gives them back. Does not communicate.

    While they are hidden every use of a `.grad` raises GradientsInUse, as does `optimizer.step`; another backward adds
    to the hidden gradients. A backward outside of a `given_back` block hides them when it ends.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], *, optimizer: torch.optim.Optimizer) -> None:
        self._parameters = list(parameters)
        self._pending = [PendingGradient(p, words=NOT_READABLE_SPLIT) for p in self._parameters]
        self._paused = False
        self._task = -1  # the backward at whose end they are hidden
        # A split parameter's own operations refuse a gradient that is not split, in words of another cause.
        self._hooks = [optimizer.register_step_pre_hook(self._refuse_step)]
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(self._gradient_is_there)
            for parameter in self._parameters
        ]

    @contextmanager
    def given_back(self, *, hides: bool = True) -> Iterator[None]:
        """In the block each `.grad` is the real gradient. hides: whether the end of the block hides them again."""
        self.give_back()
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
            if hides:
                self._hide()

    def give_back(self, *, summed: bool = False) -> None:
        """Makes each `.grad` the gradient again; one that the script has set to None stays None. summed: whether some
        are being summed, so that none may be missing. Raises GradientsInUse for a `.grad` that was replaced."""
        pairs = list(zip(self._parameters, self._pending, strict=True))
        changed = [p for p, pending in pairs if pending.held is not None and p.grad is not pending]
        if any(p.grad is not None or summed for p in changed):
            raise GradientsInUse(NOT_READABLE_SPLIT)
        for parameter, pending in pairs:
            if parameter.grad is pending:
                parameter.grad = pending.held
            pending.held = None

    def end(self) -> None:
        """Gives each parameter the gradient that was hidden, also if the script has dropped or replaced it."""
        for parameter, pending in zip(self._parameters, self._pending, strict=True):
            if pending.held is not None:
                parameter.grad, pending.held = pending.held, None

    def close(self) -> None:
        self.end()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hide(self) -> None:
        for parameter, pending in zip(self._parameters, self._pending, strict=True):
            gradient = parameter.grad
            if gradient is None:
                pending.held = None
            elif gradient is not pending:
                # After create_graph=True it has a graph.
                pending.held = gradient.detach() if gradient.requires_grad else gradient
                parameter.grad = pending

    def _refuse_step(self, *_: object) -> None:
        if any(pending.held is not None for pending in self._pending):
            raise GradientsInUse(NOT_READABLE_SPLIT)

    def _gradient_is_there(self, _: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if not self._paused and task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._hide)
