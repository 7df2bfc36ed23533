"""The commands `hpctrain bench checkpoint` and `data`."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Optional, cast

import typer

from hpctrain.cli.bench.show import show
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.launch import identify

if TYPE_CHECKING:
    from hpctrain.checkpoint import SaveMode
    from hpctrain.run import Session

# `hpctrain bench checkpoint`.


INTERRUPTED = 130
# Time limit for removing the files of a measurement that was stopped; the other ranks wait for it.
REMOVED_WITHIN_S = 20.0


def checkpoint_command(
    size: Annotated[str, typer.Option(help="Bytes of the state: 512MiB, 2GB.")] = "512MiB",
    tensors: Annotated[int, typer.Option(min=1, help="Number of tensors in the state.")] = 32,
    engines: Annotated[str, typer.Option(help="auto, direct, mpio; several separated by commas.")] = "auto",
    modes: Annotated[str, typer.Option(help="sync, async, or both separated by a comma.")] = "sync,async",
    page_cache: Annotated[
        str, typer.Option(help="Use of the page cache by the engine direct: auto, use, bypass.")
    ] = "auto",
    directory: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="A folder that all nodes see, to write in. The files are removed afterwards."
        ),
    ] = Path("."),
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds; each times every method once.")] = 7,
    warmup: Annotated[int, typer.Option(min=0, help="Warm-up rounds, which are not counted.")] = 1,
    cold: Annotated[
        bool, typer.Option("--cold", help="Drop the files from the page cache before reading them.")
    ] = False,
    backend: Annotated[str, typer.Option(help="auto, horovod, mpi or serial.")] = "auto",
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the state's values and of the methods' order.")
    ] = 0,
    timeout_s: Annotated[
        float,
        typer.Option(
            min=1.0,
            help="If an operation takes longer than this many seconds, the measurement ends with code 6.",
        ),
    ] = 300.0,
    json_path: Annotated[
        Optional[Path],  # noqa: UP045  (typer evaluates this on Python 3.10)
        typer.Option("--json", metavar="PATH", help="Write all results, raw samples too, as JSON."),
    ] = None,
) -> None:
    """Measure how fast state is saved and loaded, compared with plain writes and reads of the same bytes. Each process
    that the launcher started is one rank.

    \b
    hpctrain launch -n 2 -- hpctrain bench checkpoint --directory /scratch/me
    mpirun -n 8 hpctrain bench checkpoint --size 2GiB --engines direct,mpio --json checkpoint.json
    hpctrain launch -n 2 -- hpctrain bench checkpoint --size 40MiB --tensors 10000
    srun hpctrain bench checkpoint --directory /lustre/me --page-cache bypass

    Every rank holds the whole state. raw write: each rank writes its part of the bytes into one plain file and
    flushes it to disk. save: the same bytes, hashed, flushed, read back and renamed. async: the same in the background;
    stall: how long training is blocked by it, compared with a memcpy of the rank's part. raw read, load: every rank
    reads all bytes into fresh memory; load verifies them. "of raw": median over rounds of raw time / this time.
    """
    from hpctrain.bench import (
        Cache,
        CheckpointAsked,
        MeasurementProgress,
        check_writable,
        checkpoint_document,
        checkpoint_table,
        measure_checkpoint,
        parse_size,
        write_document,
    )
    from hpctrain.checkpoint import PageCache
    from hpctrain.run import init, working_commit

    # Checked before MPI starts: every rank finds the same mistakes in its options.
    asked = CheckpointAsked(
        num_bytes=parse_size(size), num_tensors=tensors, repeats=repeats, warmup=warmup, seed=seed,
        engines=tuple(dict.fromkeys(name.strip() for name in engines.split(","))), modes=_modes(modes),
        page_cache=cast(PageCache, page_cache), cache=Cache.COLD if cold else Cache.WARM,
    )  # fmt: skip
    if not directory.is_dir():
        raise UsageError(f"--directory {directory} is not a folder")
    is_first = identify(os.environ, socket.gethostname()).rank == 0
    if is_first and json_path is not None:
        check_writable(json_path, option="--json")
    commit = working_commit() if is_first else None  # runs git: forking is unsafe once MPI has started
    with init(backend=backend, device="cpu", timeout_s=timeout_s) as session:
        progress = MeasurementProgress(what="bench checkpoint", shown=is_first)
        with _folder_in(directory, session=session) as folder:
            measured = measure_checkpoint(asked, comm=session.world, directory=folder, progress=progress)
        document = checkpoint_document(
            session, measured, asked, directory=str(directory.resolve()), commit=commit
        )
        if is_first:
            progress.end()
            where = f"{session.topology.describe()}, {session.world.backend}"
            show(checkpoint_table(measured, asked, where=where), notes=measured.notes)
            if json_path is not None:
                write_document(json_path, document)


def _modes(text: str) -> tuple[SaveMode, ...]:
    """Parses mode names separated by commas. Raises UsageError for an unknown name."""
    from hpctrain.checkpoint import SaveMode

    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in [mode.value for mode in SaveMode]]:
        raise UsageError(f"--modes {unknown[0]!r} is not one of sync, async")
    return tuple(map(SaveMode, names))


@contextmanager
def _folder_in(directory: Path, *, session: Session) -> Iterator[Path]:
    """Creates a new folder and removes it afterwards, even if the measurement is stopped. Collective.

    Raises CheckpointError if the folder cannot be created.
    """
    from hpctrain.comm import on_rank_0

    def make() -> str:
        try:
            return tempfile.mkdtemp(dir=directory.resolve(), prefix="bench-checkpoint-")
        except OSError as error:
            raise CheckpointError(f"cannot write in {directory}: {error.strerror}") from error

    folder = Path(on_rank_0(session.world, make))

    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1: hpctrain launch sends it for Ctrl-C

    def stop(number: int, frame: FrameType | None) -> None:
        """Removes the folder, or waits until another rank has removed it. Then ends this rank.

        Any rank may have to remove the folder. All ranks receive the signal, but a rank that waits inside MPI does not
        run this handler. A rank waits, since the launcher kills the other ranks when one exits.
        """
        for one in stops:
            signal.signal(one, signal.SIG_IGN)
        gone = folder.with_name(f"{folder.name}.stopped")
        with suppress(OSError):  # succeeds on one rank only; from then on no rank can write into the folder
            folder.rename(gone)
            print("hpctrain bench: stopped; nothing was written", file=sys.stderr, flush=True)
            shutil.rmtree(gone, ignore_errors=True)
        deadline_s = time.monotonic() + REMOVED_WITHIN_S
        while gone.exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        os._exit(INTERRUPTED)

    before = {number: signal.signal(number, stop) for number in stops}
    try:
        yield folder
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if session.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


# `hpctrain bench data`.


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
        typer.Option(min=0, help="Warm-up rounds, which are not counted [default: 1; with --cold 0]."),
    ] = None,
    step_ms: Annotated[
        float,
        typer.Option(
            min=0.0, help="Duration in ms of the simulated training step that waits for each batch."
        ),
    ] = 100.0,
    steps: Annotated[
        int, typer.Option(min=0, help="Number of such steps in which the wait is measured; 0: none.")
    ] = 20,
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
    memory maps (chunked data: the stored chunks); "of raw" is the time of the raw reading divided by the reader's.
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
