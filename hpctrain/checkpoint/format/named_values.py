"""Values of any type, such as a module's extra state, as named tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch

from hpctrain.checkpoint.format.state import SEPARATOR, FromRank0, Item, tensor_items
from hpctrain.checkpoint.format.typed_values import Path, as_text, decode, encode, from_text
from hpctrain.errors import CheckpointError

# After the name of a value that is no tensor: the tensor of its JSON.
TEXT = f"{SEPARATOR}json"


def value_items(
    name: str,
    value: Any,
    *,
    where: str,
    items_of: Callable[[str, torch.Tensor], list[Item]] = tensor_items,
    taken: Container[str] = (),
) -> tuple[Any, list[Item]]:
    """Returns the JSON of a value, as `encode` does, and the items of its tensors, named `name` + their keys.

    items_of: makes the items of a tensor of this name. taken: names that they must not have. Raises CheckpointError for
    a value that cannot be stored.
    """
    items: list[Item] = []
    names: set[str] = set()

    def put(path: Path, tensor: torch.Tensor) -> str:
        own = first = name + SEPARATOR.join(path)
        number = 1
        while own in names or own in taken:  # keys 1 and "1", for example
            number += 1
            own = f"{first}{SEPARATOR}{number}"
        names.add(own)
        items.extend(items_of(own, tensor))
        return own

    return encode(value, put=put, where=where), items


def value_from(encoded: Any, tensors: Mapping[str, torch.Tensor], *, where: str, present: Any = None) -> Any:
    """Returns the value of which `value_items` made the JSON `encoded`. tensors: by name. present: see `decode`.

    Raises CheckpointError if it is invalid or lacks a tensor.
    """

    def get(name: Any) -> torch.Tensor:
        if name not in tensors:
            raise CheckpointError(f"{where}: its tensor {name!r:.200} is not in the checkpoint")
        return tensors[name]

    return decode(encoded, get=get, where=where, present=present)


def model_items(model: torch.nn.Module, *, prefix: str = "") -> list[Item]:
    """Returns the entries of `model.state_dict()`, each named `prefix` + key: parameters as `tensor_items` has them,
    everything else (buffers, such as running statistics) as `FromRank0`. The tensors share memory with the model.

    An entry that is no tensor, such as a module's extra state, becomes a tensor `prefix` + key + `::json` and the
    tensors in it; `model_state` makes it from them. Raises CheckpointError for one that cannot be stored.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    items: list[Item] = []
    for name, value in model.state_dict().items():
        own = f"{prefix}{name}"
        if name in parameters:
            items += tensor_items(own, value)
        elif isinstance(value, torch.Tensor):
            items += _from_rank_0(own, value)
        else:
            items += _value_of_model(own, value, where=f"{name!r} of the model's state")
    return items


def model_state(
    tensors: Mapping[str, torch.Tensor], *, present: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the state dict of which `model_items` made these tensors, by their names without the prefix.

    present: the model's own state dict; only needed for a state that contains functions. Raises CheckpointError.
    """
    owners = (name.partition(SEPARATOR)[0] for name in tensors)
    values: dict[str, dict[str, torch.Tensor]] = {own: {} for own in owners if f"{own}{TEXT}" in tensors}
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        own, _, part = name.partition(SEPARATOR)
        if own in values:
            values[own][part] = tensor
        else:
            state[name] = tensor
    for own, parts in values.items():
        where = f"{own!r} of the model's state"
        text = from_text(parts[TEXT.removeprefix(SEPARATOR)], where=where)
        state[own] = value_from(text, parts, where=where, present=(present or {}).get(own))
    return state


def _value_of_model(name: str, value: Any, *, where: str) -> list[Item]:
    """Returns the text of a value, named `name` + `::json`, and its tensors, to which the text refers without `name`:
    the references stay right when the tensors are renamed."""

    def items_of(part: str, tensor: torch.Tensor) -> list[Item]:
        return _from_rank_0(f"{name}{SEPARATOR}{part}", tensor)

    text, items = value_items(
        "", value, where=where, items_of=items_of, taken=(TEXT.removeprefix(SEPARATOR),)
    )
    return [*_from_rank_0(f"{name}{TEXT}", as_text(text)), *items]


def _from_rank_0(name: str, tensor: torch.Tensor) -> list[Item]:
    return [FromRank0(name=name, tensor=tensor.detach())]
