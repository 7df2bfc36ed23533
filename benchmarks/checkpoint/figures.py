"""Converts measurements to records and defines their bars. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

from benchmarks.results_file import Record, over_rounds

Seconds = Mapping[str, Sequence[float]]  # method -> seconds of each round

OURS, IN_RUN = "save, auto", "save in a run, auto"
RAW_WRITE, RAW_READ, LOAD = "raw write", "raw read", "load, verified"
LIMIT = "disk, O_DIRECT"
ASYNC, DCP_ASYNC = "save async, auto", "dcp async"
DCP, DCP_UNSAFE = "dcp", "dcp, no fsync"
OTHERS = {"1-rank": "512 MiB, 1 rank", "4-ranks": "512 MiB, 4 ranks on 2 cores", "2gib": "2 GiB, 2 ranks"}


def speed_ratio(seconds: Seconds, *, of: str, to: str) -> float:
    """Returns how many times as fast as method `to` method `of` is: the median of the rounds' ratios."""
    return median(other / own for own, other in zip(seconds[of], seconds[to], strict=True))


def save_records(seconds: Seconds, *, what: str = "512 MiB, 2 ranks") -> list[Record]:
    """Returns the records of figure 1: hpctrain compared with raw writing, with the disk alone if that was measured,
    and with DCP, which by default flushes its files, with and without flushing. hpctrain's saves are those of a run
    from the third one on, which reuse disk blocks (`in a run`), and saves into newly allocated blocks (`into new
    room`)."""
    made = [
        _ratio(
            f"checkpoint.1{letter}{suffix}", f"{what}{how}: hpctrain / {other}", seconds, (ours, name), bar
        )
        for suffix, how, ours in (("", ", in a run", IN_RUN), (".new", ", into new blocks", OURS))
        for letter, other, name, bar in (
            ("a", "raw pwrite + fsync", RAW_WRITE, 0.85),
            ("b", "torch DCP as it comes", DCP, 1.5),
            ("c", "torch DCP without fsync", DCP_UNSAFE, 1.5),
        )
    ]
    if LIMIT in seconds:
        made.append(
            _ratio(
                "checkpoint.1a.limit",
                f"{what}, into new blocks: hpctrain / the disk alone",
                seconds,
                (OURS, LIMIT),
                0.85,
            )
        )
    return made


def small_records(alone: Seconds, with_peer: Seconds, *, what: str) -> list[Record]:
    """Returns the records of figure 1 for many small tensors. alone, with_peer: seconds of `save, auto, many` and
    `save, auto, few`; in `with_peer` saves of DCP alternated with them in the same processes. The bars are equal."""
    many, few = f"{OURS}, many", f"{OURS}, few"
    return [
        _ratio("checkpoint.1d", f"{what}, alone: time of a save / the same bytes in 32 tensors", alone, (few, many),
               1.5, sense="at most", unit="s/s"),
        _ratio("checkpoint.1d.beside", f"{what}: the same, alternating with DCP's saves", with_peer, (few, many), 1.5,
               sense="at most", unit="s/s"),
        _ratio("checkpoint.1.small", f"{what}: hpctrain / torch DCP as it comes", with_peer, (many, f"{DCP}, many"),
               1.0),
    ]  # fmt: skip


def other_records(by_case: Mapping[str, Seconds]) -> list[Record]:
    """Returns the records of figure 1 at other sizes and numbers of ranks (`OTHERS`). The bar, which no issue sets, is
    the fastest peer."""
    records = []
    for case, seconds in by_case.items():
        rest = [name for name in seconds if name not in (RAW_WRITE, LIMIT) and not name.startswith("save")]
        peer = min(rest, key=lambda name: median(seconds[name]))
        records.append(
            _ratio(f"checkpoint.1.{case}", f"{OTHERS[case]}, in a run: hpctrain / the fastest peer ({peer})",
                   seconds, (IN_RUN, peer), 1.0)
        )  # fmt: skip
    return records


def load_records(warm: Seconds, cold: Seconds) -> list[Record]:
    """Returns the records of figure 2 that have no peers."""
    return [
        _ratio(f"checkpoint.2{letter}", f"load of 512 MiB with verification, 2 ranks, {label}: hpctrain / raw read",
               seconds, (LOAD, RAW_READ), 0.8)
        for letter, label, seconds in (("a", "in the page cache", warm), ("b", "cold", cold))
    ]  # fmt: skip


def load_with_peers_record(seconds: Seconds) -> Record:
    """Returns the record of figure 2 on peers. seconds: of warm loads that alternated with theirs."""
    what = "load of 512 MiB with verification, 2 ranks, in the page cache: hpctrain / torch DCP"
    return _ratio("checkpoint.2c", what, seconds, (LOAD, "dcp"), 1.0)


def stall_record(found: Mapping[str, Any]) -> Record:
    """Returns the record of figure 3 on stalls. found: see `background.stalls`."""
    copies = found["seconds"]["memcpy"]
    return Record(
        id="checkpoint.3a",
        what="async, 512 MiB, 2 ranks: time in which training is blocked / memcpy of a rank's share",
        value=median(s / copy for s, copy in zip(found["stalls"][ASYNC], copies, strict=True)),
        bar=1.3,
        sense="at most",
        unit="s/s",
        samples=dict(found),
        **over_rounds(found["stalls"][ASYNC], copies),
    )


def memory_record(found: Mapping[str, Sequence[Mapping[str, int]]]) -> Record:
    """Returns the record of figure 3 on memory. found: `ours` and `dcp` -> `ranks` of `background.memory`."""
    return Record(
        id="checkpoint.3b",
        what="async: peak memory above the training process / a rank's share, on the rank with most",
        value=max((rank["peak"] - rank["idle"]) / rank["share"] for rank in found["ours"]),
        bar=1.05,
        sense="at most",
        unit="bytes/bytes",
        samples={"bytes": {name: [dict(rank) for rank in ranks] for name, ranks in found.items()}},
    )


def steps_records(found: Mapping[str, Sequence[Mapping[str, Any]]], *, limit_mb_per_s: float) -> list[Record]:
    """Returns the records of figure 3 on training steps. found: see `background.steps`; its methods are `free` (no
    limit), `limited` and `dcp async`.

    One of the two records has to hold: steps at most 10% slower without a limit, or with one.
    """
    return [
        Record(
            id=f"checkpoint.3{letter}",
            what=f"async: a training step during the writing / a step alone, {label}",
            value=median(_mean(one["beside"]) / _mean(one["quiet"]) for one in found[name]),
            bar=1.1,
            sense="at most",
            unit="s/s",
            samples={"seconds": {method: [dict(one) for one in rounds] for method, rounds in found.items()}}
            if name == "free"
            else {"limit_mb_per_s": limit_mb_per_s, "seconds": {name: [dict(one) for one in found[name]]}},
        )
        for letter, name, label in (
            ("c", "free", "without a limit"),
            ("d", "limited", f"at {limit_mb_per_s:g} MB/s a rank"),
        )
    ]


def replica_record(seconds: Seconds) -> Record:
    """Returns the record of figure 4. seconds: method of comparing replicas -> seconds of each save."""
    sampled, off = (f"{IN_RUN}, replicas {how}" for how in ("sampled", "off"))
    return _ratio(
        "checkpoint.4a", "512 MiB, 2 ranks, in a run: time of a save, replicas compared by samples / not compared",
        seconds, (off, sampled), 1.03, sense="at most", unit="s/s",
    )  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _ratio(
    record_id: str,
    what: str,
    seconds: Seconds,
    pair: tuple[str, str],
    bar: float,
    *,
    sense: Literal["at most", "at least"] = "at least",
    unit: str = "bytes/s / bytes/s",
) -> Record:
    """Returns the record of a ratio of seconds. pair: (a, b); the value is the median of b's seconds over a's."""
    samples: dict[str, Any] = {"seconds": {name: list(found) for name, found in seconds.items()}}
    return Record(
        id=record_id, what=what, value=speed_ratio(seconds, of=pair[0], to=pair[1]), bar=bar, sense=sense,
        unit=unit, samples=samples, **over_rounds(seconds[pair[1]], seconds[pair[0]]),
    )  # fmt: skip
