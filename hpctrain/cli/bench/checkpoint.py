"""`hpctrain bench checkpoint`."""

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
    from hpctrain.bench.checkpoint.measure import Mode
    from hpctrain.run.session import Session

INTERRUPTED = 130
# How long a rank of a measurement that is stopped waits for the one that removes its files.
REMOVED_WITHIN_S = 20.0


def checkpoint_command(
    size: Annotated[str, typer.Option(help="Bytes of the state: 512MiB, 2GB.")] = "512MiB",
    tensors: Annotated[int, typer.Option(min=1, help="Tensors that the state is made of.")] = 32,
    engines: Annotated[str, typer.Option(help="auto, direct, mpio; several with commas between.")] = "auto",
    modes: Annotated[str, typer.Option(help="sync, async, or both with a comma between.")] = "sync,async",
    page_cache: Annotated[
        str, typer.Option(help="Whether the engine direct writes through it: auto, use, bypass.")
    ] = "auto",
    directory: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Where to write: a folder that all nodes see. What is made in it is removed."
        ),
    ] = Path("."),
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds; each takes every way once.")] = 7,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds before that do not count.")] = 1,
    cold: Annotated[
        bool, typer.Option("--cold", help="Put files out of the page cache before they are read.")
    ] = False,
    backend: Annotated[str, typer.Option(help="auto, horovod, mpi or serial.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of the state's bytes, and of the ways' order.")] = 0,
    timeout_s: Annotated[
        float, typer.Option(min=1.0, help="An operation that takes longer ends the measurement with code 6.")
    ] = 300.0,
    json_path: Annotated[
        Optional[Path],  # noqa: UP045  (typer evaluates this on Python 3.10)
        typer.Option("--json", metavar="PATH", help="Write all of it, raw samples too, as JSON."),
    ] = None,
) -> None:
    """Measure how fast state is saved and loaded, beside the raw speed of the same bytes, as the ranks of whatever
    launched it; alone it is one rank.

    \b
    hpctrain launch -n 2 -- hpctrain bench checkpoint --directory /scratch/me
    mpirun -n 8 hpctrain bench checkpoint --size 2GiB --engines direct,mpio --json checkpoint.json
    hpctrain launch -n 2 -- hpctrain bench checkpoint --size 40MiB --tensors 10000
    srun hpctrain bench checkpoint --directory /lustre/me --page-cache bypass

    Every rank holds the whole state. raw write: each rank writes its part of the bytes into one plain file and
    flushes it to disk. save: hashed, flushed, read back and renamed. async: the same in the background; stall: how
    long training stands still for it, beside a memcpy of the rank's part. raw read, load: every rank all of it,
    into fresh memory; load verifies it. "of raw" is the raw time over this one's, round by round, median.
    """
    from hpctrain.bench.checkpoint.measure import Cache, CheckpointAsked, measure_checkpoint
    from hpctrain.bench.checkpoint.report import checkpoint_document, checkpoint_table
    from hpctrain.bench.document import check_writable, write_document
    from hpctrain.bench.progress import MeasurementProgress
    from hpctrain.bench.sizes import parse_size
    from hpctrain.checkpoint.saving.save_options import PageCache
    from hpctrain.run.record import working_commit
    from hpctrain.run.session import start

    # Before the ranks meet: what is wrong here is wrong on every rank.
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
    commit = working_commit() if is_first else None  # asking git means a fork, which MPI does not like
    with start(backend=backend, device="cpu", timeout_s=timeout_s) as session:
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


def _modes(text: str) -> tuple[Mode, ...]:
    """Raises UsageError for a name that is no mode."""
    from hpctrain.bench.checkpoint.measure import Mode

    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in [mode.value for mode in Mode]]:
        raise UsageError(f"--modes {unknown[0]!r} is not one of sync, async")
    return tuple(map(Mode, names))


@contextmanager
def _folder_in(directory: Path, *, session: Session) -> Iterator[Path]:
    """A folder of our own that is gone afterwards, also when the measurement is stopped. Collective."""
    from hpctrain.comm.collectives.agreement import on_rank_0

    def make() -> str:
        try:
            return tempfile.mkdtemp(dir=directory.resolve(), prefix="bench-checkpoint-")
        except OSError as error:
            raise CheckpointError(f"cannot write in {directory}: {error.strerror}") from error

    folder = Path(on_rank_0(session.world, make))

    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1: hpctrain launch sends it for Ctrl-C

    def stop(number: int, frame: FrameType | None) -> None:
        """All ranks get the signal, but one that waits in MPI for another never comes here: any may have to do it.
        The first that leaves has the launcher kill the others."""
        for one in stops:
            signal.signal(one, signal.SIG_IGN)
        gone = folder.with_name(f"{folder.name}.stopped")
        with suppress(OSError):  # one rank's, and from now on nobody finds a place to write to
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
