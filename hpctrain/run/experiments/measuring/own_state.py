"""Finds and copies state of the user's objects that checkpoints lack: generators, numbers and tensors in attributes."""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hpctrain.train import capture_generators

# Finds out whether code draws random numbers, and turns dropout off.


_DROPOUTS = frozenset({
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
    functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout, torch.dropout_,
    torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
})  # fmt: skip


class GeneratorWatch:
    """Finds which of the process's random number generators (torch, numpy, python, cuda) a `with` block uses.

    After the block, `used` holds the names of these generators.
    """

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
    """Within the `with` block, makes dropout (also in attention) return its input and draw no random numbers."""

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
    """Returns True for a random generator object of numpy, Python or torch."""
    kinds = (
        np.random.Generator,
        np.random.RandomState,
        np.random.BitGenerator,
        random.Random,
        torch.Generator,
    )
    return isinstance(value, kinds)


def generator_state(value: Any) -> Any:
    """Returns a copy of the state of a generator object."""
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
    """Sets a generator object to a state from `generator_state`."""
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


def draw_numbers(value: Any, times: int) -> None:
    """Draws `times` numbers from a generator object."""
    for _ in range(times):
        if isinstance(value, torch.Generator):
            torch.rand(1, generator=value, device=value.device)
        elif isinstance(value, np.random.BitGenerator):
            value.random_raw()
        elif isinstance(value, np.random.RandomState):
            value.random_sample()
        else:
            value.random()


# State of the user's objects outside of checkpoints.


_MAX_OBJECTS, _MAX_DEPTH = 20_000, 8
_PLAIN = (int, float, str, bool, complex, bytes, type(None))
# Objects of these packages hold no state of the user.
_LIBRARIES = ("torch", "numpy", "hpctrain", "torchvision", "sklearn", "pandas")
# Except these, whose state the user passes to `save_state` in `also`.
_STATEFUL = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_SAVED_OF_MODULES = ("_parameters", "_buffers", "training")
# Larger arrays are treated as data, not as state: they are neither watched nor copied.
_MAX_BYTES = 16 << 20
_SAVED_OF_OPTIMIZERS = ("state", "param_groups", "defaults")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLocation:
    """Where a value is stored: in an attribute, as an entry of an object's `__dict__`, or in a dict or list.

    kind: `generator`, `buffer` (a model's buffer that is not saved), `schedule` (a value of a learning rate scheduler)
    or `value`.
    """

    container: Any
    key: Any
    value: Any
    kind: str


def find_places(roots: Mapping[str, Any]) -> dict[str, ValueLocation]:
    """Returns where values are stored that the user's objects contain and that are not in a checkpoint, by path.

    roots: the user's objects by name. `model`, `optimizer` and the objects in `also` are in the checkpoint.
    """
    found: dict[str, ValueLocation] = {}
    saved = _saved(roots)
    schedules: set[int] = set()
    seen: set[int] = set()
    waiting: deque[tuple[str, Any, Any, Any, int]] = deque()
    for name, root in roots.items():
        holder = {name: root}
        waiting.append((name, holder, name, root, 0))
    while waiting and len(seen) < _MAX_OBJECTS:
        path, container, key, value, depth = waiting.popleft()
        if id(value) in saved and not isinstance(value, torch.nn.Module):
            continue
        if is_generator(value) or isinstance(value, (*_PLAIN, torch.Tensor, np.ndarray, np.generic)):
            if getattr(value, "nbytes", 0) > _MAX_BYTES:
                continue
            kind = (
                "generator" if is_generator(value) else "schedule" if id(container) in schedules else "value"
            )
            found[path] = ValueLocation(container=container, key=key, value=value, kind=kind)
            continue
        if id(value) in seen or depth > _MAX_DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            schedules.add(id(value.__dict__))
        for name, inner_container, inner_key, inner in _inside(value):
            waiting.append((f"{path}{name}", inner_container, inner_key, inner, depth + 1))
        if isinstance(value, torch.nn.Module) and id(value) not in saved:
            for held in (value._parameters, value._buffers):
                waiting += [(f"{path}.{name}", held, name, t, depth + 1) for name, t in held.items()]
        elif isinstance(value, torch.nn.Module):
            for name in value._non_persistent_buffers_set:
                buffer = value._buffers.get(name)
                place = ValueLocation(container=value._buffers, key=name, value=buffer, kind="buffer")
                found[f"{path}.{name}"] = place
    return found


def of_schedulers(roots: Mapping[str, Any]) -> dict[str, str]:
    """Returns the values of learning rate schedulers as text, by path, whether the values are saved or not.

    roots: the user's objects by name.
    """
    whole = {f"{name} ": root for name, root in roots.items() if name not in ("model", "optimizer")}
    places = find_places(whole)
    return {path.replace(" ", "", 1): _mark(p) for path, p in places.items() if p.kind == "schedule"}


def stir(roots: Mapping[str, Any], times: int) -> None:
    """Draws `times` numbers from each of the user's own random generators.

    roots: the user's objects by name.
    """
    for place in find_places(roots).values():
        if place.kind == "generator":
            draw_numbers(place.value, times)


def _saved(roots: Mapping[str, Any]) -> set[int]:
    """Returns the `id()` of the modules, parameters and other objects that are in a checkpoint.

    roots: the user's objects by name.
    """
    model, optimizer, also = roots.get("model"), roots.get("optimizer"), roots.get("also", {})
    found = set(map(id, also.values()))
    for module in (model, *also.values()):
        if isinstance(module, torch.nn.Module):
            found |= {id(inner) for inner in module.modules()} | {id(p) for p in module.parameters()}
    if isinstance(optimizer, torch.optim.Optimizer):
        found |= {id(p) for group in optimizer.param_groups for p in group["params"]}
    return found


def _inside(value: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yields (name, container, key, value) for each value that an object holds."""
    if isinstance(value, Variables):
        for key, inner in value.items():
            yield f".{key}", vars(value.module), key, inner
    elif isinstance(value, dict):
        for key, inner in list(value.items())[:1000]:
            yield f"[{key!r}]", value, key, inner
    elif isinstance(value, list | deque):
        for number, inner in enumerate(list(value)[:1000]):
            yield f"[{number}]", value, number, inner
    elif isinstance(value, tuple):
        for number, inner in enumerate(value[:1000]):
            yield f"[{number}]", None, number, inner
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, MethodType):
        yield ".__self__", None, None, value.__self__
    elif not isinstance(value, type | ModuleType):
        yield from _attributes(value)


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any, Any, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".{name}", _Cell(cell), 0, cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    if not function.__module__.startswith(_LIBRARIES):
        for name in function.__code__.co_names:
            if name in function.__globals__ and not name.startswith("__"):
                yield f".{name}", function.__globals__, name, function.__globals__[name]


@dataclass(frozen=True, slots=True)
class _Cell:
    """A variable that a function uses from its enclosing function, with the interface of a list of one value."""

    cell: Any

    def __setitem__(self, key: int, value: Any) -> None:
        self.cell.cell_contents = value


def _attributes(value: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict):
        return
    is_module, is_optimizer = isinstance(value, torch.nn.Module), isinstance(value, torch.optim.Optimizer)
    library = type(value).__module__.partition(".")[0]
    if is_module:
        for name, child in value._modules.items():
            if child is not None:
                yield f".{name}", value._modules, name, child
    elif library in _LIBRARIES and not isinstance(value, _STATEFUL) and not hasattr(value, "build_model"):
        return
    for name, inner in list(own.items()):
        if is_module and (name in _SAVED_OF_MODULES or name == "_modules"):
            continue
        if is_module and (
            name.endswith(("_hooks", "_hooks_with_kwargs", "_always_called")) or name[:2] == "__"
        ):
            continue
        if is_optimizer and (name in _SAVED_OF_OPTIMIZERS or "hook" in name or name.startswith("_zero_grad")):
            continue
        yield f".{name}", own, name, inner


@dataclass(frozen=True, slots=True)
class Variables:
    """The global variables of one of the user's Python modules."""

    module: ModuleType

    def items(self) -> list[tuple[str, Any]]:
        return [
            (key, inner)
            for key, inner in vars(self.module).items()
            if not key.startswith("__") and not isinstance(inner, type | ModuleType | FunctionType)
        ]


def variables_of_module(value: Any) -> Variables | None:
    """Returns the global variables of the Python module that defines a function or an object's class.

    None if the module belongs to a library.
    """
    name = getattr(value, "__module__", None) or type(value).__module__
    module = sys.modules.get(name)
    is_library = name.partition(".")[0] in (*_LIBRARIES, *sys.stdlib_module_names) and name != "__main__"
    return None if module is None or is_library else Variables(module)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnState:
    """The user's own values at one moment, by path, at the places that `find_places` finds.

    Attributes:
        values: Copies of the values.
        kinds: The kinds of the values: `generator`, `buffer`, `schedule` or `value`; see `ValueLocation`.
        marks: Texts by which the values are compared.
    """

    values: Mapping[str, Any]
    kinds: Mapping[str, str]
    marks: Mapping[str, str]

    @classmethod
    def of(cls, roots: Mapping[str, Any]) -> OwnState:
        places = find_places(roots)
        return cls(
            values={path: _copied(place) for path, place in places.items() if _is_kept(place)},
            kinds={path: place.kind for path, place in places.items()},
            marks={path: _mark(place) for path, place in places.items()},
        )

    def changed_since(self, before: OwnState) -> dict[str, str]:
        """Returns, by path, the kind of each value that differs from that in `before` or is missing there."""
        return {path: self.kinds[path] for path, mark in self.marks.items() if before.marks.get(path) != mark}

    def put_into(self, roots: Mapping[str, Any], paths: Mapping[str, str]) -> int:
        """Copies the values at `paths` into `roots`, the objects of another run. Returns the number of copies."""
        places = find_places(roots)
        count = 0
        for path in paths:
            if path not in self.values:
                continue
            place = places.get(path)
            if place is not None and place.kind == "generator":
                set_generator(place.value, self.values[path])
                count += 1
            elif place is not None and isinstance(place.value, torch.nn.Parameter):
                with torch.no_grad():  # the object stays, since others may refer to it
                    place.value.copy_(self.values[path])
                count += 1
            elif place is not None and place.container is not None:
                place.container[place.key] = copy.deepcopy(self.values[path])
                count += 1
            elif (
                place is None
                and self.kinds[path] != "generator"
                and (parent := _parent(path, places, roots)) is not None
            ):
                parent[0][parent[1]] = copy.deepcopy(self.values[path])
                count += 1
        return count


def _parent(
    path: str, places: Mapping[str, ValueLocation], roots: Mapping[str, Any]
) -> tuple[dict[str, Any], str] | None:
    """Returns the container and the key under which a missing value must be stored.

    path: path of the value.
    places: locations of the values that exist, by path.
    roots: the user's objects by name.

    The container is that of the other values of the same object. The result is None if there is no such container.
    """
    head, dot, name = path.rpartition(".")
    if not dot or "[" in name:
        return None
    own = getattr(roots.get(head), "__dict__", None)
    if isinstance(own, dict):
        return own, name
    for other, place in places.items():
        if other.rpartition(".")[0] == head and isinstance(place.container, dict):
            return place.container, name
    return None


def _is_kept(place: ValueLocation) -> bool:
    return not (
        isinstance(place.value, torch.Tensor) and place.value.requires_grad and not place.value.is_leaf
    )


def _copied(place: ValueLocation) -> Any:
    return generator_state(place.value) if place.kind == "generator" else copy.deepcopy(place.value)


def _mark(place: ValueLocation) -> str:
    value = place.value
    if place.kind == "generator":
        return repr(generator_state(value))
    if isinstance(value, torch.Tensor):
        found = value.detach()
        return f"{found.dtype}{tuple(found.shape)}{_bytes(found)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{hash(value.tobytes()) if value.dtype != object else id(value)}"
    if dataclasses.is_dataclass(value):
        return str(id(value))
    return repr(value)


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return hash(tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
