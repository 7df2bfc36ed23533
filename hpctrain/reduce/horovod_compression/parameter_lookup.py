"""Which parameter a tensor that Horovod hands to a compression is the gradient of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch

from hpctrain.errors import UsageError


@final
class GradientOwners:
    """Finds a parameter's name by its gradient.

    Horovod compresses `p.grad` itself, one parameter at a time, in an order that differs between ranks where
    parameters are unused, and the gradients are other tensors in each step. So a parameter is known by
    `p.grad is tensor`. Which one came next in the step before is tried first: looking through all of them each
    time would take a time that grows with the square of their number.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._parameters = dict(named_parameters)
        if not self._parameters:
            raise UsageError(
                "the compression got no named parameters: give it model.named_parameters(). A generator that "
                "was used before is empty"
            )
        self._next_after: dict[str, str] = {}
        self._last = ""

    def names(self) -> list[str]:
        return list(self._parameters)

    def parameter(self, name: str) -> torch.Tensor:
        return self._parameters[name]

    def owner_of(self, gradient: torch.Tensor) -> str:
        """UsageError when it is no parameter's gradient."""
        guess = self._next_after.get(self._last)
        if guess is None or self._parameters[guess].grad is not gradient:
            guess = next((n for n, p in self._parameters.items() if p.grad is gradient), None)
            if guess is None:
                raise UsageError(
                    f"Horovod gave a tensor of shape {tuple(gradient.shape)} that is the gradient of none of the "
                    f"compression's {len(self._parameters)} named parameters. Give the compression the parameters "
                    "of the whole model; op=hvd.Adasum and sparse_as_dense=True cannot be used with it"
                )
            self._next_after[self._last] = guess
        self._last = guess
        return guess
