"""Tables (CSV and Parquet) as sources. Columns become fields, and columns of strings become class indices."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from hpctrain.data.format.manifest import DTYPES, FieldSpec
from hpctrain.data.sources.row_source import ArrayRows, SampleRows, field_spec, files_below, source_identity
from hpctrain.errors import DataError, UsageError

CSV_SUFFIXES = frozenset({".csv", ".tsv"})
PARQUET_SUFFIXES = frozenset({".parquet", ".pq"})
_HELD_GROUPS = 4


@dataclass(frozen=True, kw_only=True)
class Column:
    """Defines a field that is made from one or several columns of a table. Several columns become a vector.

    `dtype` is the dtype of the field; None: the dtype that the columns have in the table.
    """

    columns: tuple[str, ...]
    dtype: str | None = None


def parse_table_fields(text: str) -> dict[str, Column]:
    """Returns the fields, by name, that a text such as `x=a+b:float32,y=species` defines.

    Raises UsageError if the text is not valid.
    """
    fields: dict[str, Column] = {}
    for item in text.split(","):
        name, equals, columns = item.partition("=")
        columns, _, dtype = columns.partition(":")
        names = tuple(part.strip() for part in columns.split("+"))
        if not equals or not name.strip() or not all(names):
            raise UsageError(
                f"--fields {text}: FIELD=COLUMN or FIELD=COLUMN+COLUMN:DTYPE is expected, separated by commas"
            )
        if dtype and dtype not in DTYPES:
            raise UsageError(f"--fields {text}: dtype {dtype} is not one of {', '.join(DTYPES)}")
        if name.strip() in fields:
            raise UsageError(f"--fields {text}: the field {name.strip()} is named twice")
        fields[name.strip()] = Column(columns=names, dtype=dtype or None)
    return fields


def csv_rows(path: Path, *, fields: Mapping[str, Column] | None) -> SampleRows:
    """Reads a whole CSV file into memory, and returns its rows as samples.

    `fields` states which columns make up each field, by field name; None: each column becomes a field. Raises DataError
    if the file cannot be read, lacks a column, or lacks a value in a column that is used.
    """
    try:
        import pandas
    except ImportError as error:
        raise DataError(f"CSV needs pandas ({error}): pip install hpctrain[formats]") from error
    try:
        frame = pandas.read_csv(path, sep="\t" if path.suffix.lower() == ".tsv" else ",")
    except FileNotFoundError:
        raise DataError(f"the source {path} does not exist") from None
    except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
        raise DataError(f"the source {path} cannot be read as CSV: {error}") from error
    if fields is None:
        fields = {_field_name(str(column)): Column(columns=(str(column),)) for column in frame.columns}
    frame.columns = frame.columns.map(str)
    _check_columns(path, fields=fields, present=list(frame.columns))
    columns, classes = {}, {}
    for column in {column for spec in fields.values() for column in spec.columns}:
        values = frame[column]
        missing = np.flatnonzero(values.isna().to_numpy())
        if len(missing) and values.dtype.kind != "f":
            raise _missing(path, column=column, row=int(missing[0]))
        if values.dtype.kind in "biuf":
            if len(missing):  # NaN of pandas means a missing value, also in columns of integers
                raise _missing(path, column=column, row=int(missing[0]))
            columns[column] = values.to_numpy()
        else:
            names = tuple(sorted({str(value) for value in values}))
            classes[column] = names
            columns[column] = _numbers(np.array([str(value) for value in values], dtype=object), names=names)
    arrays = {
        name: _joined([columns[c] for c in spec.columns], field=name, spec=spec)
        for name, spec in fields.items()
    }
    return ArrayRows(
        arrays=arrays,
        classes=_field_classes(fields, classes),
        identity=[source_identity([path]), _as_json(fields)],
    )


class ParquetRows:
    """Samples in Parquet files, one file after another. Each row is a sample.

    One row group at a time is read. The 4 row groups that were used last are kept in memory. `fields` states which
    columns make up each field, by field name; None: each column of the first file becomes a field. Raises DataError if
    a file cannot be read, or if there are no rows.
    """

    def __init__(self, files: Sequence[Path], *, fields: Mapping[str, Column] | None) -> None:
        parquet = _parquet()
        self._files = tuple(files)
        self._lock = threading.Lock()
        self._held: OrderedDict[int, dict[str, NDArray[Any]]] = OrderedDict()
        self._groups: list[tuple[int, int]] = []  # (file, row group) of each
        lengths = []
        for number, path in enumerate(files):
            try:
                opened = parquet.ParquetFile(path)
            except FileNotFoundError:
                raise DataError(f"the source {path} does not exist") from None
            except Exception as error:  # pyarrow's own, and OSError
                raise DataError(f"the source {path} cannot be read as Parquet: {error}") from error
            present = list(opened.schema_arrow.names)
            if fields is None:
                fields = {_field_name(column): Column(columns=(column,)) for column in present}
            _check_columns(path, fields=fields, present=present)
            for group in range(opened.num_row_groups):
                self._groups.append((number, group))
                lengths.append(opened.metadata.row_group(group).num_rows)
        self._starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        if not fields or not self._starts[-1]:
            raise DataError(f"the source {files[0]} holds no samples: there is nothing to pack")
        self._spec = dict(fields)
        self._columns = sorted({column for spec in fields.values() for column in spec.columns})
        self._classes = self._find_classes()
        first = self._group(int(np.flatnonzero(np.diff(self._starts))[0]))
        by_field = _field_classes(self._spec, self._classes)
        self._fields = {
            name: field_spec(name, dtype=array.dtype, shape=array.shape[1:], classes=by_field.get(name, ()))
            for name, array in first.items()
        }

    @property
    def num_samples(self) -> int:
        return int(self._starts[-1])

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        return self._fields

    @property
    def identity(self) -> JsonValue:
        return [source_identity(self._files), _as_json(self._spec)]

    def read(self, positions: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        out = {n: np.empty((len(positions), *spec.shape), spec.dtype) for n, spec in self._fields.items()}
        group_of = np.searchsorted(self._starts, positions, side="right") - 1
        for number in np.unique(group_of):
            places = np.flatnonzero(group_of == number)
            arrays = self._group(int(number))
            for name, array in out.items():
                if arrays[name].dtype != array.dtype or arrays[name].shape[1:] != array.shape[1:]:
                    raise DataError(
                        f"field {name!r} is {arrays[name].dtype} {arrays[name].shape[1:]} in "
                        f"{self._files[self._groups[number][0]]}, elsewhere {array.dtype} {array.shape[1:]}"
                    )
                array[places] = arrays[name][positions[places] - self._starts[number]]
        return out

    def _find_classes(self) -> dict[str, tuple[str, ...]]:
        """Returns for each column of strings the distinct strings over all files, sorted.

        This reads all columns of strings. They are read again when the samples are read.
        """
        import pyarrow

        schema = _parquet().ParquetFile(self._files[0]).schema_arrow
        found: dict[str, set[str]] = {}
        for column in self._columns:
            kind = schema.field(column).type
            kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
                found[column] = set()
        for number in range(len(self._groups)) if found else ():
            table = self._table(number, columns=list(found))
            for column, names in found.items():
                names.update(str(value) for value in table.column(column).unique().to_pylist())
        return {column: tuple(sorted(names)) for column, names in found.items()}

    def _table(self, number: int, *, columns: list[str]) -> Any:
        file, group = self._groups[number]
        path = self._files[file]
        try:
            table = _parquet().ParquetFile(path).read_row_group(group, columns=columns)
        except Exception as error:  # pyarrow's own, and OSError
            raise DataError(f"row group {group} of {path} cannot be read: {error}") from error
        for column in columns:
            values = table.column(column)
            if values.null_count:
                row = int(np.flatnonzero(values.is_null().to_numpy())[0])
                raise _missing(path, column=column, row=row, group=group)
        return table

    def _group(self, number: int) -> dict[str, NDArray[Any]]:
        """Reads one row group, and returns an array with all of its rows for each field.

        `number` is the index of the row group, counted over all files.
        """
        with self._lock:
            held = self._held.get(number)
            if held is None:
                table = self._table(number, columns=self._columns)
                path = self._files[self._groups[number][0]]
                columns = {c: self._values(table.column(c), column=c, path=path) for c in self._columns}
                held = {
                    name: _joined([columns[c] for c in spec.columns], field=name, spec=spec)
                    for name, spec in self._spec.items()
                }
                self._held[number] = held
                if len(self._held) > _HELD_GROUPS:
                    self._held.popitem(last=False)
            self._held.move_to_end(number)
            return held

    def _values(self, values: Any, *, column: str, path: Path) -> NDArray[Any]:
        if column in self._classes:
            return _numbers(np.array(values.to_pylist(), dtype=object), names=self._classes[column])
        array: NDArray[Any] = values.to_numpy()
        if array.dtype == object:  # lists, which must have equal lengths
            try:
                array = np.stack([np.stack(row) if row.dtype == object else row for row in array])
            except (ValueError, AttributeError, TypeError) as error:
                raise DataError(
                    f"column {column!r} of {path} is {values.type}: numbers, strings, and lists of one length "
                    f"can be packed ({error})"
                ) from None
        return array


def parquet_files(path: Path) -> list[Path]:
    """Returns the Parquet files of a directory, sorted. If `path` is not a directory, returns `path` itself.

    Raises DataError if a directory contains no Parquet files.
    """
    return files_below(path, suffixes=PARQUET_SUFFIXES) if path.is_dir() else [path]


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"Parquet needs pyarrow ({error}): pip install hpctrain[formats]") from error
    return pyarrow.parquet


def _check_columns(path: Path, *, fields: Mapping[str, Column], present: list[str]) -> None:
    for name, spec in fields.items():
        for column in spec.columns:
            if column not in present:
                raise DataError(
                    f"field {name!r} needs column {column!r}, {path} has {', '.join(present) or 'none'}"
                )


def _missing(path: Path, *, column: str, row: int, group: int | None = None) -> DataError:
    where = f"row {row}" + ("" if group is None else f" of row group {group}")
    return DataError(
        f"column {column!r} of {path} has no value in {where}: fill it or leave the row out first"
    )


def _numbers(values: NDArray[Any], *, names: tuple[str, ...]) -> NDArray[np.int64]:
    by_name = {name: number for number, name in enumerate(names)}
    return np.array([by_name[str(value)] for value in values], dtype=np.int64)


def _joined(columns: Sequence[NDArray[Any]], *, field: str, spec: Column) -> NDArray[Any]:
    try:
        array = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
        return array if spec.dtype is None else array.astype(spec.dtype)
    except (ValueError, TypeError) as error:
        raise DataError(f"columns {'+'.join(spec.columns)} cannot become field {field!r}: {error}") from None


def _field_classes(
    fields: Mapping[str, Column], classes: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Returns the names of the classes of each field that is a column of strings.

    `classes` are the names of the classes by column. Raises DataError if a field of several columns includes a column
    of strings.
    """
    found = {}
    for name, spec in fields.items():
        named = [column for column in spec.columns if column in classes]
        if named and len(spec.columns) > 1:
            raise DataError(
                f"field {name!r} joins {', '.join(spec.columns)}, but {named[0]} holds strings: only columns of "
                "numbers can be joined"
            )
        if named:
            found[name] = classes[named[0]]
    return found


def _field_name(column: str) -> str:
    name = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "_" for c in column)
    return name.lstrip(".-") or "x"


def _as_json(fields: Mapping[str, Column]) -> JsonValue:
    return {name: [*spec.columns, spec.dtype or ""] for name, spec in fields.items()}
