"""Reads a pickle as plain data, without unpickling it: no name in it is looked up, and nothing is called.

A pickle is a program for a small stack machine. Of its instructions those that build plain data are followed here.
Where an unpickler would import a name, call it, or change an object, a `Record` notes the name and its arguments. So a
hostile file can at most contain records that the caller does not expect. `pickletools` of the standard library decodes
the instructions.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import CheckpointError

_MARK = object()
_TEXT = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_VALUES = {*_TEXT, "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_STORES = {"MEMOIZE", "BINPUT", "LONG_BINPUT"}


@dataclass(eq=False, slots=True)
class Record:
    """What an unpickler would have made by calling `name`, "module.name", with `args`. args: None: the name itself.
    state: what it would then have passed to `__setstate__` or put into `__dict__`."""

    name: str
    args: tuple[Any, ...] | None = None
    state: Any = None


def read_pickled_data(content: bytes | memoryview, *, where: str) -> Any:
    """Returns the content of a pickle as dicts, lists, tuples, text, numbers, bool, None and records.

    where: describes the source, for messages. Lists and dicts may contain themselves. A storage of torch ("persistent
    id") is the record "persistent id". Raises CheckpointError if the pickle is invalid or has other instructions.
    """
    try:
        return _run(bytes(content))
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    # A hostile program can cause any of these in pickletools and below.
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{where} is not a valid pickle: {type(error).__name__}: {error}") from error


def _run(content: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any

    def after_mark() -> list[Any]:
        for place in range(len(stack) - 1, -1, -1):
            if stack[place] is _MARK:
                found = stack[place + 1 :]
                del stack[place:]
                return found
        raise ValueError("an instruction refers to a mark that is not there")

    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _STORES:
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name == "TUPLE":
            stack.append(tuple(after_mark()))
        elif name in ("SETITEM", "SETITEMS"):
            items = after_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            _changed(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))
        elif name in ("APPEND", "APPENDS"):
            items = after_mark() if name == "APPENDS" else [stack.pop()]
            _changed(stack[-1], list).extend(items)
        elif name == "GLOBAL":
            stack.append(Record(argument.replace(" ", ".", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(Record(f"{module}.{attribute}"))
        elif name in ("REDUCE", "NEWOBJ"):
            args, called = stack.pop(), stack.pop()
            if not isinstance(called, Record) or not isinstance(args, tuple):
                raise CheckpointError("it calls something that is not a name")
            stack.append(_called(called, args))
        elif name == "BUILD":
            state = stack.pop()
            if type(stack[-1]) is not dict:  # attributes of an OrderedDict, such as those of a state dict
                _changed(stack[-1], Record).state = state
        elif name == "BINPERSID":
            stack.append(Record("persistent id", (stack.pop(),)))
        elif name == "STOP":
            (value,) = stack
            return value
        elif name not in ("PROTO", "FRAME"):
            raise CheckpointError(f"it has the instruction {name}, which no checkpoint of torch needs")
    raise ValueError("it does not end with STOP")


def _called(function: Record, args: tuple[Any, ...]) -> Any:
    """Returns the record of a call; an empty dict for collections.OrderedDict(), whose items follow."""
    if function.name == "collections.OrderedDict" and not args:
        return {}
    return Record(function.name, args)


def _changed(value: Any, kind: type[Any]) -> Any:
    if type(value) is Record and kind in (dict, list):
        return kind()  # an object of another class: its items are not looked at
    if type(value) is not kind:
        raise CheckpointError(f"it changes a {type(value).__name__} as if it were a {kind.__name__}")
    return value
