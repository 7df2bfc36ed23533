"""Copies parameters, an optimizer's state and Python objects from one rank to all. All functions are collective.

Parameters and optimizer state are read without running code. `broadcast_object` and `allgather_object` also read
tensors, containers, numbers and text without running code. They unpickle all other objects, as torch.distributed's
functions for objects do; the pickles come from the other ranks of the same program.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from hpctrain.comm import broadcast_tensors
from hpctrain.errors import UsageError
from hpctrain.hvd.errors import HorovodValueError
from hpctrain.hvd.group import Group, titled
from hpctrain.hvd.running import ProcessSet, global_process_set, group_of

# The first byte of what is sent.
_OBJECT, _ERROR = b"\1", b"\0"

Parameters = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor]


def broadcast_parameters(params: Parameters, root_rank: int) -> None:
    """Copies the values of rank `root_rank`'s parameters into the parameters of all ranks. Collective.

    Args:
        params: A `state_dict()`, a sequence of (name, tensor), or a sequence of tensors.
        root_rank: The rank whose values are copied.

    Raises:
        HorovodInternalError: On every rank, naming the ranks that differ, if names, shapes or dtypes differ.
        HorovodValueError: If a value is not a tensor, or there is no rank `root_rank`.
    """
    if isinstance(params, Mapping):
        named: list[tuple[str, Any]] = sorted(params.items())
    else:
        named = [entry if isinstance(entry, tuple) else ("", entry) for entry in params]
    for name, value in named:
        if not isinstance(value, torch.Tensor):
            raise HorovodValueError(f"broadcast_parameters: {name!r} is {type(value).__name__}, not a tensor")
    group = group_of(global_process_set)
    _check_root(root_rank, global_process_set)
    mark = hashlib.blake2b(repr([name for name, _ in named]).encode(), digest_size=4).hexdigest()

    def send() -> None:
        tensors = [value for _, value in named]
        broadcast_tensors(group.comm, tensors, root=group.place_of(root_rank), name="the parameters")

    what = f"broadcast_parameters of {len(named)} tensors (names {mark}) from rank {root_rank}"
    group.run(what, send, behind=False)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Copies the state and the options (learning rate, ...) of rank `root_rank`'s optimizer to all ranks. Collective.

    The parameter groups stay the same objects, so that learning rate schedulers keep working on them. No optimizer is
    stepped: if the root's optimizer has no state, no rank's optimizer has any state afterwards. In that case parameters
    without a gradient get a gradient of zeros, as in Horovod.

    Args:
        optimizer: The optimizer, of the same class on all ranks.
        root_rank: The rank whose state is copied.
        model: Not used.

    Raises:
        HorovodValueError: For LBFGS, as in Horovod, and if the ranks have different numbers of parameters.
        UsageError: If the state holds more than tensors, containers and numbers.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise HorovodValueError("broadcast_optimizer_state: the state of LBFGS is not supported")
    group = group_of(global_process_set)
    is_root = _check_root(root_rank, global_process_set)
    data = _packed(_with_plain_numbers(optimizer.state_dict())) if is_root else b""
    data = _sent(group, data, what="broadcast_optimizer_state", root_rank=root_rank)
    if not is_root or data[:1] == _ERROR:
        _take_state(optimizer, data, root_rank=root_rank)
    if not optimizer.state:
        for parameter in _parameters_of(optimizer):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _take_state(optimizer: torch.optim.Optimizer, data: bytes, *, root_rank: int) -> None:
    """Replaces the state and options of the optimizer with those in `data`."""
    try:
        found = _loaded(data, rank=root_rank, may_unpickle=False)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"the state of {type(optimizer).__name__} holds more than tensors, containers and numbers: {error}"
        ) from error
    sizes = [len(of_group["params"]) for of_group in optimizer.param_groups]
    root_sizes = [len(of_group["params"]) for of_group in found["param_groups"]]
    if sizes != root_sizes:
        raise HorovodValueError(
            f"broadcast_optimizer_state: the parameter groups have {sizes} parameters here and {root_sizes} on "
            f"rank {root_rank}: make the optimizer with the same parameter groups on all ranks"
        )
    for of_group, options in zip(optimizer.param_groups, found["param_groups"], strict=True):
        of_group.update({key: value for key, value in options.items() if key != "params"})
    parameters = _parameters_of(optimizer)
    optimizer.state.clear()
    for index, state in found["state"].items():
        device = parameters[index].device
        optimizer.state[parameters[index]] = {
            # torch keeps the number of steps in host memory.
            name: value.to(device) if isinstance(value, torch.Tensor) and name != "step" else value
            for name, value in state.items()
        }


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for of_group in optimizer.param_groups for parameter in of_group["params"]]


def _with_plain_numbers(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the optimizer state with NumPy numbers converted to Python's, which can be read without unpickling."""
    groups = [
        {key: value.item() if isinstance(value, np.generic) else value for key, value in of_group.items()}
        for of_group in state["param_groups"]
    ]
    return {**state, "param_groups": groups}


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns rank `root_rank`'s object on every rank. Collective over the process set.

    The other ranks may unpickle what the root has pickled.

    Args:
        obj: The object; only the root's is used.
        root_rank: The world rank whose object is sent.
        name: The name of the operation, the same on all ranks; None: no name.
        process_set: The ranks that take part.

    Returns:
        The object. The root gets its own object back; on other ranks tensors are in host memory.

    Raises:
        HorovodValueError: On every rank, if the object cannot be pickled.
    """
    group = group_of(process_set)
    is_root = _check_root(root_rank, process_set)
    what = titled("broadcast_object", name)
    data = _sent(group, _packed(obj) if is_root else b"", what=what, root_rank=root_rank)
    return obj if is_root and data[:1] == _OBJECT else _unpacked(data, rank=root_rank)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns the objects of all ranks on every rank. Collective.

    Each rank may unpickle what the other ranks have pickled.

    Args:
        obj: This rank's object.
        name: The name of the operation, the same on all ranks; None: no name.

    Returns:
        The objects, by rank.

    Raises:
        HorovodValueError: On every rank, if the object of a rank cannot be pickled.
    """
    group = group_of(global_process_set)
    data, found = _packed(obj), []

    def gather() -> None:
        found.extend(group.comm.all_gather_bytes(data))

    group.run(titled("allgather_object", name), gather, behind=False)
    return [_unpacked(each, rank=rank) for rank, each in enumerate(found)]


def _check_root(root_rank: int, process_set: ProcessSet) -> bool:
    """Returns True on the root. Raises HorovodValueError if `root_rank` is not in the process set."""
    group = group_of(process_set)
    if root_rank not in process_set.ranks:
        raise HorovodValueError(f"root_rank is {root_rank}, which is not in {process_set}")
    return group.place_of(root_rank) == group.rank


def _sent(group: Group, data: bytes, *, what: str, root_rank: int) -> bytes:
    """Returns rank `root_rank`'s `data` on every rank."""
    root = group.place_of(root_rank)
    received = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()

    def send() -> None:
        nonlocal received
        length = torch.tensor([received.numel()])
        group.comm.broadcast(length, root=root)
        if group.rank != root:
            received = torch.empty(int(length), dtype=torch.uint8)
        group.comm.broadcast(received, root=root)

    group.run(f"{what} from rank {root_rank}", send, behind=False)
    return bytes(received.numpy())


def _packed(obj: Any) -> bytes:
    """Returns the object as bytes for `_unpacked`, or the text of the error if it cannot be pickled."""
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return _ERROR + f"an object of {type(obj).__name__} cannot be sent to other ranks: {error}".encode()
    return _OBJECT + buffer.getvalue()


def _unpacked(data: bytes, *, rank: int) -> Any:
    """Returns the object that rank `rank` sent. May unpickle it."""
    return _loaded(data, rank=rank, may_unpickle=True)


def _loaded(data: bytes, *, rank: int, may_unpickle: bool) -> Any:
    if data[:1] == _ERROR:
        raise HorovodValueError(f"rank {rank}: {data[1:].decode()}", agreed=True)
    try:
        return torch.load(io.BytesIO(data[1:]), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        if not may_unpickle:
            raise
        return torch.load(io.BytesIO(data[1:]), map_location="cpu", weights_only=False)
