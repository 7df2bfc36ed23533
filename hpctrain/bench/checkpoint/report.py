"""Table and JSON document of the checkpoint measurement."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from hpctrain.bench.checkpoint.measure import CheckpointAsked, CheckpointMeasured, CheckpointRow
from hpctrain.bench.document import document_head
from hpctrain.bench.sizes import describe_bytes
from hpctrain.bench.spread import describe_spread, show_number
from hpctrain.run import Session, environment_record

SCHEMA = "hpctrain.bench.checkpoint/1"


def checkpoint_table(measured: CheckpointMeasured, asked: CheckpointAsked, *, where: str) -> Table:
    """Table with one line per method. where: description of the ranks for the title."""
    title = (
        f"checkpoints of {describe_bytes(measured.num_bytes)} in {asked.num_tensors:,} tensors: {where}, "
        f"{asked.cache.value} cache, median of {asked.repeats}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("what", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    for name in ("time, ms", "MB/s", "of raw", "stall, ms", "of a memcpy"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in measured.rows:
        table.add_row(
            row.what,
            row.engine or "-",
            describe_spread(row.seconds, lambda value: show_number(1e3 * value)),
            show_number(row.bytes_per_s / 1e6),
            "-" if row.share_of_raw is None else f"{row.share_of_raw:.2f}",
            "-" if row.stall is None else describe_spread(row.stall, lambda value: show_number(1e3 * value)),
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
    """JSON document `hpctrain.bench.checkpoint/1`; docs/guides/benchmarks.md describes its fields.

    Collective; rank 0's is written.
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
