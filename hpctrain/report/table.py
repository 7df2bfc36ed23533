"""Tables whose values stay numbers until they are written. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Value = str | float | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table: a name and a value for each column.

    format: a format specification for numbers, as ".1%"; text is shown as it is, None as a dash. indent: depth below
    the row above.
    """

    name: str
    values: Sequence[Value]
    format: str = ""
    unit: str = ""
    indent: int = 0

    def shown(self) -> list[str]:
        """Returns the values as a reader sees them."""
        return [_shown(value, self.format) for value in self.values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """name: for files, in lower case with hyphens. columns: their heads; head: of the rows' names."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    note: str = ""
    head: str = ""


def _shown(value: Value, specification: str) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    return format(value, specification)
