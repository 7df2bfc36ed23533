"""Whether code draws random numbers, and dropout that does nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hpctrain.train import capture_generators

_DROPOUTS = frozenset({
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
    functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout, torch.dropout_,
    torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
})  # fmt: skip


class GeneratorWatch:
    """Finds which of the process's generators (torch, numpy, python, cuda) the block uses: `used`, after it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: Mapping[str, torch.Tensor] = {}
        self.used: frozenset[str] = frozenset()

    def __enter__(self) -> GeneratorWatch:
        self._before = capture_generators(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        after = capture_generators(self._device)
        changed = (name for name, state in after.items() if not torch.equal(state, self._before[name]))
        self.used = frozenset(changed)


class NoDropout(TorchFunctionMode):
    """Within the block dropout, also that of attention, returns its input, and draws nothing."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def is_generator(value: object) -> bool:
    """True for a generator that code of the user's may hold."""
    kinds = (
        np.random.Generator,
        np.random.RandomState,
        np.random.BitGenerator,
        random.Random,
        torch.Generator,
    )
    return isinstance(value, kinds)


def generator_state(value: Any) -> Any:
    """Returns a copy of the state of such a generator."""
    if isinstance(value, torch.Generator):
        return tuple(value.get_state().tolist())
    if isinstance(value, np.random.Generator):
        return copy.deepcopy(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return copy.deepcopy(value.get_state())
    if isinstance(value, np.random.BitGenerator):
        return copy.deepcopy(value.state)
    return value.getstate()


def set_generator(value: Any, state: Any) -> None:
    """Gives a generator a state that `generator_state` returned."""
    if isinstance(value, torch.Generator):
        value.set_state(torch.tensor(state, dtype=torch.uint8))
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    elif isinstance(value, np.random.BitGenerator):
        value.state = state
    else:
        value.setstate(state)


def draw(value: Any, times: int) -> None:
    """Draws so many numbers from such a generator."""
    for _ in range(times):
        if isinstance(value, torch.Generator):
            torch.rand(1, generator=value, device=value.device)
        elif isinstance(value, np.random.BitGenerator):
            value.random_raw()
        elif isinstance(value, np.random.RandomState):
            value.random_sample()
        else:
            value.random()
