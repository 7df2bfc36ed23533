"""Speed of reading samples, compared with peers and with raw reading."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from benchmarks.data.child import Child, peers_python
from benchmarks.data.kinds import Kind, kinds
from benchmarks.data.ours import write_compressed, write_shards
from benchmarks.harness import BUILD, Bench, Part, Suite
from benchmarks.results_file import Record, ratio_record
from benchmarks.results_page import markdown, spread
from hpctrain.bench.page_cache import cached_share, evict

OURS = ("ours", "ours-2-threads", "ours-map", "memmap", "memmap-buffer", "preadv")
OTHER_PROCESS = ("streaming", "webdataset")  # peers in the environment of their own
COLD_OURS = ("ours", "memmap", "preadv")
KINDS = ("images", "volumes", "tokens")
COMPRESSED = {"gzip-in-order": 16, "gzip-shuffled": 1}  # samples per chunk
SEED = 20


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the measurements. share: part of the datasets' full sizes. kinds, compressed: datasets of figure 1.
    cold_rounds: 0 for none."""

    share: float = 1.0
    kinds: tuple[str, ...] = KINDS
    compressed: tuple[str, ...] = tuple(COMPRESSED)
    warm_rounds: int = 5
    cold_rounds: int = 2
    num_steps: int = 30
    step_s: float = 0.1
    memory_shares: tuple[float, ...] = (0.5, 1.0, 2.0)
    prefetch_bytes: int = 64 << 20
    cache_bytes: int = 64 << 20


FULL = Scale()
QUICK = replace(
    FULL, share=0.04, warm_rounds=1, cold_rounds=1, num_steps=5, step_s=0.02, memory_shares=(0.05,)
)


# ---------------------------------------------------------------------- the records

Rates = Mapping[str, Sequence[float]]  # of a method: samples/s of each round

RAW = ("memmap", "preadv")
PEERS = ("h5py", "streaming", "webdataset")
IMAGE_BARS = (("a", "memmap", "raw memmap gather", 0.6), ("b", "h5py", "DataLoader + h5py, 2 workers", 20.0),
              ("c", "streaming", "MosaicML streaming, 2 workers", 20.0))  # fmt: skip


def speed_records(rates: Mapping[str, Rates], kinds: Mapping[str, Kind]) -> list[Record]:
    """Returns the records of figure 1 with a warm page cache, of the kinds that were measured.

    rates: kind -> method -> samples/s of each round; the kinds `gzip-in-order` and `gzip-shuffled` have a method
    `zlib`.
    """
    records = []
    if "images" in rates:
        for letter, method, label, bar in IMAGE_BARS:
            records.append(
                _ratio(f"data.1{letter}", what=f"images of 12 KB, shuffled, warm: hpctrain / {label}",
                       rates=rates["images"], ours="ours", other=method, bar=bar, all_of_them=letter == "a")
            )  # fmt: skip
    if "volumes" in rates:
        volumes = rates["volumes"]
        raw = max(RAW, key=lambda name: median(volumes[name]))
        records.append(
            _ratio("data.1d", what=f"volumes of 8 MB, shuffled, warm: hpctrain / raw {raw}", rates=volumes,
                   ours="ours", other=raw, bar=0.9, all_of_them=True)
        )  # fmt: skip
    if "tokens" in rates:
        window = kinds["tokens"].window
        records.append(
            Record(
                id="data.1e", what=f"windows of {window} tokens, shuffled, warm",
                value=median(rates["tokens"]["ours"]) * window / 1e6, bar=5.0, sense="at least",
                unit="million tokens/s",
                samples={"samples/s": {name: list(found) for name, found in rates["tokens"].items()}},
            )
        )  # fmt: skip
    for letter, name, words in (("f", "gzip-in-order", "16 samples per chunk, in order"),
                                ("g", "gzip-shuffled", "one sample per chunk, shuffled")):  # fmt: skip
        if name in rates:
            records.append(
                _ratio(f"data.1{letter}", what=f"gzip chunks, {words}: hpctrain / zlib alone on every core",
                       rates=rates[name], ours="ours", other="zlib", bar=0.8, all_of_them=True)
            )  # fmt: skip
    return records


def cold_records(rates: Mapping[str, Rates]) -> list[Record]:
    """Returns the records of figure 1 with a cold page cache. The bar, which no issue sets, is the fastest peer."""
    records = []
    for kind, of in rates.items():
        peer = max(PEERS, key=lambda name: median(of[name]))
        records.append(
            _ratio(f"data.1.cold.{kind}", what=f"{kind}, shuffled, cold: hpctrain / the best peer ({peer})",
                   rates=of, ours="ours", other=peer, bar=1.0, all_of_them=True)
        )  # fmt: skip
    return records


def _ratio(
    record_id: str, *, what: str, rates: Rates, ours: str, other: str, bar: float, all_of_them: bool
) -> Record:
    shown = rates if all_of_them else {name: rates[name] for name in (ours, other)}
    return ratio_record(
        record_id, what, rates[ours], rates[other], bar=bar, unit="samples/s / samples/s", of_medians=True,
        samples={"samples/s": {name: list(found) for name, found in shown.items()}},
    )  # fmt: skip


def wait_records(found: Mapping[str, Mapping[str, Any]], *, step_s: float, batch: int) -> list[Record]:
    """Returns the records of figure 2. found: kind -> `waits_s` of each step after the first, `first_s`."""
    return [
        Record(
            id=f"data.2{letter}", what=f"wait for a batch of {batch} {kind} / a step of {1000 * step_s:g} ms",
            value=fmean(of["waits_s"]) / step_s, bar=0.01, sense="at most", unit="s/s", samples=dict(of),
        )
        for letter, (kind, of) in zip("abcdef", found.items())  # noqa: B905
    ]  # fmt: skip


def memory_records(
    found: Mapping[str, Sequence[Mapping[str, int]]], *, prefetch_bytes: int, cache_bytes: int
) -> list[Record]:
    """Returns the records of figure 3, memory. found: I/O mode -> measurement of each size of dataset; the largest peak
    counts.

    Measurements of `map` are samples of the default's record, without a bar: mapped pages of the page cache count as
    the process's memory.
    """
    configured = prefetch_bytes + cache_bytes
    without_bar = {"map, no bar": [dict(one) for one in found["map"]]}
    return [
        Record(
            id=f"data.3{letter}",
            what=f"peak above the idle process / prefetch and cache bytes, largest of {len(found[mode])} sizes of "
            f"dataset, io {mode}",
            value=max(one["peak"] - one["idle"] for one in found[mode]) / configured, bar=1.1, sense="at most",
            unit="bytes/bytes",
            samples={
                "prefetch": prefetch_bytes, "cache": cache_bytes, "bytes": [dict(one) for one in found[mode]],
                **(without_bar if mode == "auto" else {}),
            },
        )
        for letter, mode in (("a", "auto"), ("b", "read"))
    ]  # fmt: skip


def order_records(found: Mapping[str, Any]) -> list[Record]:
    """Returns the records of figure 3, order of 10^9 samples on 65,536 ranks. found: `seconds` of each batch,
    `bytes`."""
    return [
        Record(
            id="data.3c", what="order of 10^9 samples on 65,536 ranks: time of a rank's batch",
            value=1000 * median(found["seconds"]), bar=1.0, sense="at most", unit="ms",
            samples={"seconds": list(found["seconds"])},
        ),
        Record(
            id="data.3d", what="order of 10^9 samples on 65,536 ranks: memory of a rank",
            value=found["bytes"] / 1e6, bar=1.0, sense="at most", unit="MB", samples={"bytes": found["bytes"]},
        ),
    ]  # fmt: skip


# ---------------------------------------------------------------------- the page

# Id of a record whose samples are the rates of all methods -> name of its table.
SPEEDS = {
    "data.1a": "warm.images", "data.1d": "warm.volumes", "data.1e": "warm.tokens", "data.1f": "warm.gzip-in-order",
    "data.1g": "warm.gzip-shuffled", "data.1.cold.images": "cold.images", "data.1.cold.volumes": "cold.volumes",
    "data.1.cold.tokens": "cold.tokens",
}  # fmt: skip


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tables of samples/s by method."""
    return {
        SPEEDS[record["id"]]: _rates(record["samples"]["samples/s"])
        for record in content["records"]
        if record["id"] in SPEEDS
    }


def _rates(rates: Mapping[str, Sequence[float]]) -> str:
    return markdown(
        ("", "samples/s, median", "slowest round", "fastest round"),
        (
            [name, *spread(rates[name], ",.0f")]
            for name in sorted(rates, key=lambda name: -median(rates[name]))
        ),
    )


# ---------------------------------------------------------------------- rounds

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
        for method in random.sample(methods, len(methods)):
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
        for method in random.sample(methods, len(methods)):
            files = [path for path in method.directory.rglob("*") if path.is_file()]
            method.child.open(method.name, kind, directory=method.directory)
            evict(files)
            cached = cached_share(files)
            if cached is None or cached > 0.01:
                say(f"{method.name}, {kind.name}: {cached or 0:.0%} of the files remained in the page cache")
            found[method.name].append(method.child.time(method.name, kind, epoch=1 + number, least_s=0.0))
            method.child.close_reader(method.name, kind)
    return found


# ---------------------------------------------------------------------- the suite

_OURS = partial(Child, Path(sys.executable), module="benchmarks.data.ours")


def speeds(bench: Bench) -> list[Record]:
    python = peers_python(getattr(bench.options, "peers", BUILD / "peers"))
    bench.say("the peers' environment is ready")
    scratch, scale, random = _scratch(bench), bench.scale, Random(SEED)
    of = kinds(share=scale.share)
    warm: dict[str, dict[str, list[float]]] = {}
    cold: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        ours = stack.enter_context(_OURS())
        h5py = stack.enter_context(Child(Path(sys.executable), module="benchmarks.data.h5py_loader"))
        peers = stack.enter_context(Child(python, module="benchmarks.data.peer_readers"))
        bench.about["versions"] |= peers.ask("versions", arguments={})
        for name in scale.kinds:
            kind, directory = of[name], scratch / name
            write_shards(kind, directory)
            others = [Method(name="h5py", child=h5py, directory=directory)]
            for peer in OTHER_PROCESS:
                there = scratch / f"{name}-{peer}"
                peers.ask("write", arguments={"method": peer, "kind": asdict(kind), "directory": str(there)})
                others.append(Method(name=peer, child=peers, directory=there))
            mine = {method: Method(name=method, child=ours, directory=directory) for method in OURS}
            warm[name] = warm_rounds(
                kind, [*mine.values(), *others], repeats=scale.warm_rounds, random=random
            )
            bench.say(f"{name}, warm")
            if scale.cold_rounds:
                methods = [*(mine[method] for method in COLD_OURS), *others]
                cold[name] = cold_rounds(
                    kind, methods, repeats=scale.cold_rounds, random=random, say=bench.say
                )
                bench.say(f"{name}, cold")
        for name in scale.compressed:
            directory = scratch / name
            write_compressed(of["gzip"], directory, chunk_samples=COMPRESSED[name])
            both = [
                Method(name="ours", child=ours, directory=directory),
                Method(name="zlib", child=ours, directory=directory, checks=False),
            ]
            warm[name] = warm_rounds(of["gzip"], both, repeats=scale.warm_rounds, random=random)
            bench.say(f"{name}, warm")
    return [*speed_records(warm, of), *cold_records(cold)]


def _waits(bench: Bench) -> list[Record]:
    """Measures figure 2: how long steps wait for their batches."""
    found, scratch, step_s = {}, _scratch(bench), bench.scale.step_s
    with _OURS() as ours:
        for name in ("images", "tokens"):
            write_shards(kinds(share=bench.scale.share)[name], scratch / name)
            asked = {"directory": str(scratch / name), "batch": 64, "step_s": step_s}
            found[name] = ours.ask("step_waits", arguments={**asked, "num_steps": bench.scale.num_steps})
    return wait_records(found, step_s=step_s, batch=64)


def _costs(bench: Bench) -> list[Record]:
    """Measures figure 3: peak memory, and the cost of the order."""
    scale, scratch = bench.scale, _scratch(bench)
    found: dict[str, list[dict[str, int]]] = {}
    for share in scale.memory_shares:
        directory = scratch / f"memory-{share:g}"
        write_shards(kinds(share=share)["images"], directory)
        for mode in ("auto", "read", "map"):
            asked = {
                "directory": str(directory), "batch": 64, "prefetch_bytes": scale.prefetch_bytes,
                "open_options": {"io": mode, "cache_bytes": scale.cache_bytes},
            }  # fmt: skip
            with _OURS() as alone:
                found.setdefault(mode, []).append(alone.ask("read_epoch", arguments=asked))
    bench.say("memory")
    asked = {"num_samples": 10**9, "num_ranks": 65_536, "batch": 64, "repeats": 200}
    with _OURS() as ours:
        order = ours.ask("order_cost", arguments=asked)
    memory = memory_records(found, prefetch_bytes=scale.prefetch_bytes, cache_bytes=scale.cache_bytes)
    return [*memory, *order_records(order)]


def _scratch(bench: Bench) -> Path:
    return bench.folder("data", within=getattr(bench.options, "scratch", BUILD))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scratch", type=Path, default=BUILD, metavar="DIR",
        help="directory on the filesystem to be measured; datasets of 3 GB are written there and removed at the end",
    )  # fmt: skip
    parser.add_argument(
        "--peers", type=Path, default=BUILD / "peers", metavar="DIR",
        help="the peers' Python environment; made if it is missing",
    )  # fmt: skip


SUITE = Suite(
    name="data", about=__doc__,
    parts=tuple(
        Part(figures=(number,), title="the whole figure", measure=measure)
        for number, measure in (("1", speeds), ("2", _waits), ("3", _costs))
    ),
    full=FULL, quick=QUICK, tables=tables, options=_options,
)  # fmt: skip
