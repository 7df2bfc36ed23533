"""Opens the sources of `hpctrain data pack` by the name given on the command line.

A source has one part, or the two parts `train` and `test`. Samples are assigned to parts by the permutation of
`EpochOrder`, files by a hash of their relative path. So the parts depend only on the seed, and on the number of samples
or the names of the files, but not on the machine.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from hpctrain.data.sources.numpy_files import (
    Colour,
    FileRows,
    ImageFolder,
    array_directory,
    npy_file,
    npz_arrays,
)
from hpctrain.data.sources.row_source import ArrayRows, SampleRows, source_identity, split_rows
from hpctrain.data.sources.tables import (
    CSV_SUFFIXES,
    PARQUET_SUFFIXES,
    Column,
    ParquetRows,
    csv_rows,
    parquet_files,
)
from hpctrain.data.sources.text import TextSource, python_source, read_tokens, text_directory
from hpctrain.errors import DataError, HpctrainError, UsageError

__all__ = [
    "ArraySource",
    "IteratorSource",
    "RowSource",
    "SourceOptions",
    "TextSource",
    "open_source",
    "read_tokens",
]

# Samples from a user's function, `module:function`, that returns an iterator over dicts.


TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True, kw_only=True)
class IteratorSource:
    """Samples to be packed that iterators yield. `open_part(p)` returns the iterator of part p, 0 <= p < num_parts."""

    open_part: Callable[[int], Iterator[Mapping[str, Any]]]
    num_parts: int
    attributes: dict[str, JsonValue] = field(default_factory=dict)


def iterator_source(target: str, *, num_parts: int | None) -> IteratorSource:
    """Returns a source that takes samples from a user's function, given by its name `module:function`.

    The function is imported from the working directory or the installed packages. It returns an iterator over samples.
    It takes no arguments, or the arguments `part` and `num_parts`. In the second case the parts are packed separately,
    possibly by different ranks. `num_parts` None means 1. Raises UsageError if the function cannot be imported, or
    takes other arguments. `open_part` of the source raises DataError if the function raises an error.
    """
    module_name, _, attribute = target.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function: Any = importlib.import_module(module_name)
        for name in attribute.split("."):
            function = getattr(function, name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"the source {target} cannot be imported: {error} (also searched in {Path.cwd()})"
        ) from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything, or call sys.exit
        raise UsageError(f"the source {target}: importing raised {type(error).__name__}: {error}") from error
    takes_parts = _takes_parts(function, target=target)
    if not takes_parts and (num_parts or 1) > 1:
        raise UsageError(
            f"{num_parts} parts are asked for, but {target} takes no arguments part and num_parts: use --parts 1, so "
            "that one process packs all samples, or add these arguments"
        )
    parts = num_parts or 1

    def open_part(part: int) -> Iterator[Mapping[str, Any]]:
        try:
            return iter(function(part=part, num_parts=parts) if takes_parts else function())
        except HpctrainError:
            raise
        except Exception as error:
            raise DataError(f"{target} raised {type(error).__name__}: {error}") from error

    return IteratorSource(open_part=open_part, num_parts=parts, attributes={"source": target})


def _takes_parts(function: Any, *, target: str) -> bool:
    if not callable(function):
        raise UsageError(f"the source {target} is {type(function).__name__}, not a function")
    signature = inspect.signature(function)
    for arguments, takes_parts in (({"part": 0, "num_parts": 1}, True), ({}, False)):
        try:
            signature.bind(**arguments)
        except TypeError:
            continue
        return takes_parts
    raise UsageError(f"{target}{signature} must take no arguments, or part and num_parts")


# Opens the sources of `hpctrain data pack` by the name given on the command line.


_KINDS = ("text", "images", "npy", "npy-files", "csv", "parquet")
_POSSIBLE = (
    "digits, python-source, X.npz, X.npy, X.csv, X.parquet, a directory of text files (text:DIR), images:DIR, "
    "npy:DIR, npy-files:DIR, parquet:DIR and module:function are possible"
)


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Options of `pack_source` that apply to some sources only.

    Attributes:
        image_size: For images, the size (height, width) in pixels to which the images are scaled and cropped; None: the
            size of the first image.
        colour: For images, the colour channels; None: RGB.
        fields: For tables, the columns that make up each field, by field name; None: each column is a field.
        num_parts: For iterators, the number of parts that are packed separately; None: 1.
    """

    image_size: tuple[int, int] | None = None
    colour: Colour | None = None
    fields: dict[str, Column] | None = None
    num_parts: int | None = None


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """Samples to be packed that can be read by position.

    `parts` maps the name of each part, such as `train` and `test`, to its samples.
    """

    parts: dict[str, SampleRows]
    attributes: dict[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ArraySource:
    """Samples to be packed that are in arrays in memory.

    `parts` maps the name of each part, such as `train` and `test`, to its arrays by field name. The arrays of a part
    have the same first dimension.
    """

    parts: dict[str, dict[str, NDArray[Any]]]
    attributes: dict[str, JsonValue] = field(default_factory=dict)
    identity: JsonValue = None


def open_source(
    name: str,
    *,
    held_out: float | None,
    seed: int,
    shuffle: bool = False,
    options: SourceOptions | None = None,
) -> ArraySource | RowSource | TextSource | IteratorSource:
    """Opens data that is to be packed into a dataset, by its name on the command line.

    `held_out` is the fraction of the samples or files that go into the part `test`. None means the default of the
    source: 0.2 for digits, 0.1 for text, 0 for others. With 0 there is only one part, `all`. With `shuffle` samples
    are packed in random order. Raises UsageError if the source is unknown or does not support an option, DataError if
    the source cannot be read.
    """
    options = options or SourceOptions()
    if held_out is not None and not 0 <= held_out < 1:
        raise UsageError(f"--held-out {held_out}: a fraction of at least 0 and below 1 is expected")
    kind, path = _kind_of(name)
    _check_options(name, kind=kind, options=options, shuffle=shuffle)
    if kind in ("digits", "npz"):
        if kind == "digits":
            arrays, attributes = _digits()
            held_out = 0.2 if held_out is None else held_out
        else:
            arrays, attributes = npz_arrays(path), {"source": path.name}
        return ArraySource(
            parts=_split_arrays(arrays, held_out=held_out or 0.0, seed=seed, shuffle=shuffle),
            attributes={**attributes, "seed": seed},
            identity=None if kind == "digits" else source_identity([path]),
        )
    if kind == "python-source":
        return python_source(held_out=0.1 if held_out is None else held_out, seed=seed)
    if kind == "text":
        return text_directory(path, held_out=0.1 if held_out is None else held_out, seed=seed)
    if kind == "iterator":
        if held_out:
            raise UsageError(f"--held-out {held_out}: the number of samples of {name} is not known in advance: "
                             "write two functions, and pack each of them")  # fmt: skip
        return iterator_source(name, num_parts=options.num_parts)
    rows = _rows(kind, path, options)
    return RowSource(
        parts=split_rows(rows, held_out=held_out or 0.0, seed=seed, shuffle=shuffle),
        attributes={
            "source": f"{kind}:{path.name}" if path.is_dir() else path.name,
            "seed": seed,
        },
    )


def _kind_of(name: str) -> tuple[str, Path]:
    if name in ("digits", "python-source"):
        return name, Path(name)
    kind, colon, rest = name.partition(":")
    if colon and kind in _KINDS:
        if rest == "":
            raise UsageError(f"the source {name} has no path after the colon")
        return kind, Path(rest)
    path = Path(name)
    suffix = path.suffix.lower()
    if TARGET.fullmatch(name) and not path.exists():
        return "iterator", path
    if suffix in (".npz", ".npy") and not path.is_dir():
        return suffix[1:] if suffix == ".npz" else "npy", path
    if suffix in CSV_SUFFIXES:
        return "csv", path
    if suffix in PARQUET_SUFFIXES:
        return "parquet", path
    if path.is_dir():
        return "text", path
    raise UsageError(
        f"unknown source {name!r}: {_POSSIBLE}" + ("" if path.exists() else f"; there is no {path}")
    )


def _check_options(name: str, *, kind: str, options: SourceOptions, shuffle: bool) -> None:
    """Raises UsageError if an option was given that does not apply to the source `name`.

    `kind` is the kind of the source, such as images or tables.
    """
    for option, given, kinds in (
        ("--size", options.image_size is not None, ("images",)),
        ("--colour", options.colour is not None, ("images",)),
        ("--fields", options.fields is not None, ("csv", "parquet")),
        ("--parts", (options.num_parts or 1) > 1, ("iterator",)),
    ):
        if given and kind not in kinds:
            raise UsageError(
                f"{option} is only for {' and '.join(kinds)}: leave it out for the source {name}"
            )
    if shuffle and kind in ("text", "python-source", "iterator"):
        raise UsageError(
            f"--shuffle needs a known number of samples, but the source {name} is a stream: leave --shuffle out"
        )


def _rows(kind: str, path: Path, options: SourceOptions) -> SampleRows:
    if kind == "images":
        return ImageFolder(path, size=options.image_size, colour=options.colour or Colour.RGB)
    if kind == "npy":
        return array_directory(path) if path.is_dir() else npy_file(path)
    if kind == "npy-files":
        return FileRows(path)
    if kind == "csv":
        return csv_rows(path, fields=options.fields)
    return ParquetRows(parquet_files(path), fields=options.fields)


def _split_arrays(
    fields: dict[str, NDArray[Any]], *, held_out: float, seed: int, shuffle: bool
) -> dict[str, dict[str, NDArray[Any]]]:
    parts = split_rows(
        ArrayRows(arrays=fields), held_out=held_out, seed=seed, shuffle=shuffle, keep_order=False
    )
    return {
        part: fields if part == "all" and not shuffle else rows.read(np.arange(rows.num_samples))
        for part, rows in parts.items()
    }


def _digits() -> tuple[dict[str, NDArray[Any]], dict[str, JsonValue]]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError("the source 'digits' is part of scikit-learn: pip install scikit-learn") from error
    bunch = load_digits()
    images = bunch.images.astype(np.uint8)[:, None, :, :]  # (1797, 1, 8, 8), grey values 0 to 16
    return (
        {"image": images, "label": bunch.target.astype(np.int64)},
        {"source": "digits", "num_classes": 10},
    )
