"""Exponential moving averages of a model's parameters, for whole models and for models that are split over the ranks.

Source: Polyak and Juditsky 1992, doi:10.1137/0330046; the recursion is that of torch's `get_ema_multi_avg_fn`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch

from hpctrain.distributed import local_part
from hpctrain.errors import UsageError

_UPDATES = "n_averaged"  # names of entries in AveragedModel
_MODULE = "module."
_HALF = (torch.float16, torch.bfloat16)


@final
class Ema:
    """The exponential moving averages of a model's parameters. Does not communicate.

    At each update, average = decay * average + (1 - decay) * parameter; the first update copies the parameters. Each
    rank averages the parameters that the rank holds: whole tensors, or parts of tensors (FSDP2, split layers, pipeline
    stages). Averages have the dtypes of the parameters, but float32 for half-precision parameters, since bfloat16 would
    round small changes away. Buffers are not averaged: the averaged model has the buffers of the model.

    Create the `Ema` after `parallelize`. In a training loop of your own, create it after the updater too.

    Args:
        model: The model.
        decay: The weight of the old average, between 0 and 1.

    Attributes:
        num_updates: The number of updates so far.

    Raises:
        UsageError: If `decay` is not between 0 and 1.
    """

    def __init__(self, model: torch.nn.Module, *, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise UsageError(
                f"the decay of an average is {decay}: give a number between 0 and 1, such as 0.999"
            )
        self.decay = decay
        self.num_updates = 0
        self._model = model
        # Not looked up later: within a step FSDP2 has other objects in the modules.
        self._parameters = dict(model.named_parameters())
        self._averages = {name: _wide(p.detach()).clone() for name, p in self._parameters.items()}
        names = {id(p): name for name, p in self._parameters.items()}
        # A parameter of several names is averaged once.
        self._names = {
            name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if id(p) in names
        }

    @torch.no_grad()
    def update(self) -> None:
        """Updates the averages from the current parameters. Call it after each step that was applied.

        With a sharded optimizer, call `updater.wait_for_parameters()` before.
        """
        pairs = [(local_part(self._averages[name]), local_part(p)) for name, p in self._parameters.items()]
        pairs = [(average, now.to(average.dtype)) for average, now in pairs]
        averaged = [(average, now) for average, now in pairs if self.num_updates and _is_averaged(average)]
        for dtype in dict.fromkeys(average.dtype for average, _ in averaged):
            chosen = [(average, now) for average, now in averaged if average.dtype == dtype]
            torch._foreach_lerp_([a for a, _ in chosen], [now for _, now in chosen], 1 - self.decay)
        for average, now in pairs:
            if not (self.num_updates and _is_averaged(average)):
                average.copy_(now)
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Gives the model the averages as parameters inside the `with` block, for evaluation.

        Every rank must enter the block.

        Before the first update the model keeps its parameters. Do not train inside the block. Evaluate a model with
        sharded parameters under `torch.no_grad()`.
        """
        if not self.num_updates:
            yield
            return
        before = {name: local_part(p.detach()).clone() for name, p in self._parameters.items()}
        self._put(self._averages)
        try:
            yield
        finally:
            self._put(before)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of the model's state dict, with the averages instead of the parameters."""
        entries = {}
        for name, value in self._model.state_dict().items():
            entries[name] = self._averages[self._names[name]] if name in self._names else value
        return {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], *, num_updates: int) -> None:
        """Restores averages that `tensors` returned.

        Args:
            tensors: The averages by parameter name.
            num_updates: The number of updates from which the averages were computed.

        Raises:
            KeyError: An average is missing. Nothing is changed.
        """
        found = {name: tensors[name] for name in self._averages}
        for name, average in self._averages.items():
            local_part(average).copy_(local_part(found[name]))
        self.num_updates = num_updates

    def begin_again(self) -> None:
        """Restarts the averages: the next update copies the parameters."""
        self.num_updates = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages under the names of `torch.optim.swa_utils.AveragedModel`."""
        count = torch.tensor(self.num_updates, dtype=torch.int64)
        return {_UPDATES: count, **{f"{_MODULE}{name}": tensor for name, tensor in self.tensors().items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a `state_dict` of this class, or of an AveragedModel of the same model."""
        under = {name[len(_MODULE) :]: t for name, t in state_dict.items() if name.startswith(_MODULE)}
        self.load(under, num_updates=int(state_dict[_UPDATES]))

    @torch.no_grad()
    def _put(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            local_part(parameter.detach()).copy_(local_part(values[name]))


def _is_averaged(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
