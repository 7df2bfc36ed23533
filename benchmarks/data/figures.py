"""Converts measurements to records and defines their bars. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.data.kinds import Kind
from benchmarks.results_file import Record, over_rounds

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
                id="data.1e",
                what=f"windows of {window} tokens, shuffled, warm",
                value=median(rates["tokens"]["ours"]) * window / 1e6,
                bar=5.0,
                sense="at least",
                unit="million tokens/s",
                samples={"samples/s": {name: list(found) for name, found in rates["tokens"].items()}},
            )
        )
    for letter, name, words in (("f", "gzip-in-order", "16 samples a chunk, in order"),
                                ("g", "gzip-shuffled", "a sample a chunk, shuffled")):  # fmt: skip
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
    return Record(
        id=record_id,
        what=what,
        value=median(rates[ours]) / median(rates[other]),
        bar=bar,
        sense="at least",
        unit="samples/s / samples/s",
        samples={"samples/s": {name: list(found) for name, found in shown.items()}},
        **over_rounds(rates[ours], rates[other]),
    )


def wait_records(found: Mapping[str, Mapping[str, Any]], *, step_s: float, batch: int) -> list[Record]:
    """Returns the records of figure 2. found: kind -> `waits_s` of each step after the first, `first_s`."""
    return [
        Record(
            id=f"data.2{letter}",
            what=f"wait for a batch of {batch} {kind} / a step of {1000 * step_s:g} ms",
            value=sum(of["waits_s"]) / len(of["waits_s"]) / step_s,
            bar=0.01,
            sense="at most",
            unit="s/s",
            samples=dict(of),
        )
        for letter, (kind, of) in zip("abcdef", found.items())  # noqa: B905
    ]


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
            value=max(one["peak"] - one["idle"] for one in found[mode]) / configured,
            bar=1.1,
            sense="at most",
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
            id="data.3c",
            what="order of 10^9 samples on 65,536 ranks: time of a rank's batch",
            value=1000 * median(found["seconds"]),
            bar=1.0,
            sense="at most",
            unit="ms",
            samples={"seconds": list(found["seconds"])},
        ),
        Record(
            id="data.3d",
            what="order of 10^9 samples on 65,536 ranks: memory of a rank",
            value=found["bytes"] / 1e6,
            bar=1.0,
            sense="at most",
            unit="MB",
            samples={"bytes": found["bytes"]},
        ),
    ]
