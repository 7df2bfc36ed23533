"""Saves and restores the user's own objects in a checkpoint: schedulers, averaged models, gradient scalers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import torch

from hpctrain.checkpoint import FromRank0, Item, tensor_items, value_from, value_items
from hpctrain.comm import Collective, all_gather_json, is_true_everywhere, on_rank_0, raise_together
from hpctrain.distributed import is_sharded_tensor
from hpctrain.errors import CheckpointError, UsageError

# Compares a module's saved state with the module's own.


# The last part of the name of a module's extra state, whose type and shape only the module knows.
_EXTRA_STATE = "_extra_state"


def check_state(saved: Mapping[str, Any], mine: Mapping[str, Any], *, where: str) -> None:
    """Raises CheckpointError unless both states have the same names, dtypes and shapes. The error lists differences.

    saved: values of the checkpoint by name.
    mine: values of this run by name.
    where: the beginning of the message.
    """
    faults = [f"{name} is missing in the checkpoint" for name in mine if name not in saved]
    faults += [f"{name} is not in this run" for name in saved if name not in mine]
    faults += [
        f"{name} is {kind_of(saved[name])} in the checkpoint, {kind_of(mine[name])} in this run"
        for name in mine
        if name in saved
        and name.rpartition(".")[2] != _EXTRA_STATE
        and kind_of(saved[name]) != kind_of(mine[name])
    ]
    if faults:
        shown = "; ".join(faults[:4]) + (f"; and {len(faults) - 4} more" if len(faults) > 4 else "")
        raise CheckpointError(
            f"{where}: {shown}. Resume with the model that the checkpoint was saved from, or start from scratch with "
            "--resume never"
        )


def kind_of(value: Any) -> str:
    """Returns the dtype and shape of a tensor, or the type of another value, as text."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


# The user's objects that are saved in a run's checkpoint.


_PREFIX = "also/"
_NOT_IN_NAMES = ("/", "::")


class HasStateDict(Protocol):
    """Any object with torch's two methods for its state, `state_dict` and `load_state_dict`."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


Stateful: TypeAlias = HasStateDict | torch.Generator


def check_also(also: Mapping[str, Stateful | None]) -> None:
    """Raises an error if `also` cannot be saved. Not collective.

    Raises UsageError for an invalid name or object. Raises CheckpointError for a state that cannot be stored; the
    message names the place in the state and the type.

    also: the user's objects by name; None in place of an object that is not saved.
    """
    for name, value in also.items():
        if not isinstance(name, str) or not name or any(part in name for part in _NOT_IN_NAMES):
            raise UsageError(
                f"also: an object has the name {name!r}: give it a name that is text without '/' and '::'"
            )
        lacking = [m for m in ("state_dict", "load_state_dict") if not callable(getattr(value, m, None))]
        if value is not None and lacking and not isinstance(value, torch.Generator):
            raise UsageError(
                f"also[{name!r}] is a {type(value).__qualname__}, which has no {lacking[0]}(): give objects with "
                "state_dict() and load_state_dict(), such as schedulers and modules, or a torch.Generator"
            )
    also_items(also)


def also_items(also: Mapping[str, Stateful | None]) -> tuple[dict[str, Any], list[Item]]:
    """Returns the states of the user's objects as JSON values by name, and their tensors as checkpoint items.

    An item is named `also/NAME/KEY::KEY`, where the keys lead to the tensor in the object's state dict.

    The tensors must be the same on every rank. The buffers of modules may differ: the buffers of rank 0 are saved.
    Raises CheckpointError for a state that cannot be stored.
    """
    document: dict[str, Any] = {}
    items: list[Item] = []
    for name, value in also.items():
        if value is None:
            continue
        prefix = f"{_PREFIX}{name}/"
        state, buffers = _state(value), _buffers(value)

        def items_of(
            own: str, tensor: torch.Tensor, prefix: str = prefix, buffers: set[str] = buffers
        ) -> list[Item]:
            if own.removeprefix(prefix) in buffers and not is_sharded_tensor(tensor):
                return [FromRank0(name=own, tensor=tensor.detach())]
            return tensor_items(own, tensor)

        document[name], found = value_items(prefix, state, where=_where(name), items_of=items_of)
        items += found
    return document, items


def also_tensors(also: Mapping[str, Stateful | None]) -> dict[str, torch.Tensor]:
    """Returns the current tensors of the user's objects, by their names in a checkpoint."""
    found: dict[str, torch.Tensor] = {}

    def noted(own: str, tensor: torch.Tensor) -> list[Item]:
        found[own] = tensor
        return []

    for name, value in also.items():
        if value is not None:
            value_items(f"{_PREFIX}{name}/", _state(value), where=_where(name), items_of=noted)
    return found


def check_same_on_ranks(document: Mapping[str, Any], *, comm: Collective) -> None:
    """Raises CheckpointError on every rank if the states of the user's objects differ between the ranks. Collective.

    The error names the first value that differs. The contents of tensors are not compared here, but during the save.

    document: the JSON values that `also_items` returned.
    """
    theirs = on_rank_0(comm, lambda: dict(document))
    if is_true_everywhere(comm, document == theirs):
        return
    reference = dict(_leaves(theirs, "also"))
    mine = dict(_leaves(document, "also"))
    places = [place for place in {**reference, **mine} if reference.get(place, "") != mine.get(place, "")]
    found = [[place, reference.get(place), mine.get(place)] for place in places[:1]]
    by_rank = all_gather_json(comm, found)
    rank, ((place, there, here), *_) = next((rank, entry) for rank, entry in enumerate(by_rank) if entry)
    raise CheckpointError(
        f"{place} is {_short(there)} on rank {comm.members[0]}, {_short(here)} on rank {comm.members[rank]}: what is "
        "saved with also must be the same on every rank. Give every rank's object the same values, such as "
        "session.mean(loss) to ReduceLROnPlateau",
        agreed=True,
    )


def also_states(
    also: Mapping[str, Stateful | None],
    document: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    where: str,
) -> dict[str, Any]:
    """Returns the saved state of each of the user's objects.

    also: the user's objects by name; None in place of an object that is not loaded.

    Raises CheckpointError if the checkpoint has other objects than `also`, or other tensors of a module.

    document: the JSON values of the objects in the checkpoint.
    tensors: the tensors of the checkpoint by name.
    where: the path of the checkpoint.
    """
    missing = [name for name, value in also.items() if value is not None and name not in document]
    if missing:
        there = f"it holds {', '.join(map(repr, document))}" if document else "nothing was saved with also"
        raise CheckpointError(
            f"{where} holds no {missing[0]!r} ({there}): leave {missing[0]!r} out of also={{...}} to begin with the "
            "object as it is"
        )
    unknown = [name for name in document if name not in also]
    if unknown:
        raise CheckpointError(
            f"{where} also holds {', '.join(map(repr, unknown))}, saved with also={{...}}: give load_state the object, "
            f"or also={{{unknown[0]!r}: None}} to load without it"
        )
    states = {}
    for name, value in also.items():
        if value is not None:
            present = _state(value)
            states[name] = value_from(document[name], tensors, where=_where(name), present=present)
            if isinstance(value, torch.nn.Module):
                check_state(states[name], present, where=f"{where}: {_where(name)} is of another module")
    return states


def load_also(also: Mapping[str, Stateful | None], states: Mapping[str, Any], *, comm: Collective) -> None:
    """Loads the state of each of the user's objects. Collective.

    Raises the same CheckpointError on every rank if an object fails to load.
    """
    error: CheckpointError | None = None
    for name, state in states.items():
        value = also[name]
        try:
            if isinstance(value, torch.Generator):
                value.set_state(state["state"])
            elif value is not None:
                value.load_state_dict(state)
        except Exception as found:  # the user's code may raise anything
            error = CheckpointError(
                f"{_where(name)}: {type(value).__qualname__}.load_state_dict raised {type(found).__name__}: {found}"
            )
            break
    raise_together(comm, error)


def _state(value: Stateful) -> Any:
    return {"state": value.get_state()} if isinstance(value, torch.Generator) else value.state_dict()


def _where(name: str) -> str:
    return f"also[{name!r}]"


def _buffers(value: object) -> set[str]:
    """Returns the names of the entries of a module's state dict that are not parameters; empty for any other object."""
    if not isinstance(value, torch.nn.Module):
        return set()
    return value.state_dict().keys() - {name for name, _ in value.named_parameters(remove_duplicate=False)}


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{place}[{key!r}]")
    elif isinstance(value, list):
        yield f"len({place})", len(value)
        for number, item in enumerate(value):
            yield from _leaves(item, f"{place}[{number}]")
    else:
        yield place, value


def _short(value: Any) -> str:
    return f"{value!r:.60}"
