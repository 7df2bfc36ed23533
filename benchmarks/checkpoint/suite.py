"""Speed of saving and loading checkpoints, compared with peers and with the disk."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.harness import BUILD, Bench, Part, Suite
from benchmarks.results_file import Record, Sense, ratio_record
from benchmarks.results_page import markdown, spread

MODULE = "benchmarks.checkpoint.ranks"
SEED = 20
NUM_TENSORS = 32
SMALL_TENSORS, SMALL_BYTES = 10_000, 4096
ALL_PEERS = ("dcp", "dcp, no fsync", "torch.save", "safetensors", "h5py mpio")
FEW_PEERS = ("dcp", "dcp, no fsync")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the measurements. rounds: of figures whose bar is set by an issue, at least 7. few_rounds: of others."""

    num_bytes: int = 512 << 20
    large_bytes: int = 2 << 30
    small_tensors: int = SMALL_TENSORS
    rounds: int = 9
    # Of short measurements that vary more from round to round than they differ from their bar.
    small_rounds: int = 21
    cold_rounds: int = 21
    few_rounds: int = 3
    steps_rounds: int = 5
    replica_rounds: int = 41  # many, since the difference is smaller than that between rounds
    limit_mb_per_s: float = 50.0


FULL = Scale()
QUICK = replace(
    FULL, num_bytes=16 << 20, large_bytes=32 << 20, small_tensors=200, rounds=2, small_rounds=2, cold_rounds=2,
    few_rounds=1, steps_rounds=1, replica_rounds=2, limit_mb_per_s=20.0,
)  # fmt: skip


# ---------------------------------------------------------------------- the records

Seconds = Mapping[str, Sequence[float]]  # method -> seconds of each round

OURS, IN_RUN = "save, auto", "save in a run, auto"
RAW_WRITE, RAW_READ, LOAD = "raw write", "raw read", "load, verified"
LIMIT = "disk, O_DIRECT"
ASYNC, DCP_ASYNC = "save async, auto", "dcp async"
DCP, DCP_UNSAFE = "dcp", "dcp, no fsync"
OTHERS = {"1-rank": "512 MiB, 1 rank", "4-ranks": "512 MiB, 4 ranks on 2 cores", "2gib": "2 GiB, 2 ranks"}


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
        alone = f"{what}, into new blocks: hpctrain / the disk alone"
        made.append(_ratio("checkpoint.1a.limit", alone, seconds, (OURS, LIMIT), 0.85))
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
    return ratio_record(
        "checkpoint.3a", "async, 512 MiB, 2 ranks: time in which training is blocked / memcpy of a rank's share",
        found["stalls"][ASYNC], found["seconds"]["memcpy"], bar=1.3, sense="at most", unit="s/s", samples=dict(found),
    )  # fmt: skip


def memory_record(found: Mapping[str, Sequence[Mapping[str, int]]]) -> Record:
    """Returns the record of figure 3 on memory. found: `ours` and `dcp` -> `ranks` of `background.memory`."""
    return Record(
        id="checkpoint.3b",
        what="async: peak memory above the training process / a rank's share, on the rank with most",
        value=max((rank["peak"] - rank["idle"]) / rank["share"] for rank in found["ours"]), bar=1.05,
        sense="at most", unit="bytes/bytes",
        samples={"bytes": {name: [dict(rank) for rank in ranks] for name, ranks in found.items()}},
    )  # fmt: skip


def steps_records(found: Mapping[str, Sequence[Mapping[str, Any]]], *, limit_mb_per_s: float) -> list[Record]:
    """Returns the records of figure 3 on training steps. found: see `background.steps`; its methods are `free` (no
    limit), `limited` and `dcp async`.

    One of the two records has to hold: steps at most 10% slower without a limit, or with one.
    """
    return [
        Record(
            id=f"checkpoint.3{letter}", what=f"async: a training step during the writing / a step alone, {label}",
            value=median(fmean(one["beside"]) / fmean(one["quiet"]) for one in found[name]), bar=1.1,
            sense="at most", unit="s/s",
            samples={"seconds": {method: [dict(one) for one in rounds] for method, rounds in found.items()}}
            if name == "free"
            else {"limit_mb_per_s": limit_mb_per_s, "seconds": {name: [dict(one) for one in found[name]]}},
        )
        for letter, name, label in (
            ("c", "free", "without a limit"),
            ("d", "limited", f"at {limit_mb_per_s:g} MB/s per rank"),
        )
    ]  # fmt: skip


def replica_record(seconds: Seconds) -> Record:
    """Returns the record of figure 4. seconds: method of comparing replicas -> seconds of each save."""
    sampled, off = (f"{IN_RUN}, replicas {how}" for how in ("sampled", "off"))
    return _ratio(
        "checkpoint.4a", "512 MiB, 2 ranks, in a run: time of a save, replicas compared by samples / not compared",
        seconds, (off, sampled), 1.03, sense="at most", unit="s/s",
    )  # fmt: skip


def _ratio(
    record_id: str, what: str, seconds: Seconds, pair: tuple[str, str], bar: float, *, sense: Sense = "at least",
    unit: str = "bytes/s / bytes/s",
) -> Record:  # fmt: skip
    """Returns the record of a ratio of seconds. pair: (a, b); the value is the median of b's seconds over a's."""
    ours, other = pair
    return ratio_record(
        record_id, what, seconds[other], seconds[ours], bar=bar, sense=sense, unit=unit,
        samples={"seconds": {name: list(found) for name, found in seconds.items()}},
    )  # fmt: skip


# ---------------------------------------------------------------------- the page

# Id of a record whose samples are the seconds of all methods -> name of its table, bytes of the state.
TABLES = {
    "checkpoint.1a": ("saves.512mib", 512 << 20), "checkpoint.1d": ("saves.small", 10_000 * 4096),
    "checkpoint.1d.beside": ("saves.small-beside", 10_000 * 4096),
    "checkpoint.1.1-rank": ("saves.1-rank", 512 << 20), "checkpoint.1.4-ranks": ("saves.4-ranks", 512 << 20),
    "checkpoint.1.2gib": ("saves.2gib", 2 << 30), "checkpoint.2a": ("loads.warm", 512 << 20),
    "checkpoint.2b": ("loads.cold", 512 << 20), "checkpoint.2c": ("loads.peers", 512 << 20),
    "checkpoint.4a": ("saves.replicas", 512 << 20),
}  # fmt: skip


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    samples = {record["id"]: record["samples"] for record in content["records"]}
    found = {
        table: _times(samples[name]["seconds"], num_bytes=num_bytes)
        for name, (table, num_bytes) in TABLES.items()
        if name in samples
    }
    if "checkpoint.3a" in samples:
        found["stalls"] = _table_of_stalls(samples["checkpoint.3a"])
    if "checkpoint.3b" in samples:
        found["memory"] = _table_of_memory(samples["checkpoint.3b"]["bytes"])
    if "checkpoint.3c" in samples:
        found["steps"] = _table_of_steps(samples["checkpoint.3c"]["seconds"])
    return found


def _ms(seconds: Sequence[float]) -> list[float]:
    return [1e3 * value for value in seconds]


def _times(seconds: Mapping[str, Sequence[float]], *, num_bytes: int) -> str:
    return markdown(
        ("", "ms, median", "fastest round", "slowest round", "MB/s, median"),
        (
            [name, *spread(_ms(seconds[name]), ",.0f"), f"{num_bytes / median(seconds[name]) / 1e6:,.0f}"]
            for name in sorted(seconds, key=lambda name: median(seconds[name]))
        ),
    )


def _table_of_stalls(samples: Mapping[str, Any]) -> str:
    copies = ["memcpy of a rank's share", *spread(_ms(samples["seconds"]["memcpy"]), ",.1f"), ""]
    return markdown(
        ("", "training blocked, ms, median", "least", "most", "until it is saved, ms"),
        [
            copies,
            *(
                [name, *spread(_ms(found), ",.1f"), f"{1e3 * median(samples['seconds'][name]):,.0f}"]
                for name, found in samples["stalls"].items()
            ),
        ],
    )


def _table_of_memory(ranks_by_method: Mapping[str, Sequence[Mapping[str, int]]]) -> str:
    return markdown(
        ("", "a rank's share, MB", "above the process before, MB, by rank"),
        (
            [
                name,
                f"{ranks[0]['share'] / 1e6:,.0f}",
                ", ".join(f"{(rank['peak'] - rank['idle']) / 1e6:,.0f}" for rank in ranks),
            ]
            for name, ranks in ranks_by_method.items()
        ),
    )


def _table_of_steps(rounds_by_method: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    rows = []
    for name, rounds in rounds_by_method.items():
        quiet, during = ([fmean(one[kind]) for one in rounds] for kind in ("quiet", "beside"))
        slower = median(b / q - 1 for b, q in zip(during, quiet, strict=True))
        added = median(
            sum(one["beside"]) - q * len(one["beside"]) for one, q in zip(rounds, quiet, strict=True)
        )
        saved = median(one["save"] for one in rounds)
        rows.append(
            [name, f"{1e3 * median(quiet):.1f}", f"{1e3 * median(during):.1f}", f"{slower:.0%}", f"{1e3 * saved:,.0f}",
             f"{1e3 * added:,.0f}"]
        )  # fmt: skip
    return markdown(
        (
            "",
            "step alone, ms",
            "step during a save, ms",
            "slower",
            "until it is saved, ms",
            "added by a save, ms",
        ),
        rows,
    )


# ---------------------------------------------------------------------- the suite


def measured(
    bench: Bench, case: str, *, title: str, num_ranks: int = 2, repeats: int | None = None, warmup: int = 1,
    **more: Any,
) -> Any:  # fmt: skip
    """Returns what a case found, of a state of `bench.scale.num_bytes` if `more` says nothing else."""
    scale = bench.scale
    settings = {"num_bytes": scale.num_bytes, "num_tensors": NUM_TENSORS, "seed": SEED, "warmup": warmup,
                "repeats": repeats if repeats is not None else scale.rounds, **more}  # fmt: skip
    place = bench.one_node(MODULE, num_ranks=num_ranks, variables={"OMP_NUM_THREADS": "1"})
    scratch: Path = getattr(bench.options, "directory", BUILD)
    scratch.mkdir(parents=True, exist_ok=True)
    found = place.run(case, settings, timeout_s=300.0, scratch=scratch)
    bench.say(title)
    return found


def saves(bench: Bench) -> list[Record]:
    """Measures figure 1: saving, by hpctrain and peers."""
    scale = bench.scale
    main = main_saves(bench, peers=ALL_PEERS, engines=("auto", "direct", "mpio"))
    total = scale.small_tensors * SMALL_BYTES
    small = {"num_bytes": total, "tensors": {"many": scale.small_tensors, "few": NUM_TENSORS}}
    # hpctrain's saves first without a peer: the state in which a peer leaves the machine's memory slows the next save
    # by more than the difference measured here.
    alone = measured(
        bench, "small_saves", title="saving many small tensors", peers=(), repeats=scale.small_rounds, **small
    )
    beside = measured(bench, "small_saves", title="the same with DCP", peers=["dcp"], **small)
    few: dict[str, Any] = {"peers": FEW_PEERS, "engines": ["auto"], "repeats": scale.few_rounds}
    others = {
        "1-rank": measured(bench, "saves", title="saving, 1 rank", num_ranks=1, **few),
        "4-ranks": measured(bench, "saves", title="saving, 4 ranks", num_ranks=4, **few),
        "2gib": measured(bench, "saves", title="saving, 2 GiB", **few, num_bytes=scale.large_bytes),
    }
    what = f"{scale.small_tensors:,} tensors of 4 KiB, 2 ranks"
    return [*main, *small_records(alone, beside, what=what), *other_records(others)]


def main_saves(bench: Bench, *, peers: Sequence[str], engines: Sequence[str]) -> list[Record]:
    """Measures the part of figure 1 with 2 ranks and the state's full size."""
    return save_records(measured(bench, "saves", title="saving, 2 ranks", peers=peers, engines=engines))


def loads(bench: Bench) -> list[Record]:
    """Measures figure 2: loading, by hpctrain and peers."""
    # hpctrain and raw reading without peers in the process: after a peer, whether huge pages are available depends on
    # the state in which it left the memory.
    touched = {"touched_bytes": 6 * bench.scale.num_bytes}
    warm = measured(bench, "loads", title="loading, warm", cold=False, peers=(), **touched)
    with_peers = loads_with_peers(bench, peers=("dcp", "torch.save", "safetensors", "h5py mpio"))
    cold = measured(
        bench, "loads", title="loading, cold", cold=True, peers=(), repeats=bench.scale.cold_rounds, warmup=0,
        **touched,
    )  # fmt: skip
    return [*load_records(warm, cold), with_peers]


def loads_with_peers(bench: Bench, *, peers: Sequence[str]) -> Record:
    """Measures loading from the page cache, in turn with peers."""
    touched_bytes = 6 * bench.scale.num_bytes
    title = "loading, alternating with peers"
    return load_with_peers_record(
        measured(bench, "loads", title=title, cold=False, peers=peers, touched_bytes=touched_bytes)
    )


def stalls(bench: Bench) -> Record:
    """Measures the time for which a background save blocks training."""
    title = "time in which training is blocked"
    return stall_record(measured(bench, "stalls", title=title, repeats=bench.scale.small_rounds))


def background(bench: Bench) -> list[Record]:
    """Measures figure 3: saving in the background."""
    scale, stall = bench.scale, stalls(bench)
    memory = {
        what: measured(bench, "memory", title=f"memory, {what}", what=what, saves=3)["ranks"]
        for what in ("ours", "dcp")
    }
    limits = {"free": None, "limited": scale.limit_mb_per_s, "dcp async": None}
    title = "training steps during the writing"
    steps = measured(bench, "steps", title=title, limits=limits, repeats=scale.steps_rounds)
    return [stall, memory_record(memory), *steps_records(steps, limit_mb_per_s=scale.limit_mb_per_s)]


def replicas(bench: Bench) -> list[Record]:
    """Measures figure 4: comparing replicas in a save."""
    title = "comparing replicas"
    return [replica_record(measured(bench, "replica_saves", title=title, repeats=bench.scale.replica_rounds))]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--directory", type=Path, default=BUILD, metavar="DIR",
        help="directory on the filesystem to be measured; at most 4 GB are written there and removed at the end",
    )  # fmt: skip


SUITE = Suite(
    name="checkpoint", about=__doc__,
    parts=tuple(
        Part(figures=(number,), title="the whole figure", measure=measure)
        for number, measure in (("1", saves), ("2", loads), ("3", background), ("4", replicas))
    ),
    full=FULL, quick=QUICK, tables=tables, options=_options, packages=("safetensors", "h5py"),
)  # fmt: skip
