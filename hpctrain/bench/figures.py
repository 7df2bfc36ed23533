"""Parses and formats sizes in bytes, computes median and spread of repeated measurements, and makes tables."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from hpctrain.errors import UsageError

# Parses and prints sizes in bytes, as in `4KB` or `64MiB`.


# As everywhere in hpctrain, KB is 10^3 bytes; K is 2^10, as in the options of nccl-tests and of OSU.
_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9,
    "K": 2**10, "M": 2**20, "G": 2**30,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
RANGE_FACTOR = 4


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parses `4KB,1MB`, or a range `4KB:64MB`, `4KB:64MB:2`. Returns sizes in bytes, ascending, without duplicates.

    A range is geometric: each size is the previous one times the factor (default 4); the end is included. Raises
    UsageError for other texts.
    """
    sizes: set[int] = set()
    for part in text.split(","):
        if ":" in part:
            sizes.update(_range(part))
        else:
            sizes.add(parse_size(part))
    return tuple(sorted(sizes))


def parse_size(text: str, *, rounds_down: bool = False) -> int:
    """Returns the bytes of `4096`, `4KB` (10^3), `4KiB` or `4K` (2^10). Raises UsageError for other texts.

    rounds_down: True: a size that is not an integer number of bytes, such as `79.2GiB`, is rounded down. False: such a
    size is refused.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(
            f"{text.strip()!r} is no size: write 4096, 4KB or 1.5MB (10^3, 10^6 bytes), 4KiB or 4K (2^10 bytes), "
            "several separated by commas, or a range 4KB:64MB"
        )
    size = float(match[1]) * _UNITS[match[2].upper()]
    if rounds_down and size >= 1:
        size = math.floor(size)
    if size != int(size) or size < 1:
        raise UsageError(f"{text.strip()!r} is {size:g} bytes: a size is a whole number of bytes, at least 1")
    return int(size)


def _range(text: str) -> list[int]:
    parts = text.split(":")
    if len(parts) > 3:
        raise UsageError(f"{text!r} is no range of sizes: write FIRST:LAST, or FIRST:LAST:FACTOR")
    first, last = parse_size(parts[0]), parse_size(parts[1])
    factor: float = RANGE_FACTOR
    if len(parts) == 3:
        try:
            factor = float(parts[2])
        except ValueError:
            factor = 0.0
    if last < first or not 1.1 <= factor < 1e6:
        raise UsageError(
            f"{text!r} is no range of sizes: the last must be at least the first, and the factor (default "
            f"{RANGE_FACTOR}) a number from 1.1"
        )
    sizes = []
    size = float(first)
    while size < last:
        sizes.append(round(size))
        size *= factor
    return [*sizes, last]


def describe_bytes(num_bytes: float) -> str:
    """Returns a size as text, such as `4 KB` or `1.02 MB`.

    A whole number (below 1024) of KiB, MiB or GiB is shown in that unit, such as `64 MiB`, unless the size is also a
    multiple of 1000 bytes.
    """
    if num_bytes >= 1024 and num_bytes == int(num_bytes):
        for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if num_bytes % unit == 0 and num_bytes // unit < 1024 and num_bytes % 1000 != 0:
                return f"{num_bytes // unit:.0f} {name}"
    for scale, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {name}"
    return f"{num_bytes:.4g} B"


# Median and spread of repeated measurements.


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The median, quartiles, minimum and maximum of `count` samples, in the samples' unit."""

    median: float
    q1: float
    q3: float
    min: float
    max: float
    count: int

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def spread_of(samples: Sequence[float]) -> Spread:
    """Returns the spread of `samples`. Quantiles are interpolated linearly (numpy's default).

    Raises ValueError if there are no samples.
    """
    if not samples:
        raise ValueError("there are no samples: give at least one")
    ordered = sorted(samples)
    return Spread(
        median=_quantile(ordered, 0.5),
        q1=_quantile(ordered, 0.25),
        q3=_quantile(ordered, 0.75),
        min=ordered[0],
        max=ordered[-1],
        count=len(ordered),
    )


def describe_spread(spread: Spread, show: Callable[[float], str]) -> str:
    """Returns median and quartiles as text, such as `12.1 (11.8-12.9)`; only the value if there is a single sample."""
    if spread.count == 1:
        return show(spread.median)
    return f"{show(spread.median)} ({show(spread.q1)}-{show(spread.q3)})"


def describe_ms(seconds: Spread) -> str:
    """Returns median and quartiles of seconds as text in ms."""
    return describe_spread(seconds, lambda value: show_number(1e3 * value))


def show_number(value: float) -> str:
    """Returns a number as text with at least three significant digits, at most six decimals and no exponent.

    Examples: `0.0123`, `12.3`, `1,234`.
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


# Tables of measurements for the terminal.


def empty_table(title: str, columns: Sequence[str], *, texts: Collection[str] = ()) -> Table:
    """Returns a table without rows. Columns are aligned as numbers, except those in `texts`; no cell is wrapped."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in texts else "right", no_wrap=True)
    return table
