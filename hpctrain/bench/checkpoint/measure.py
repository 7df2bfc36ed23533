"""`hpctrain bench checkpoint`: times saving and loading state, and plain writes and reads of the same bytes."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from socket import gethostname
from statistics import median
from typing import Any, get_args

import psutil
from rich.table import Table

from hpctrain.bench.checkpoint.methods import (
    COPY,
    AsyncSaving,
    BenchState,
    Copying,
    Loading,
    MethodTime,
    RawReading,
    RawShare,
    RawWriting,
    RunSaving,
    SyncSaving,
    TimedMethod,
    make_state,
)  # fmt: skip
from hpctrain.bench.document import document_head
from hpctrain.bench.figures import Spread, describe_bytes, describe_ms, empty_table, show_number, spread_of
from hpctrain.bench.page_cache import Cache
from hpctrain.checkpoint import PageCache, SaveMode, engine_named
from hpctrain.comm import Collective, agreed, all_gather_json
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.run import Session, environment_record

# Memory of a rank in multiples of the state: the state, the copy that is read into new memory, and a reserve.
MEMORY_COPIES = 2.2
# Maximum number of files of the state's size at one time: two to read from and one being written; and for each engine
# the two that a run keeps between its saves.
FILES_AT_ONCE, FILES_OF_RUN = 3, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointAsked:
    """The settings of the measurement. Raises UsageError for values out of range.

    num_bytes: the size of the state, which every rank holds completely.
    engines: names of `hpctrain.checkpoint.Engine`.
    """

    num_bytes: int = 512 << 20
    num_tensors: int = 32
    engines: tuple[str, ...] = ("auto",)
    modes: tuple[SaveMode, ...] = tuple(SaveMode)
    page_cache: PageCache = "auto"
    repeats: int = 7
    warmup: int = 1
    cache: Cache = Cache.WARM
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--tensors", self.num_tensors, 1), ("--repeats", self.repeats, 1), ("--warmup", self.warmup, 0),
            ("the number of engines", len(self.engines), 1), ("the number of modes", len(self.modes), 1),
        ):  # fmt: skip
            if value < least:
                raise UsageError(f"{name} is {value}: at least {least} is needed")
        if self.num_bytes < 4 * self.num_tensors:
            raise UsageError(
                f"{self.num_bytes} bytes cannot be {self.num_tensors} tensors of float32: give at least "
                f"{4 * self.num_tensors} bytes, or fewer tensors"
            )
        for engine in self.engines:
            engine_named(engine)
        if self.page_cache not in get_args(PageCache):
            raise UsageError(
                f"--page-cache {self.page_cache!r} is not one of {', '.join(get_args(PageCache))}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRow:
    """A row of the table.

    Attributes:
        raw: The name of the plain method with which this method is compared; None for a plain method.
        seconds: The seconds of the slowest rank.
        share_of_raw: The time of the plain method divided by the time of this method, as the median over rounds; None
            for a plain method.
        engine: The engine that ran; None for a method without an engine.
        stall: For async saves, the seconds for which training is blocked; else None.
        stall_of_copy: The stall divided by the time of a memcpy of the rank's share, as the median over rounds; None
            without a stall.
    """

    what: str
    engine: str | None
    raw: str | None
    seconds: Spread
    samples_s: tuple[float, ...]
    num_bytes: int
    share_of_raw: float | None
    stall: Spread | None
    stalls_s: tuple[float, ...]
    stall_of_copy: float | None

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds.median


@dataclass(kw_only=True, slots=True)
class CheckpointMeasured:
    """The result of the measurement.

    Attributes:
        num_bytes: The size of the state.
        rank_bytes: For each rank, the bytes that it writes in the plain write.
        notes: Lines below the table.
    """

    rows: list[CheckpointRow]
    num_bytes: int
    rank_bytes: list[int]
    notes: list[str] = field(default_factory=list)


def measure_checkpoint(
    asked: CheckpointAsked,
    *,
    comm: Collective,
    directory: Path,
    progress: Callable[[float], None] = lambda share: None,
) -> CheckpointMeasured:
    """Times every method once per round, in shuffled order. Collective; returns the same value on every rank.

    directory: an empty directory on the filesystem to be measured, visible to all ranks; the files remain in it. On
    every rank, raises UsageError if memory or disk space is too small, and CheckpointError if I/O fails.
    """
    check_free_space(asked, comm=comm, directory=directory)
    state = make_state(num_bytes=asked.num_bytes, num_tensors=asked.num_tensors, seed=asked.seed)
    raw = RawShare(state, rank=comm.rank, num_ranks=comm.num_ranks)
    cold = asked.cache is Cache.COLD
    methods: list[TimedMethod] = [RawWriting(raw, comm=comm, directory=directory)]
    background: list[AsyncSaving] = []
    if SaveMode.SYNC in asked.modes:
        methods += [
            method(state.state, engine=name, comm=comm, directory=directory, page_cache=asked.page_cache)
            for method in (SyncSaving, RunSaving)
            for name in asked.engines
        ]
    if SaveMode.ASYNC in asked.modes:
        background = [
            AsyncSaving(state.state, engine=name, comm=comm, directory=directory, page_cache=asked.page_cache)
            for name in asked.engines
        ]
        methods += [*background, Copying(raw, comm=comm)]
    methods += [
        RawReading(raw, comm=comm, directory=directory, cold=cold),
        Loading(state.state, comm=comm, directory=directory, cold=cold),
    ]
    try:
        turns = take_turns(
            methods, repeats=asked.repeats, warmup=asked.warmup, seed=asked.seed, progress=progress
        )
    finally:
        for method in background:
            method.close()
    rows = [
        row_of_method(method, turns, num_bytes=raw.num_bytes if method.name == COPY else state.num_bytes)
        for method in methods
    ]
    return CheckpointMeasured(
        rows=rows, num_bytes=state.num_bytes, rank_bytes=all_gather_json(comm, raw.num_bytes),
        notes=_notes(rows, state=state, comm=comm),
    )  # fmt: skip


def take_turns(
    methods: Sequence[TimedMethod],
    *,
    repeats: int,
    warmup: int,
    seed: int,
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, list[MethodTime]]:
    """Times each method `warmup + repeats` times. Collective.

    Returns the times by the name of the method, without the times of the warm-up.
    """
    progress(0.0)
    order = Random(seed)
    found: dict[str, list[MethodTime]] = {method.name: [] for method in methods}
    for number in range(warmup + repeats):
        for place, method in enumerate(order.sample(list(methods), len(methods))):
            turn = method.turn()
            if number >= warmup:
                found[method.name].append(turn)
            progress((number + (place + 1) / len(methods)) / (warmup + repeats))
    return found


def row_of_method(
    method: TimedMethod, turns: Mapping[str, Sequence[MethodTime]], *, num_bytes: int
) -> CheckpointRow:
    """Returns the row of one method.

    turns: the times of all methods, by name of the method.
    num_bytes: the number of bytes that the method writes, reads or copies each time.
    """
    mine = [turn.seconds for turn in turns[method.name]]
    stalls = [turn.stall_s for turn in turns[method.name] if turn.stall_s is not None]
    share = of_copy = None
    if method.raw is not None:
        share = median(raw.seconds / own for raw, own in zip(turns[method.raw], mine, strict=True))
    if stalls and COPY in turns:
        of_copy = median(stall / copy.seconds for stall, copy in zip(stalls, turns[COPY], strict=True))
    return CheckpointRow(
        what=method.name, engine=method.engine, raw=method.raw, seconds=spread_of(mine), samples_s=tuple(mine),
        num_bytes=num_bytes, share_of_raw=share, stall=spread_of(stalls) if stalls else None,
        stalls_s=tuple(stalls), stall_of_copy=of_copy,
    )  # fmt: skip


def check_free_space(asked: CheckpointAsked, *, comm: Collective, directory: Path) -> None:
    """Raises UsageError on every rank if memory or disk space is too small on any rank. Collective."""
    free_bytes = psutil.virtual_memory().available
    ranks_here = Counter(all_gather_json(comm, gethostname()))[gethostname()]

    def check() -> None:
        copies = (len(asked.engines) + 1) / comm.num_ranks if SaveMode.ASYNC in asked.modes else 0.0
        needed = int((MEMORY_COPIES + copies) * asked.num_bytes * ranks_here)
        if needed > free_bytes:
            raise UsageError(
                f"{ranks_here} rank{'s' * (ranks_here > 1)} on {gethostname()} need {needed / 1e9:.3g} GB of memory "
                f"for a state of {asked.num_bytes / 1e9:.3g} GB, {free_bytes / 1e9:.3g} GB are free: ask for a "
                "smaller --size"
            )
        free = shutil.disk_usage(directory).free
        files = FILES_AT_ONCE + FILES_OF_RUN * len(asked.engines) * (SaveMode.SYNC in asked.modes)
        if files * asked.num_bytes > free:
            raise UsageError(
                f"{files} files of {asked.num_bytes / 1e9:.3g} GB do not fit into {directory}, where "
                f"{free / 1e9:.3g} GB are free: ask for a smaller --size or another --directory"
            )

    agreed(comm, check, os_error=CheckpointError)


def _notes(rows: Sequence[CheckpointRow], *, state: BenchState, comm: Collective) -> list[str]:
    notes = []
    cores = psutil.cpu_count() or 1
    most = max(Counter(all_gather_json(comm, gethostname())).values())
    if most > cores:
        notes.append(
            f"{most} ranks share {cores} cores of a node, also while saving: this makes the times longer"
        )
    fastest = min((row for row in rows if row.what != COPY), key=lambda row: row.seconds.median)
    if fastest.seconds.median < 0.02:
        notes.append(
            f"{state.num_bytes / 1e6:.3g} MB are too few to measure a disk: {fastest.what} takes "
            f"{1e3 * fastest.seconds.median:.3g} ms; ask for a larger --size"
        )
    return notes


# Table and JSON document of the checkpoint measurement.


SCHEMA = "hpctrain.bench.checkpoint/1"


def checkpoint_table(measured: CheckpointMeasured, asked: CheckpointAsked, *, where: str) -> Table:
    """Returns a table with one row per method. `where` describes the ranks, for the title."""
    title = (
        f"checkpoints of {describe_bytes(measured.num_bytes)} in {asked.num_tensors:,} tensors: {where}, "
        f"{asked.cache.value} cache, median of {asked.repeats}"
    )
    columns = ("what", "engine", "time, ms", "MB/s", "of raw", "stall, ms", "of a memcpy")
    table = empty_table(title, columns, texts=("what", "engine"))
    for row in measured.rows:
        table.add_row(
            row.what,
            row.engine or "-",
            describe_ms(row.seconds),
            show_number(row.bytes_per_s / 1e6),
            "-" if row.share_of_raw is None else f"{row.share_of_raw:.2f}",
            "-" if row.stall is None else describe_ms(row.stall),
            "-" if row.stall_of_copy is None else f"{row.stall_of_copy:.2f}",
        )
    return table


def checkpoint_document(
    session: Session,
    measured: CheckpointMeasured,
    asked: CheckpointAsked,
    *,
    directory: str,
    commit: str | None,
) -> dict[str, Any]:
    """Returns the JSON document `hpctrain.bench.checkpoint/1`, whose fields docs/guides/benchmarks.md describes.

    Collective; rank 0 writes it.
    """
    environment = environment_record(session, commit=commit)
    return {
        **document_head(SCHEMA, commit=commit),
        "topology": environment["topology"],
        "backend": environment["backend"],
        "environment": environment,
        "settings": {
            "bytes": asked.num_bytes,
            "tensors": asked.num_tensors,
            "engines": list(asked.engines),
            "page_cache": asked.page_cache,
            "modes": [mode.value for mode in asked.modes],
            "directory": directory,
            "cache": asked.cache.value,
            "repeats": asked.repeats,
            "warmup": asked.warmup,
            "seed": asked.seed,
        },
        "bytes": measured.num_bytes,
        "rank_bytes": measured.rank_bytes,
        "notes": measured.notes,
        "ways": [_row(row) for row in measured.rows],
    }


def _row(row: CheckpointRow) -> dict[str, Any]:
    return {
        "what": row.what,
        "engine": row.engine,
        "against": row.raw,
        "seconds": row.seconds.as_json(),
        "bytes_per_s": row.bytes_per_s,
        "share_of_raw": row.share_of_raw,
        "samples_s": list(row.samples_s),
        "stall_seconds": None if row.stall is None else row.stall.as_json(),
        "stall_of_memcpy": row.stall_of_copy,
        "stall_samples_s": list(row.stalls_s),
    }
