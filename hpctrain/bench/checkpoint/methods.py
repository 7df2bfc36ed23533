"""Ways to get a state onto a disk and back. A way takes a turn: once, into a file that was not there before, but for
the one that saves as a run does."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, final

from hpctrain.bench.checkpoint.raw_io import RawShare
from hpctrain.bench.page_cache import evict
from hpctrain.checkpoint import State, load, save
from hpctrain.checkpoint.files.full_io import sync_directory
from hpctrain.checkpoint.planning.replicas import ReplicaCheck
from hpctrain.checkpoint.saving.background_thread import BackgroundThread
from hpctrain.checkpoint.saving.host_snapshot import HostBuffers
from hpctrain.checkpoint.saving.save import SaveOptions, Saving
from hpctrain.checkpoint.saving.save_options import PageCache
from hpctrain.comm import Collective, all_gather_json
from hpctrain.comm.collectives.agreement import agreed, on_rank_0
from hpctrain.errors import CheckpointError, DataError

T = TypeVar("T")
RAW_WRITE, RAW_READ, COPY = "raw write", "raw read", "memcpy"
# Of the steps that go on while a save is written in the background.
STEP_S = 0.002


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodTime:
    """seconds: on the slowest rank, from a barrier on. stall_s: that part of them in which training would stand
    still; None where there is no such part."""

    seconds: float
    stall_s: float | None = None


class Way(Protocol):
    """name: in the table. engine: the checkpoint engine that ran; known after a turn. raw: the way that it is
    held against; None for that one itself."""

    @property
    def name(self) -> str: ...

    @property
    def engine(self) -> str | None: ...

    @property
    def raw(self) -> str | None: ...

    def turn(self) -> MethodTime:
        """Collective. Raises CheckpointError on every rank."""


@final
class RawWriting:
    """Every rank writes its share of the bytes into one plain file, and flushes it. The file is there before."""

    name, engine, raw = RAW_WRITE, None, None

    def __init__(self, share: RawShare, *, comm: Collective, directory: Path) -> None:
        self._share, self._comm, self._path = share, comm, directory / "raw-write"

    def turn(self) -> MethodTime:
        on_rank_0(self._comm, lambda: _tried(lambda: self._share.create(self._path)))
        seconds = own_seconds(self._comm, lambda: self._share.write(self._path))
        remove(self._path, comm=self._comm)
        return MethodTime(seconds=seconds)


@final
class SyncSaving:
    """`hpctrain.checkpoint.save`: hashes, flush, rename and all."""

    raw = RAW_WRITE

    def __init__(
        self, state: State, *, engine: str, comm: Collective, directory: Path, page_cache: PageCache = "auto"
    ) -> None:
        self._state, self._asked, self._page_cache, self._comm = state, engine, page_cache, comm
        self._directory = directory / f"save-{engine}"
        self.name = f"save, {engine}"
        self.engine: str | None = None

    def turn(self) -> MethodTime:
        make_folder(self._directory, comm=self._comm)
        begin_s = begin(self._comm)
        done = save(
            self._state, directory=self._directory, step=1, comm=self._comm, keep=None, engine=self._asked,
            page_cache=self._page_cache,
        )  # fmt: skip
        seconds = slowest_since(self._comm, begin_s)
        self.engine = done.engine.value
        remove(done.path, comm=self._comm)
        return MethodTime(seconds=seconds)


@final
class RunSaving:
    """The same as in a run that keeps one checkpoint, from its third on: the one before is let go of in that time, and
    where that is faster the room of one is the next one's."""

    raw = RAW_WRITE

    def __init__(
        self, state: State, *, engine: str, comm: Collective, directory: Path, page_cache: PageCache = "auto",
        replica_check: ReplicaCheck | None = None,
    ) -> None:  # fmt: skip
        """replica_check: None is the default's."""
        self._state, self._comm = state, comm
        self._options: dict[str, Any] = {"engine": engine, "page_cache": page_cache}
        self.name = f"save in a run, {engine}"
        self._directory = directory / f"run-{engine}"
        if replica_check is not None:
            self._options["replica_check"] = replica_check
            self.name = f"{self.name}, replicas {replica_check}"
            self._directory = directory / f"run-{engine}-{replica_check}"
        self._step = 0
        self.engine: str | None = None

    def turn(self) -> MethodTime:
        while self._step < 2:
            self._save()
        begin_s = begin(self._comm)
        self._save()
        return MethodTime(seconds=slowest_since(self._comm, begin_s))

    def _save(self) -> None:
        self._step += 1
        done = save(
            self._state, directory=self._directory, step=self._step, comm=self._comm, keep=1, recycle=True,
            **self._options,
        )  # fmt: skip
        self.engine = done.engine.value


@final
class Copying:
    """A memcpy of every rank's share, all at once: the least that a save in the background needs of training."""

    name, engine, raw = COPY, None, None

    def __init__(self, share: RawShare, *, comm: Collective) -> None:
        self._share, self._comm = share, comm
        share.prepare_copy()

    def turn(self) -> MethodTime:
        return MethodTime(seconds=own_seconds(self._comm, self._share.copy))


@final
class AsyncSaving:
    """`Saving` with buffers and a thread, as training has it, behind steps that do nothing.

    Its stall is all that a training loop waits for: beginning, with the copy, and every phase's end; not the
    question whether all ranks are ready, which training asks along with the gradients. Close it: it has a thread.
    """

    raw = RAW_WRITE

    def __init__(
        self, state: State, *, engine: str, comm: Collective, directory: Path, page_cache: PageCache = "auto"
    ) -> None:
        self._state, self._comm = state, comm
        self._options = SaveOptions(keep=None, engine=engine, page_cache=page_cache)
        self._directory = directory / f"async-{engine}"
        self._buffers, self._executor = HostBuffers(), BackgroundThread(name="hpctrain-checkpoint")
        self.name = f"save async, {engine}"
        self.engine: str | None = None

    def turn(self) -> MethodTime:
        make_folder(self._directory, comm=self._comm)
        begin_s = begin(self._comm)
        saving = Saving.begin(
            self._state, directory=self._directory, step=1, comm=self._comm, options=self._options,
            buffers=self._buffers, executor=self._executor,
        )  # fmt: skip
        stall_s, done = time.perf_counter() - begin_s, None
        while done is None:
            time.sleep(STEP_S)
            if all(all_gather_json(self._comm, saving.ready())):
                boundary_s = time.perf_counter()
                done = saving.advance()
                stall_s += time.perf_counter() - boundary_s
        seconds = slowest_since(self._comm, begin_s)
        self.engine = done.engine.value
        remove(done.path, comm=self._comm)
        return MethodTime(seconds=seconds, stall_s=float(max(all_gather_json(self._comm, stall_s))))

    def close(self) -> None:
        self._executor.shutdown()
        self._buffers.release()


@final
class RawReading:
    """Every rank reads all bytes of a plain file into fresh memory."""

    name, engine, raw = RAW_READ, None, None

    def __init__(self, share: RawShare, *, comm: Collective, directory: Path, cold: bool) -> None:
        self._share, self._comm, self._cold = share, comm, cold
        self._path = directory / "raw-read"

    def turn(self) -> MethodTime:
        if not on_rank_0(self._comm, self._path.exists):
            on_rank_0(self._comm, lambda: _tried(lambda: self._share.create(self._path)))
            own_seconds(self._comm, lambda: self._share.write(self._path))
        make_cold(self._path, comm=self._comm, cold=self._cold)
        return MethodTime(seconds=own_seconds(self._comm, lambda: self._share.read(self._path)))


@final
class Loading:
    """`hpctrain.checkpoint.load`: every rank the whole state, every byte verified."""

    name, engine, raw = "load, verified", None, RAW_READ

    def __init__(self, state: State, *, comm: Collective, directory: Path, cold: bool) -> None:
        self._state, self._comm, self._cold = state, comm, cold
        self._directory = directory / "load"
        self._path: Path | None = None

    def turn(self) -> MethodTime:
        if self._path is None:
            self._path = save(self._state, directory=self._directory, step=1, comm=self._comm).path
        make_cold(self._path, comm=self._comm, cold=self._cold)
        begin_s = begin(self._comm)
        loaded = load(self._path, comm=self._comm)
        seconds = slowest_since(self._comm, begin_s)
        del loaded  # giving memory back is nobody's reading
        return MethodTime(seconds=seconds)


def begin(comm: Collective) -> float:
    """This rank's clock when all have come. Collective."""
    comm.barrier()
    return time.perf_counter()


def slowest_since(comm: Collective, begin_s: float) -> float:
    """Seconds since then, on the rank where they are most. Collective."""
    mine = time.perf_counter() - begin_s
    return float(max(all_gather_json(comm, mine)))


def own_seconds(comm: Collective, function: Callable[[], object]) -> float:
    """Seconds of `function`, which does not communicate, on the slowest rank. Collective.

    What it returns is given back after the time is taken. Raises CheckpointError on every rank for an OSError.
    """
    begin_s = begin(comm)

    def timed() -> float:
        kept = function()
        seconds = time.perf_counter() - begin_s
        del kept
        return seconds

    mine = agreed(comm, timed, os_error=CheckpointError)
    return float(max(all_gather_json(comm, mine)))


def remove(path: Path, *, comm: Collective) -> None:
    """Remove a file or a folder, and have the filesystem done with it before anything else is timed. Collective."""

    def gone() -> None:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        sync_directory(path.parent)

    on_rank_0(comm, lambda: _tried(gone))


def make_folder(path: Path, *, comm: Collective) -> None:
    """Have the folder of a run's checkpoints, which is there in training but for the first one. Collective."""
    on_rank_0(comm, lambda: _tried(lambda: path.mkdir(exist_ok=True)))


def make_cold(path: Path, *, comm: Collective, cold: bool) -> None:
    """Put the file out of every node's page cache, if that was asked for. Collective."""
    if cold:
        files = [path] if path.is_file() else sorted(path.iterdir())
        agreed(comm, lambda: evict(files), os_error=DataError)


def _tried(function: Callable[[], Any]) -> None:
    """Raises CheckpointError for an OSError."""
    try:
        function()
    except OSError as error:
        raise CheckpointError(f"cannot measure checkpoints: {error}") from error
