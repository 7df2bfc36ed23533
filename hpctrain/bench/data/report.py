"""Table and JSON document of the data measurement."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from hpctrain.bench.data.measure import DataAsked, DataMeasured, DataRow
from hpctrain.bench.document import document_head
from hpctrain.bench.sizes import describe_bytes
from hpctrain.bench.spread import describe_spread, show_number

SCHEMA = "hpctrain.bench.data/1"


def data_table(measured: DataMeasured, asked: DataAsked) -> Table:
    """Table with one line per reader."""
    order = "shuffled" if asked.shuffle else "in the order of the files"
    title = (
        f"{asked.directory}: {measured.num_samples:,} samples of {describe_bytes(measured.sample_bytes)} in "
        f"{measured.num_shards} shards; batches of {asked.batch}, {order}, {asked.cache.value} cache, "
        f"median of {asked.repeats}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("reader", no_wrap=True)
    for name in ("time, ms", "batches/s", "samples/s", "MB/s", "of raw"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in measured.rows:
        table.add_row(
            row.reader.value,
            describe_spread(row.seconds, lambda value: show_number(1e3 * value)),
            show_number(row.batches_per_s),
            show_number(row.samples_per_s),
            show_number(row.bytes_per_s / 1e6),
            "-" if row.share_of_raw is None else f"{row.share_of_raw:.2f}",
        )
    return table


def data_lines(measured: DataMeasured, asked: DataAsked) -> list[str]:
    """Lines to print below the table."""
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
    """JSON document `hpctrain.bench.data/1`; docs/guides/benchmarks.md describes its fields."""
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
