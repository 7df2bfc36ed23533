"""Encodes Python values as JSON and tensors, and decodes them to the same types. Nothing is pickled or called.

None, bool, int, float, text, lists, and dicts with sorted text keys are plain JSON. Any other value is a JSON
object whose key "$" names its type; docs/checkpoint-format.md lists the types. Each tensor is passed to a function
that stores it and returns JSON that refers to it.
"""

from __future__ import annotations

import io
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeAlias

import numpy as np
import torch

from hpctrain.checkpoint.format.dtypes import byte_view, check_plain, dtype_name, dtype_named, empty_tensor
from hpctrain.checkpoint.format.state import SEPARATOR, FromRank0, Item, tensor_items
from hpctrain.distributed import is_sharded_tensor
from hpctrain.errors import CheckpointError

Path: TypeAlias = tuple[str, ...]
# Stores a tensor that was found at a path of keys and indices; returns JSON that refers to it.
Put: TypeAlias = Callable[[Path, torch.Tensor], Any]
# Returns the tensor to which such JSON refers. Raises CheckpointError.
Get: TypeAlias = Callable[[Any], torch.Tensor]

TAG = "$"
_MAX_DEPTH = 100
_ITEMS = "items"
_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "Size", set: "set", frozenset: "frozenset"}
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, tuple, set)}
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, type)
# Kinds of numpy dtypes whose bytes are the value itself.
_NUMPY_KINDS = "biufcmMSU"


def encode(value: Any, *, put: Put, where: str) -> Any:
    """Returns the JSON that represents a Python value. `where` says in error messages what the value is.

    `put` stores a tensor and returns the JSON that refers to it. Functions and classes are stored only by name;
    `decode` takes them from its argument `present`. Raises CheckpointError, with the place and the type, for values of
    unsupported types, values that contain themselves, and tensors that are not plain strided memory.
    """
    return _Encoder(put, where).json_of(value, ())


def decode(value: Any, *, get: Get, where: str, present: Any = None) -> Any:
    """Returns the value that `encode` turned into this JSON. `where` says in error messages what the value is.

    `get` returns the tensor that a piece of JSON refers to. `present` is a value of the same structure as the
    encoded one, from which functions and classes are taken. Raises CheckpointError for JSON that `encode` cannot
    have written, and for a function that is not in `present` under the same name.
    """
    try:
        return _Decoder(get, where).value_of(value, present, ())
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"{where} cannot be read: invalid, or written by a newer hpctrain ({type(error).__name__}: {error})"
        ) from error


def put_inline(path: Path, tensor: torch.Tensor) -> Any:
    """Stores a tensor of a few elements as bytes inside the JSON. Pass this function to `encode` as `put`."""
    content = byte_view(tensor).cpu().numpy().tobytes().hex()
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "hex": content}


def get_inline(value: Any) -> torch.Tensor:
    """Returns, on the CPU, a tensor that `put_inline` has stored. Pass this function to `decode` as `get`."""
    tensor = empty_tensor(tuple(map(int, value["shape"])), dtype=value["dtype"])
    byte_view(tensor).copy_(_bytes_tensor(bytes.fromhex(value["hex"])))
    return tensor


def as_text(value: Any) -> torch.Tensor:
    """Returns a JSON value as a tensor of its text: uint8, shape (n,)."""
    return _bytes_tensor(json.dumps(value, separators=(",", ":")).encode())


def from_text(tensor: torch.Tensor, *, where: str) -> Any:
    """Returns the JSON value whose text `as_text` stored in a tensor. Raises CheckpointError if it is invalid."""
    try:
        return json.loads(tensor.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not JSON: {error}") from error


class _Encoder:
    def __init__(self, put: Put, where: str) -> None:
        self._put = put
        self._where = where
        self._open: set[int] = set()  # the containers that contain the present value

    def json_of(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if abs(value) < 2**63 else {TAG: "int", "hex": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {TAG: "float", "value": str(value)}
        if kind is complex:
            parts = (value.real, value.imag)
            return {TAG: "complex", _ITEMS: [self.json_of(part, path) for part in parts]}
        if isinstance(value, torch.Tensor):
            return {TAG: "tensor", "at": self._stored(value, path)}
        if isinstance(value, (np.generic, np.ndarray)):
            return self._numpy(value, path)
        if kind in (bytes, bytearray, io.BytesIO):
            content = value.getvalue() if kind is io.BytesIO else bytes(value)
            return {TAG: kind.__name__, "at": self._put(path, _bytes_tensor(content))}
        if kind in (torch.dtype, torch.device):
            return {TAG: kind.__name__, "name": str(value).removeprefix("torch.")}
        if isinstance(value, _FUNCTIONS):
            return {TAG: "function", "name": _name_of(value)}
        return self._container(value, path)

    def _container(self, value: Any, path: Path) -> Any:
        if id(value) in self._open:
            raise CheckpointError(f"{self._at(path)} contains itself: it cannot be stored")
        if len(self._open) == _MAX_DEPTH:
            raise CheckpointError(
                f"{self._at(path)} is nested more than {_MAX_DEPTH} deep: it cannot be stored"
            )
        self._open.add(id(value))
        try:
            return self._content(value, path)
        finally:
            self._open.remove(id(value))

    def _content(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind is list:
            return self._list(value, path)
        if kind in (set, frozenset):  # in an order that is the same on every rank
            items = [self.json_of(item, (*path, "item")) for item in value]
            return {
                TAG: _SEQUENCES[kind],
                _ITEMS: sorted(items, key=lambda item: json.dumps(item, sort_keys=True)),
            }
        if kind in _SEQUENCES:
            return {TAG: _SEQUENCES[kind], _ITEMS: self._list(value, path)}
        if kind is deque:
            return {TAG: "deque", _ITEMS: self._list(value, path), "maxlen": value.maxlen}
        if kind is dict and TAG not in value and all(type(key) is str for key in value) and _is_sorted(value):
            return {key: self.json_of(item, (*path, key)) for key, item in value.items()}
        if kind in _DICTS:
            return {TAG: _DICTS[kind], _ITEMS: self._pairs(value, path)}
        if kind is defaultdict:
            factory = value.default_factory
            if factory is None or factory in _FACTORIES.values():
                name = None if factory is None else factory.__name__
                return {TAG: "defaultdict", "of": name, _ITEMS: self._pairs(value, path)}
        raise CheckpointError(
            f"{self._at(path)} is a {kind.__module__}.{kind.__qualname__}: a checkpoint holds numbers, text, bytes, "
            "tensors, numpy arrays, and lists, tuples, sets and dicts of these"
        )

    def _list(self, value: Sequence[Any], path: Path) -> list[Any]:
        return [self.json_of(item, (*path, str(number))) for number, item in enumerate(value)]

    def _pairs(self, value: Mapping[Any, Any], path: Path) -> list[Any]:
        return [
            [self.json_of(key, (*path, "key")), self.json_of(item, (*path, str(key)))]
            for key, item in value.items()
        ]

    def _stored(self, tensor: torch.Tensor, path: Path) -> Any:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not is_sharded_tensor(tensor):
            raise CheckpointError(
                f"{self._at(path)} is a {type(tensor).__qualname__}, a kind of tensor that cannot be stored"
            )
        try:
            if not is_sharded_tensor(tensor):
                check_plain(tensor)
        except CheckpointError as error:
            raise CheckpointError(f"{self._at(path)}: {error}") from error
        return self._put(path, tensor.detach())

    def _numpy(self, value: np.generic | np.ndarray[Any, Any], path: Path) -> Any:
        dtype = value.dtype
        is_array = type(value) is np.ndarray
        if dtype.kind not in _NUMPY_KINDS or not (is_array or isinstance(value, np.generic)):
            raise CheckpointError(
                f"{self._at(path)} is a {type(value).__qualname__} of {dtype}: it cannot be stored"
            )
        if not is_array:
            return {TAG: "numpy", "dtype": dtype.str, "hex": value.tobytes().hex()}
        array = np.ascontiguousarray(value).reshape(value.shape)
        try:
            content = torch.from_numpy(array.copy())
        except (TypeError, ValueError):  # torch has no such dtype: text, dates, other byte orders
            content = _bytes_tensor(array.tobytes())
        return {
            TAG: "ndarray",
            "dtype": dtype.str,
            "shape": list(value.shape),
            "at": self._put(path, content),
        }

    def _at(self, path: Path) -> str:
        return describe_value(self._where, path)


class _Decoder:
    def __init__(self, get: Get, where: str) -> None:
        self._get = get
        self._where = where

    def value_of(self, value: Any, present: Any, path: Path) -> Any:
        if isinstance(value, list):
            return self._list(value, present, path)
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {
                key: self.value_of(item, _entry(present, key), (*path, key)) for key, item in value.items()
            }
        match value[TAG]:
            case "int":
                return int(value["hex"], 16)
            case "float":
                return float(value["value"])
            case "complex":
                return complex(*self._list(value[_ITEMS], None, path))
            case "tensor":
                return self._get(value["at"])
            case "numpy":
                return np.frombuffer(bytes.fromhex(value["hex"]), _numpy_dtype(value["dtype"]))[0]
            case "ndarray":
                content = self._get(value["at"]).contiguous().cpu()
                data = byte_view(content).numpy().tobytes()
                return np.ndarray(tuple(value["shape"]), _numpy_dtype(value["dtype"]), buffer=data).copy()
            case "bytes" | "bytearray" | "BytesIO" as kind:
                made = {"bytes": bytes, "bytearray": bytearray, "BytesIO": io.BytesIO}[kind]
                return made(self._get(value["at"]).cpu().numpy().tobytes())
            case "dtype":
                return dtype_named(value["name"])
            case "device":
                return torch.device(value["name"])
            case "function":
                return self._function(value["name"], present, path)
        return self._container(value, present, path)

    def _container(self, value: Mapping[str, Any], present: Any, path: Path) -> Any:
        kind, items = value[TAG], value[_ITEMS]
        for made, name in _SEQUENCES.items():
            if name == kind:
                return made(self._list(items, present, path))
        if kind == "deque":
            return deque(self._list(items, present, path), maxlen=value["maxlen"])
        pairs = list(self._pairs(items, present, path))
        for made, name in _DICTS.items():
            if name == kind:
                found = made()
                found.update(pairs) if made is not Counter else found.update(dict(pairs))
                return found
        if kind == "defaultdict":
            return defaultdict(None if value["of"] is None else _FACTORIES[value["of"]], pairs)
        raise ValueError(f"unknown type {kind!r:.100}")

    def _list(self, items: Iterable[Any], present: Any, path: Path) -> list[Any]:
        return [
            self.value_of(item, _entry(present, number), (*path, str(number)))
            for number, item in enumerate(items)
        ]

    def _pairs(self, items: Iterable[Any], present: Any, path: Path) -> Iterator[tuple[Any, Any]]:
        for key, item in items:
            name = self.value_of(key, None, path)
            yield name, self.value_of(item, _entry(present, name), (*path, str(name)))

    def _function(self, name: str, present: Any, path: Path) -> Any:
        if not isinstance(present, _FUNCTIONS) or _name_of(present) != name:
            here = _name_of(present) if isinstance(present, _FUNCTIONS) else "none"
            raise CheckpointError(
                f"{describe_value(self._where, path)} is the function {name} in the checkpoint, {here} in this "
                "run: functions are not stored, so create the object with the same function"
            )
        return present


def describe_value(where: str, path: Path) -> str:
    """Returns text for messages: the value's description `where`, followed by the keys in `path`."""
    return where + "".join(f"[{key!r}]" for key in path)


def _is_sorted(keys: Iterable[str]) -> bool:
    return list(keys) == sorted(keys)


def _entry(value: Any, key: Any) -> Any:
    """Returns the entry `key` of a dict, list or tuple; None if there is no such entry."""
    try:
        return value[key] if isinstance(value, (Mapping, list, tuple)) else None
    except (KeyError, IndexError, TypeError):
        return None


def _name_of(function: Any) -> str:
    return f"{getattr(function, '__module__', None)}.{function.__qualname__}"


def _numpy_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"unsupported numpy dtype {name!r:.50}")
    return dtype


def _bytes_tensor(content: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if content
        else torch.empty(0, dtype=torch.uint8)
    )


# Values of any type, such as a module's extra state, as named tensors of a checkpoint.


# Appended to the name of a value that is not a tensor: the name of the tensor with the value's JSON.
TEXT = f"{SEPARATOR}json"


def value_items(
    name: str,
    value: Any,
    *,
    where: str,
    items_of: Callable[[str, torch.Tensor], list[Item]] = tensor_items,
    taken: Container[str] = (),
) -> tuple[Any, list[Item]]:
    """Returns the JSON that represents a Python value, and the items by which a `State` saves its tensors.

    The name of each tensor is `name`, followed by the keys that lead to the tensor in the value. `items_of` makes
    the items from a tensor's name and the tensor; `taken` contains names that must not be used. Raises
    CheckpointError for a value that cannot be stored.
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
    """Returns the Python value that `value_items` has turned into JSON and tensors. Inverse of `value_items`.

    `encoded` is the JSON, and `tensors` are the tensors by name. `where` says in error messages what the value is.
    `present` is a value of the same structure, from which functions and classes are taken. Raises CheckpointError if
    the JSON is invalid or a tensor is missing.
    """

    def get(name: Any) -> torch.Tensor:
        if name not in tensors:
            raise CheckpointError(f"{where}: its tensor {name!r:.200} is not in the checkpoint")
        return tensors[name]

    return decode(encoded, get=get, where=where, present=present)


def model_items(model: torch.nn.Module, *, prefix: str = "") -> list[Item]:
    """Returns the items that save a model's state dict. Not collective.

    Parameters become the items of `tensor_items`: `Replicated`, or shards of DTensors. Everything else, such as
    buffers with running statistics, becomes `FromRank0`. An entry that is not a tensor, such as a module's extra
    state, becomes a tensor `<prefix><key>::json` and one more tensor for each tensor in the entry; `model_state`
    restores the entry.

    Args:
        model: The model; its tensors are not copied.
        prefix: Text put before every key of the state dict to make the name of the tensor.

    Returns:
        The items of this rank, for `State.items`.

    Raises:
        CheckpointError: For an entry that cannot be stored.
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
    """Returns the state dict of a model from the tensors that `model_items` saved; the inverse of `model_items`.

    Args:
        tensors: The loaded tensors by name, without the prefix.
        present: The model's present state dict. It is needed only if the state contains functions, which are taken
            from this dict.

    Raises:
        CheckpointError: If an entry that is not a tensor is invalid.
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
    """Returns the items by which a `State` saves an entry of a model's state dict that is not a tensor.

    The items are the entry's JSON, as a tensor named `<name>::json`, and the tensors in the entry. The JSON refers to
    the tensors without `name`, so that the references stay right if the tensors are renamed.
    """

    def items_of(part: str, tensor: torch.Tensor) -> list[Item]:
        return _from_rank_0(f"{name}{SEPARATOR}{part}", tensor)

    text, items = value_items(
        "", value, where=where, items_of=items_of, taken=(TEXT.removeprefix(SEPARATOR),)
    )
    return [*_from_rank_0(f"{name}{TEXT}", as_text(text)), *items]


def _from_rank_0(name: str, tensor: torch.Tensor) -> list[Item]:
    return [FromRank0(name=name, tensor=tensor.detach())]
