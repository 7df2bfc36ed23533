"""Values come back with the same types, from JSON and tensors; what cannot be stored is named with its place."""

from __future__ import annotations

import io
import json
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.checkpoint.format.typed_values import (
    decode,
    encode,
    get_inline,
    put_inline,
    value_from,
    value_items,
)
from hpctrain.errors import CheckpointError

VALUES: dict[str, Any] = {
    "plain": [None, True, 0, -3, 1.5, -0.0, "text", "\ud800"],
    "numbers": [2**63, -(2**200), float("inf"), float("-inf"), 1e-320, complex(1, float("inf"))],
    "sequences": [(1, (2,), []), {3, 1}, frozenset({"a"}), deque([1, 2], maxlen=3), torch.Size([2, 3])],
    "keys": {1: "a", "1": "b", (2, 3): "c", None: "d", 2.5: "e"},
    "order": {"b": 1, "a": 2},
    "tag": {"$": 1, "a": 2},
    "dicts": [Counter({5: 2, 3: 1}), OrderedDict(z=1, a=2), defaultdict(list, {"x": [1]}), defaultdict(None, {})],
    "bytes": [b"\x00\xff", bytearray(b"abc"), b""],
    "torch": [torch.float16, torch.device("cpu"), torch.tensor(0.1), torch.tensor([], dtype=torch.bfloat16)],
    "tensors": {"w": torch.arange(6).view(2, 3).t(), "half": torch.tensor([1.5], dtype=torch.float16)},
    "numpy": [np.float32(0.1), np.float64(0.1), np.int8(-1), np.bool_(True), np.datetime64("2026-11-28"), np.str_("x")],
    "arrays": [np.arange(6, dtype=np.uint16).reshape(2, 3), np.array(["a", "bc"]), np.array(2.5), np.zeros((0, 2)),
               np.arange(3, dtype=">i4"), np.arange(4).reshape(2, 2).T],
}  # fmt: skip


def same(found: Any, value: Any) -> bool:
    """Equal, of the same types, in the same order, and floats and tensors to the bit."""
    if type(found) is not type(value):
        return False
    if isinstance(value, torch.Tensor):
        return found.dtype == value.dtype and torch.equal(found, value)
    if isinstance(value, np.ndarray):
        return found.dtype == value.dtype and np.array_equal(found, value)
    if isinstance(value, dict):
        factories = [getattr(one, "default_factory", None) for one in (found, value)]
        return factories[0] is factories[1] and same(list(found.items()), list(value.items()))
    if isinstance(value, (list, tuple, deque)):
        return len(found) == len(value) and all(map(same, found, value))
    return repr(found) == repr(value)


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_with_their_types_from_json_and_tensors(name: str) -> None:
    text, items = value_items("also/x/", VALUES[name], where="x")
    text = json.loads(json.dumps(text, sort_keys=True))
    assert same(value_from(text, {i.name: i.tensor for i in items}, where="x"), VALUES[name])
    inline = json.loads(json.dumps(encode(VALUES[name], put=put_inline, where="x"), sort_keys=True))
    assert same(decode(inline, get=get_inline, where="x"), VALUES[name])


def test_a_file_in_memory_and_nan_come_back() -> None:
    stored = encode([io.BytesIO(b"state"), float("nan")], put=put_inline, where="x")
    file, nan = decode(stored, get=get_inline, where="x")
    assert file.read() == b"state"
    assert nan != nan


def test_functions_are_taken_from_the_object_that_loads() -> None:
    def anneal(x: float) -> float:
        return x

    state = {"function": anneal, "kind": torch.nn.Linear, "steps": [anneal, 3]}
    text = encode(state, put=put_inline, where="also['s']")
    assert decode(text, get=get_inline, where="x", present=state) == state
    with pytest.raises(
        CheckpointError, match=r"x\['function'\] is the function .*anneal in the checkpoint, none in this run"
    ):
        decode(text, get=get_inline, where="x", present={"function": None})


def cyclic() -> list[Any]:
    inner: list[Any] = []
    inner.append({"a": inner})
    return inner


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(200):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, object()]}, r"x\['a'\]\['1'\] is a builtins.object"),
        ({"f": partial(print)}, r"x\['f'\] is a functools.partial"),
        (cyclic(), "contains itself"),
        (deep(), "deep"),
        (np.array([object()]), "of object"),
        (np.zeros(2, dtype=[("a", "f4")]), "ndarray"),
        (torch.zeros(2, 2).to_sparse(), "layout torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "device meta"),
        (defaultdict(lambda: 3), "defaultdict"),
        (type("Named", (dict,), {})(), "Named"),
    ],
)
def test_what_cannot_be_stored_is_named_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encode(value, put=put_inline, where="x")


@pytest.mark.parametrize(
    "text",
    [
        {"$": "unknown", "items": []}, {"$": "tuple"}, {"$": "numpy", "dtype": "O", "hex": "00" * 8},
        {"$": "set", "items": [[]]}, {"$": "float", "value": "x"}, {"$": "tensor", "at": {"dtype": "no"}}, {"$": []},
        {"$": "defaultdict", "of": "eval", "items": []}, {"$": "dict", "items": [1]}, {"$": "device", "name": "x"},
    ],
)  # fmt: skip
def test_other_json_is_an_error_and_nothing_is_called(text: Any) -> None:
    with pytest.raises(CheckpointError):
        decode(text, get=get_inline, where="x")
