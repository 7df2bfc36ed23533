"""`hpctrain bench data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from hpctrain.cli.bench.show import show
from hpctrain.errors import UsageError


def data_command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The dataset, a directory with a manifest.")
    ],
    batch: Annotated[int, typer.Option(min=1, help="Samples of a batch.")] = 64,
    batches: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Batches per reading [default: one epoch, at most 256 MiB]."),
    ] = None,
    order: Annotated[str, typer.Option(help="shuffle or sequential.")] = "shuffle",
    cold: Annotated[
        bool, typer.Option("--cold", help="Drop the files from the page cache before each reading.")
    ] = False,
    repeats: Annotated[
        int, typer.Option(min=1, help="Measured rounds; each reads with all three readers.")
    ] = 5,
    warmup: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="Rounds before them, not counted [default: 1; cold: 0]."),
    ] = None,
    step_ms: Annotated[
        float, typer.Option(min=0.0, help="Length of the training step that waits for batches.")
    ] = 100.0,
    steps: Annotated[int, typer.Option(min=0, help="Steps in which to measure that wait; 0: none.")] = 20,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads of the loader, as data.threads of a recipe.")
    ] = 1,
    prefetch_mb: Annotated[float, typer.Option(min=0.0, help="MB of prefetched batches.")] = 64.0,
    io: Annotated[
        str, typer.Option(help="How contiguous data is read, as data.io of a recipe: auto, map or read.")
    ] = "auto",
    cache_mb: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0.0, help="MB of decoded chunks to cache [default: that of hpctrain.data]."),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the samples' order and of the readers' order.")
    ] = 0,
    json_path: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--json", metavar="PATH", help="Write all results, raw samples too, as JSON."),
    ] = None,
) -> None:
    """Measure how fast the dataset DIR is read, compared with plain reads of the same bytes. Runs as one process.

    \b
    hpctrain bench data digits/train
    hpctrain bench data /scratch/imagenet/train --batch 256 --threads 4 --step-ms 180 --json data.json
    hpctrain bench data volumes --order sequential --cold

    loader: batches as in training. gather: only the reads of these batches. raw: the bytes of the same samples from
    memory maps (chunked data: the stored chunks); "of raw" is the raw reading's time over the reader's.
    """
    from hpctrain.bench import (
        Cache,
        DataAsked,
        MeasurementProgress,
        check_writable,
        data_document,
        data_lines,
        data_table,
        measure_data,
        write_document,
    )
    from hpctrain.run import working_commit

    if order not in ("shuffle", "sequential"):
        raise UsageError(f"--order {order!r} is not one of shuffle, sequential")
    if io not in ("auto", "map", "read"):
        raise UsageError(f"--io {io!r} is not one of auto, map, read")
    asked = DataAsked(
        directory=directory, batch=batch, num_batches=batches, shuffle=order == "shuffle", repeats=repeats,
        warmup=warmup if warmup is not None else 0 if cold else 1, cache=Cache.COLD if cold else Cache.WARM,
        step_s=step_ms / 1e3, num_steps=steps, num_threads=threads, prefetch_bytes=int(prefetch_mb * 1e6), seed=seed,
        open_options={"io": io} | ({} if cache_mb is None else {"cache_bytes": int(cache_mb * 1e6)}),
    )  # fmt: skip
    if json_path is not None:
        check_writable(json_path, option="--json")
    progress = MeasurementProgress(what="bench data", shown=True)
    measured = measure_data(asked, progress=progress)
    progress.end()
    show(data_table(measured, asked), notes=data_lines(measured, asked))
    if json_path is not None:
        write_document(json_path, data_document(measured, asked, commit=working_commit()))
