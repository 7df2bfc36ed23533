"""Times all readers once per round, in another random order each round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.data.child import Child
from benchmarks.data.kinds import Kind
from hpctrain.bench.page_cache import cached_share, evict

# A measurement reads whole epochs until this time has passed.
LEAST_S = 0.4


@dataclass(frozen=True, kw_only=True)
class Method:
    """A reader: its process and its directory. checks: whether the samples that it reads are compared with those
    expected; False for a method that returns none."""

    name: str
    child: Child
    directory: Path
    checks: bool = True


def warm_rounds(
    kind: Kind, methods: Sequence[Method], *, repeats: int, random: Random
) -> dict[str, list[float]]:
    """Returns samples/s of each round, by method. Every method is checked first, which also warms the page cache."""
    found: dict[str, list[float]] = {method.name: [] for method in methods}
    for method in methods:
        method.child.open(method.name, kind, directory=method.directory)
    for method in methods:
        if method.checks:
            method.child.check(method.name, kind)
    for number in range(repeats):
        for method in _shuffled(methods, random):
            found[method.name].append(
                method.child.time(method.name, kind, epoch=1 + 100 * number, least_s=LEAST_S)
            )
    for method in methods:
        method.child.close_reader(method.name, kind)
    return found


def cold_rounds(
    kind: Kind, methods: Sequence[Method], *, repeats: int, random: Random, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Returns samples/s of each round, by method: of one epoch, with the files evicted from the page cache. No other
    process may have the files mapped, since mapped pages cannot be evicted."""
    found: dict[str, list[float]] = {method.name: [] for method in methods}
    for number in range(repeats):
        for method in _shuffled(methods, random):
            files = [path for path in method.directory.rglob("*") if path.is_file()]
            method.child.open(method.name, kind, directory=method.directory)
            evict(files)
            cached = cached_share(files)
            if cached is None or cached > 0.01:
                say(f"{method.name}, {kind.name}: {cached or 0:.0%} of the files remained in the page cache")
            found[method.name].append(method.child.time(method.name, kind, epoch=1 + number, least_s=0.0))
            method.child.close_reader(method.name, kind)
    return found


def _shuffled(methods: Sequence[Method], random: Random) -> list[Method]:
    order = list(methods)
    random.shuffle(order)
    return order
