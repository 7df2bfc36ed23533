"""`hpctrain bench data`: times reading a dataset, and plain reads of the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from hpctrain.bench.data.raw_reads import RawReader
from hpctrain.bench.document import document_head
from hpctrain.bench.figures import Spread, describe_bytes, describe_ms, empty_table, show_number, spread_of
from hpctrain.bench.page_cache import Cache, cached_share, evict
from hpctrain.data import PREFETCH_BYTES, Dataset, EpochOrder, LastBatch, Loader
from hpctrain.errors import UsageError

# Measures how long a training step waits for its batch.


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWait:
    """How long training steps waited for their batches, in seconds.

    step_s: the duration of a training step.
    waits_s: the wait for each batch after the first.
    first_s: the wait for the first batch.
    """

    step_s: float
    waits_s: tuple[float, ...]
    first_s: float

    @property
    def mean_s(self) -> float:
        return sum(self.waits_s) / len(self.waits_s)

    @property
    def share(self) -> float:
        """The mean wait over the steps, divided by the duration of a step."""
        return self.mean_s / self.step_s if self.step_s else 0.0


def time_waits(
    batches: Iterator[Any], *, step: Callable[[Any], None], step_s: float, num_steps: int
) -> StepWait | None:
    """Fetches `num_steps` batches and calls `step` after each. Returns None if there are fewer than two batches."""
    waits = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        try:
            batch = next(batches)
        except StopIteration:
            break
        waits.append(time.perf_counter() - begin)
        step(batch)
    if len(waits) < 2:
        return None
    return StepWait(step_s=step_s, waits_s=tuple(waits[1:]), first_s=waits[0])


# `hpctrain bench data`.


# Size of one reading, unless a number of batches is given.
READ_BYTES = 256 << 20
LEAST_BATCHES = 8


class Reader(str, Enum):
    """A way of reading the dataset that is timed.

    loader: the loader makes batches, as in training. gather: `Dataset.gather` only reads the samples of the same
    batches. raw: plain reads of the bytes of the same samples.
    """

    LOADER = "loader"
    GATHER = "gather"
    RAW = "raw"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataAsked:
    """The settings of the measurement. Raises UsageError for a number that is too small.

    Attributes:
        batch: The number of samples per batch.
        num_batches: The number of batches per reading; None: as many as an epoch has, but at most 256 MiB or 8 batches,
            whichever is more.
        step_s: The duration of the simulated training step that waits for batches.
        num_steps: The number of simulated training steps; 0: the wait is not measured.
        open_options: Keyword arguments of `Dataset.open`.
    """

    directory: Path
    batch: int = 64
    num_batches: int | None = None
    shuffle: bool = True
    repeats: int = 5
    warmup: int = 1
    cache: Cache = Cache.WARM
    step_s: float = 0.1
    num_steps: int = 20
    num_threads: int = 1
    prefetch_bytes: int = PREFETCH_BYTES
    seed: int = 0
    open_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("batch", self.batch, 1), ("repeats", self.repeats, 1), ("warmup", self.warmup, 0),
            ("num_threads", self.num_threads, 1), ("num_batches", self.num_batches or 1, 1),
            ("step_s", self.step_s, 0), ("num_steps", self.num_steps, 0),
        ):  # fmt: skip
            if value < least:
                raise UsageError(f"{name} is {value}: at least {least} is needed")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRow:
    """The result of one reader.

    Attributes:
        seconds: The spread of `samples_s`.
        samples_s: The seconds of each reading.
        num_batches: The number of batches per reading.
        num_samples: The number of samples per reading.
        num_bytes: The number of bytes per reading; for `raw`, the bytes read from the files.
        share_of_raw: The median time of raw reading divided by the median time of this reader; None if nothing could be
            read raw.
    """

    reader: Reader
    seconds: Spread
    samples_s: tuple[float, ...]
    num_batches: int
    num_samples: int
    num_bytes: int
    share_of_raw: float | None

    @property
    def batches_per_s(self) -> float:
        return self.num_batches / self.seconds.median

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.seconds.median

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds.median


@dataclass(frozen=True, kw_only=True, slots=True)
class DataMeasured:
    """The result of the measurement.

    rows: one per reader (loader, gather, raw) that could read anything.
    wait: None if it was not measured.
    notes: lines below the table.
    cached: the largest fraction of the files that was in the page cache when a cold reading began; None for warm
    readings, or if it is unknown.
    """

    rows: list[DataRow]
    wait: StepWait | None
    notes: list[str]
    num_samples: int
    sample_bytes: int
    num_shards: int
    cached: float | None = None


def measure_data(asked: DataAsked, *, progress: Callable[[float], None] = lambda share: None) -> DataMeasured:
    """Times every reader on the same batches, then measures how long training steps wait for batches.

    In each round every reader reads once; the order of the readers is shuffled. Round r reads the first batches of
    epoch r. A cold reading opens the dataset again and first drops its files from the page cache. Raises DataError,
    UsageError.
    """
    opened = _open(asked)
    sample_bytes = sum(spec.sample_bytes for spec in opened.fields.values())
    num_samples, num_shards = opened.num_samples, len(opened.manifest.shards)
    num_batches = batches_to_read(asked, num_samples=num_samples, sample_bytes=sample_bytes)
    files = sorted({(opened.directory / shard.file).resolve() for shard in opened.manifest.shards})
    # Cold: opened again each time, since memory maps would keep the pages in the cache.
    dataset = opened if asked.cache is Cache.WARM else None
    random = Random(asked.seed)
    times: dict[Reader, list[float]] = {reader: [] for reader in Reader}
    num_bytes: dict[Reader, int] = {}
    cached: list[float | None] = []
    left_out: dict[str, str] = {}
    rounds = asked.warmup + asked.repeats
    for number in range(rounds):
        readers = list(Reader)
        random.shuffle(readers)
        indices = _order(asked, num_samples=num_samples, epoch=number).at(
            0, min(num_samples, num_batches * asked.batch)
        )
        for place, reader in enumerate(readers):
            opened = dataset if dataset is not None else _open(asked)
            prepare = _PREPARE[reader](opened, asked, indices, number, left_out)
            if asked.cache is Cache.COLD:
                evict(files)
                cached.append(cached_share(files))
            begin = time.perf_counter()
            read_bytes = prepare()
            seconds = time.perf_counter() - begin
            del opened, prepare
            if number >= asked.warmup:
                times[reader].append(seconds)
            num_bytes[reader] = read_bytes
            progress((number + (place + 1) / len(readers)) / (rounds + 1))
    notes = [f"raw reads without {name}: {reason}" for name, reason in left_out.items()]
    if num_bytes[Reader.RAW] == 0:
        notes.append(
            "no field of a sample can be read directly from the files: there is no raw speed to compare with"
        )
    raw_s = spread_of(times[Reader.RAW]).median if num_bytes[Reader.RAW] else None
    rows = [
        DataRow(
            reader=reader,
            seconds=spread_of(times[reader]),
            samples_s=tuple(times[reader]),
            num_batches=num_batches,
            num_samples=len(indices),
            num_bytes=num_bytes[reader],
            share_of_raw=None if raw_s is None else raw_s / spread_of(times[reader]).median,
        )
        for reader in Reader
        if num_bytes[reader]
    ]
    opened = dataset if dataset is not None else _open(asked)
    if asked.cache is Cache.COLD:
        evict(files)
    return DataMeasured(
        rows=rows,
        wait=_time_waits(opened, asked, epoch=rounds),
        notes=notes,
        num_samples=num_samples,
        sample_bytes=sample_bytes,
        num_shards=num_shards,
        cached=max((share for share in cached if share is not None), default=None),
    )


def batches_to_read(asked: DataAsked, *, num_samples: int, sample_bytes: int) -> int:
    """Returns the number of batches per reading. Raises UsageError if an epoch has fewer than requested."""
    in_epoch = -(-num_samples // asked.batch)
    if asked.num_batches is None:
        wanted = max(LEAST_BATCHES, READ_BYTES // max(1, asked.batch * sample_bytes))
        return min(in_epoch, wanted)
    if asked.num_batches > in_epoch:
        raise UsageError(
            f"{asked.num_batches} batches of {asked.batch} samples were asked for; an epoch of "
            f"{num_samples} samples has {in_epoch}: ask for at most {in_epoch}"
        )
    return asked.num_batches


def _time_waits(dataset: Dataset, asked: DataAsked, *, epoch: int) -> StepWait | None:
    if not asked.num_steps:
        return None
    with _loader(dataset, asked).epoch(epoch) as batches:
        return time_waits(
            iter(batches), step=lambda batch: time.sleep(asked.step_s), step_s=asked.step_s,
            num_steps=asked.num_steps + 1,
        )  # fmt: skip


def _open(asked: DataAsked) -> Dataset:
    return Dataset.open(asked.directory, **asked.open_options)


def _order(asked: DataAsked, *, num_samples: int, epoch: int) -> EpochOrder:
    return EpochOrder(num_samples=num_samples, seed=asked.seed, epoch=epoch, shuffle=asked.shuffle)


def _loader(dataset: Dataset, asked: DataAsked) -> Loader:
    return Loader(
        dataset, global_batch=asked.batch, seed=asked.seed, shuffle=asked.shuffle, last_batch=LastBatch.KEEP,
        prefetch_bytes=asked.prefetch_bytes, num_threads=asked.num_threads,
    )  # fmt: skip


Read = Callable[[], int]
"""Performs one reading and returns the number of bytes read. Only this call is timed."""


def _through_loader(
    dataset: Dataset, asked: DataAsked, indices: NDArray[np.int64], epoch: int, left_out: dict[str, str]
) -> Read:
    loader = _loader(dataset, asked)

    def read() -> int:
        num_bytes = num_samples = 0
        with loader.epoch(epoch) as batches:
            for batch in batches:
                num_bytes += batch.num_bytes
                num_samples += batch.num_samples
                if num_samples >= len(indices):
                    break
        return num_bytes

    return read


def _through_gather(
    dataset: Dataset, asked: DataAsked, indices: NDArray[np.int64], epoch: int, left_out: dict[str, str]
) -> Read:
    def read() -> int:
        return sum(
            array.nbytes
            for part in _in_batches(indices, asked.batch)
            for array in dataset.gather(part).values()
        )

    return read


def _raw(
    dataset: Dataset, asked: DataAsked, indices: NDArray[np.int64], epoch: int, left_out: dict[str, str]
) -> Read:
    raw = RawReader(dataset, indices=indices)
    left_out.update(raw.left_out)

    def read() -> int:
        with raw:
            return sum(raw.read(part) for part in _in_batches(indices, asked.batch))

    return read


_PREPARE = {Reader.LOADER: _through_loader, Reader.GATHER: _through_gather, Reader.RAW: _raw}


def _in_batches(indices: NDArray[np.int64], batch: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(indices), batch):
        yield indices[start : start + batch]


# Table and JSON document of the data measurement.


SCHEMA = "hpctrain.bench.data/1"


def data_table(measured: DataMeasured, asked: DataAsked) -> Table:
    """Returns a table with one row per reader."""
    order = "shuffled" if asked.shuffle else "in the order of the files"
    title = (
        f"{asked.directory}: {measured.num_samples:,} samples of {describe_bytes(measured.sample_bytes)} in "
        f"{measured.num_shards} shards; batches of {asked.batch}, {order}, {asked.cache.value} cache, "
        f"median of {asked.repeats}"
    )
    columns = ("reader", "time, ms", "batches/s", "samples/s", "MB/s", "of raw")
    table = empty_table(title, columns, texts=("reader",))
    for row in measured.rows:
        table.add_row(
            row.reader.value,
            describe_ms(row.seconds),
            show_number(row.batches_per_s),
            show_number(row.samples_per_s),
            show_number(row.bytes_per_s / 1e6),
            "-" if row.share_of_raw is None else f"{row.share_of_raw:.2f}",
        )
    return table


def data_lines(measured: DataMeasured, asked: DataAsked) -> list[str]:
    """Returns the lines below the table."""
    lines = list(measured.notes)
    if measured.cached:
        lines.append(
            f"up to {measured.cached:.0%} of the files were in the page cache when a cold reading began"
        )
    wait = measured.wait
    if wait is not None:
        lines.append(
            f"a training step of {1e3 * wait.step_s:g} ms waits {show_number(1e3 * wait.mean_s)} ms for its batch "
            f"({wait.share:.2%} of it; longest {show_number(1e3 * max(wait.waits_s))} ms of {len(wait.waits_s)} steps; "
            f"the first batch takes {show_number(1e3 * wait.first_s)} ms)"
        )
    elif asked.num_steps:
        lines.append("the wait of a training step was not measured: an epoch has only one batch")
    return lines


def data_document(measured: DataMeasured, asked: DataAsked, *, commit: str | None) -> dict[str, Any]:
    """Returns the JSON document `hpctrain.bench.data/1`, whose fields docs/guides/benchmarks.md describes."""
    wait = measured.wait
    return {
        **document_head(SCHEMA, commit=commit),
        "settings": {
            "directory": str(asked.directory.resolve()),
            "batch": asked.batch,
            "order": "shuffle" if asked.shuffle else "sequential",
            "cache": asked.cache.value,
            "repeats": asked.repeats,
            "warmup": asked.warmup,
            "threads": asked.num_threads,
            "prefetch_bytes": asked.prefetch_bytes,
            "seed": asked.seed,
            "open": {name: _plain(value) for name, value in asked.open_options.items()},
        },
        "dataset": {
            "samples": measured.num_samples,
            "sample_bytes": measured.sample_bytes,
            "shards": measured.num_shards,
        },
        "notes": measured.notes,
        "cached_share": measured.cached,
        "readers": [_row(row) for row in measured.rows],
        "wait": None
        if wait is None
        else {
            "step_s": wait.step_s,
            "mean_s": wait.mean_s,
            "share": wait.share,
            "first_s": wait.first_s,
            "samples_s": list(wait.waits_s),
        },
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


def _row(row: DataRow) -> dict[str, Any]:
    return {
        "reader": row.reader.value,
        "batches": row.num_batches,
        "samples": row.num_samples,
        "bytes": row.num_bytes,
        "seconds": row.seconds.as_json(),
        "batches_per_s": row.batches_per_s,
        "samples_per_s": row.samples_per_s,
        "bytes_per_s": row.bytes_per_s,
        "share_of_raw": row.share_of_raw,
        "samples_s": list(row.samples_s),
    }
