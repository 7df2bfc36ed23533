"""Methods that write a state to disk or read it back. Each call of `turn` runs a method once and times it.

Methods that write use a new file in each turn, except RunSaving, which reuses a file as a training run does.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar, final

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.bench.page_cache import evict
from hpctrain.checkpoint import (
    BackgroundThread,
    CheckpointSave,
    HostBuffers,
    PageCache,
    ReplicaCheck,
    Replicated,
    SaveOptions,
    State,
    load,
    save,
)
from hpctrain.comm import Collective, agreed, all_gather_json, is_true_everywhere, on_rank_0
from hpctrain.errors import CheckpointError, DataError
from hpctrain.storage import sync_directory

# Plain writes and reads of a state's bytes: the baseline for a checkpoint's speed.
#
# Every rank writes its part of the bytes into one file with as few calls as possible and flushes it to
# disk. There are no metadata, hashes or renames, and no rank waits for another.


# Linux's limits for one call.
IOV_MAX = 1024
CALL_BYTES = 1 << 30
# Parts of neighbouring ranks meet at a multiple of this, so that no page is written by two ranks.
CUT_BYTES = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class BenchState:
    """A replicated state of random bytes, the same on every rank.

    tensors: float32, one-dimensional, of equal size up to one element. Each tensor has memory of its own, and every
    page of this memory has been written.
    """

    tensors: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def state(self) -> State:
        items = [
            Replicated(name=f"layer.{number:06d}.weight", tensor=tensor)
            for number, tensor in enumerate(self.tensors)
        ]
        return State(items=items, document={"step": 1, "made for": "hpctrain bench checkpoint"})

    def views(self) -> list[NDArray[np.uint8]]:
        """Returns the bytes of each tensor in order: uint8, shape (bytes,), sharing the tensors' memory."""
        return [np.asarray(tensor.view(torch.uint8).numpy()) for tensor in self.tensors]


def make_state(*, num_bytes: int, num_tensors: int, seed: int = 0) -> BenchState:
    """Creates a random state. `num_bytes` is rounded down to whole elements, with at least one per tensor."""
    generator = torch.Generator().manual_seed(seed)
    elements = max(num_tensors, num_bytes // 4)
    cuts = [elements * number // num_tensors for number in range(num_tensors + 1)]
    tensors = []
    for begin, end in pairwise(cuts):
        bits = torch.empty(end - begin, dtype=torch.int32).random_(generator=generator)
        tensors.append(bits.view(torch.float32))
    return BenchState(tensors=tuple(tensors))


@final
class RawShare:
    """One rank's part of a file that holds the state's tensors one after another.

    begin, end: the byte range in the file. `write` and `read` are not collective.
    """

    def __init__(self, state: BenchState, *, rank: int, num_ranks: int) -> None:
        total = state.num_bytes
        self._state = state
        self.begin, self.end = (
            total if place == num_ranks else total * place // num_ranks // CUT_BYTES * CUT_BYTES
            for place in (rank, rank + 1)
        )
        self._pieces = list(_between(state.views(), self.begin, self.end))
        self._copy = np.empty(0, dtype=np.uint8)

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    def create(self, path: Path) -> None:
        """Creates the empty file. Only one rank calls this, and the other ranks must wait for it. Raises OSError."""
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    def write(self, path: Path) -> None:
        """Writes this rank's part and flushes it to disk. Raises OSError."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            offset = self.begin
            for call in _calls(self._pieces):
                size = sum(piece.nbytes for piece in call)
                written = os.pwritev(descriptor, [piece.data for piece in call], offset)
                if written != size:
                    raise OSError(f"only {written} of {size} bytes were written to {path}")
                offset += size
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, path: Path) -> list[NDArray[np.uint8]]:
        """Reads the whole state into new memory. Returns one uint8 array per tensor. Raises OSError."""
        arrays: list[NDArray[np.uint8]] = [
            np.empty(tensor.nbytes, dtype=np.uint8) for tensor in self._state.tensors
        ]
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            offset = 0
            for call in _calls(arrays):
                size = sum(array.nbytes for array in call)
                if (found := os.preadv(descriptor, [array.data for array in call], offset)) != size:
                    raise OSError(f"only {found} of {size} bytes were read from {path}")
                offset += size
        finally:
            os.close(descriptor)
        return arrays

    def prepare_copy(self) -> None:
        """Allocates the memory that `copy` copies into, and writes to every page of this memory."""
        self._copy = np.empty(self.num_bytes, dtype=np.uint8)
        self._copy.fill(1)

    def copy(self) -> None:
        """Copies this rank's part into the memory of `prepare_copy`."""
        offset = 0
        for piece in self._pieces:
            self._copy[offset : offset + piece.nbytes] = piece
            offset += piece.nbytes


def _between(views: Sequence[NDArray[np.uint8]], begin: int, end: int) -> Iterator[NDArray[np.uint8]]:
    start = 0
    for view in views:
        piece = view[max(0, begin - start) : max(0, end - start)]
        if piece.nbytes:
            yield piece
        start += view.nbytes


def _calls(arrays: Sequence[NDArray[np.uint8]]) -> Iterator[list[NDArray[np.uint8]]]:
    """Yields lists of arrays, one list per system call, each with as many arrays as the kernel accepts, in order.

    An array that is too large for one call is split.
    """
    call: list[NDArray[np.uint8]] = []
    size = 0
    for array in arrays:
        for start in range(0, array.nbytes, CALL_BYTES):
            part = array[start : start + CALL_BYTES]
            if call and (len(call) == IOV_MAX or size + part.nbytes > CALL_BYTES):
                yield call
                call, size = [], 0
            call.append(part)
            size += part.nbytes
    if call:
        yield call


# Methods of writing a state to disk and reading it back.


T = TypeVar("T")
RAW_WRITE, RAW_READ, COPY = "raw write", "raw read", "memcpy"
# Length of a training step while a save is written in the background.
STEP_S = 0.002


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodTime:
    """The time of one run of a method.

    seconds: from a barrier to the end on the slowest rank.
    stall_s: the part of this time in which training is blocked; None if the method does not run in the background.
    """

    seconds: float
    stall_s: float | None = None


class TimedMethod(Protocol):
    """The interface of a method that is timed.

    Attributes:
        name: The name of the method in the table.
        engine: The checkpoint engine that ran; None before the first call of `turn`, and for methods without an engine.
        raw: The name of the plain method with which this method is compared; None for a plain method.
    """

    @property
    def name(self) -> str: ...

    @property
    def engine(self) -> str | None: ...

    @property
    def raw(self) -> str | None: ...

    def turn(self) -> MethodTime:
        """Runs the method once and returns its time. Collective. Raises CheckpointError on every rank."""


@final
class RawWriting:
    """Writes every rank's share of the bytes into one plain file and flushes it. Creating the file is not timed."""

    name, engine, raw = RAW_WRITE, None, None

    def __init__(self, share: RawShare, *, comm: Collective, directory: Path) -> None:
        self._share, self._comm, self._path = share, comm, directory / "raw-write"

    def turn(self) -> MethodTime:
        on_rank_0(self._comm, lambda: _tried(lambda: self._share.create(self._path)))
        seconds = own_seconds(self._comm, lambda: self._share.write(self._path))
        remove_and_sync(self._path, comm=self._comm)
        return MethodTime(seconds=seconds)


@final
class SyncSaving:
    """Saves with `hpctrain.checkpoint.save`, including hashes, flush and rename."""

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
        remove_and_sync(done.path, comm=self._comm)
        return MethodTime(seconds=seconds)


@final
class RunSaving:
    """Saves like a training run that keeps one checkpoint, from the run's third save on.

    The time includes deleting the previous checkpoint.
    """

    raw = RAW_WRITE

    def __init__(
        self, state: State, *, engine: str, comm: Collective, directory: Path, page_cache: PageCache = "auto",
        replica_check: ReplicaCheck | None = None,
    ) -> None:  # fmt: skip
        """Stores the settings. If `replica_check` is None, the default of `save` is used."""
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
            self._state, directory=self._directory, step=self._step, comm=self._comm, keep=1, **self._options
        )
        self.engine = done.engine.value


@final
class Copying:
    """Copies every rank's share with memcpy, on all ranks at once: the minimum stall of a background save."""

    name, engine, raw = COPY, None, None

    def __init__(self, share: RawShare, *, comm: Collective) -> None:
        self._share, self._comm = share, comm
        share.prepare_copy()

    def turn(self) -> MethodTime:
        return MethodTime(seconds=own_seconds(self._comm, self._share.copy))


@final
class AsyncSaving:
    """Saves with `CheckpointSave`, buffers and a thread, as in training, between steps that do nothing.

    The stall is the time for which a training loop waits: at the start, including the copy, and at the end of each
    phase of the save. The exchange by which ranks find out whether all of them are ready is not counted, since training
    does this together with the gradients. The object owns a thread: call `close` at the end.
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
        saving = CheckpointSave.begin(
            self._state, directory=self._directory, step=1, comm=self._comm, options=self._options,
            buffers=self._buffers, executor=self._executor,
        )  # fmt: skip
        stall_s, done = time.perf_counter() - begin_s, None
        while done is None:
            time.sleep(STEP_S)
            if is_true_everywhere(self._comm, saving.ready()):
                boundary_s = time.perf_counter()
                done = saving.advance()
                stall_s += time.perf_counter() - boundary_s
        seconds = slowest_since(self._comm, begin_s)
        self.engine = done.engine.value
        remove_and_sync(done.path, comm=self._comm)
        return MethodTime(seconds=seconds, stall_s=float(max(all_gather_json(self._comm, stall_s))))

    def close(self) -> None:
        self._executor.shutdown()
        self._buffers.release()


@final
class RawReading:
    """Reads all bytes of a plain file into new memory on every rank."""

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
    """Loads the whole state on every rank with `hpctrain.checkpoint.load`, which verifies every byte."""

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
        del loaded  # freeing memory is not timed
        return MethodTime(seconds=seconds)


def begin(comm: Collective) -> float:
    """Waits for all ranks. Returns this rank's clock (perf_counter, seconds) after the barrier. Collective."""
    comm.barrier()
    return time.perf_counter()


def slowest_since(comm: Collective, begin_s: float) -> float:
    """Returns the seconds since `begin_s` on the slowest rank. Collective."""
    mine = time.perf_counter() - begin_s
    return float(max(all_gather_json(comm, mine)))


def own_seconds(comm: Collective, function: Callable[[], object]) -> float:
    """Returns the seconds of `function`, which must not communicate, on the slowest rank. Collective.

    Freeing the return value of `function` is not timed. An OSError is raised as CheckpointError on every rank.
    """
    begin_s = begin(comm)

    def timed() -> float:
        kept = function()
        seconds = time.perf_counter() - begin_s
        del kept
        return seconds

    mine = agreed(comm, timed, os_error=CheckpointError)
    return float(max(all_gather_json(comm, mine)))


def remove_and_sync(path: Path, *, comm: Collective) -> None:
    """Removes a file or a folder and syncs its directory, so that later times do not include this work. Collective."""

    def gone() -> None:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        sync_directory(path.parent)

    on_rank_0(comm, lambda: _tried(gone))


def make_folder(path: Path, *, comm: Collective) -> None:
    """Creates the checkpoints' folder. Collective.

    This is not timed, since only the first save of a training run creates the folder.
    """
    on_rank_0(comm, lambda: _tried(lambda: path.mkdir(exist_ok=True)))


def make_cold(path: Path, *, comm: Collective, cold: bool) -> None:
    """Drops the file from every node's page cache if `cold` is True. Collective."""
    if cold:
        files = [path] if path.is_file() else sorted(path.iterdir())
        agreed(comm, lambda: evict(files), os_error=DataError)


def _tried(function: Callable[[], Any]) -> None:
    """Calls `function`, and raises its OSError as CheckpointError."""
    try:
        function()
    except OSError as error:
        raise CheckpointError(f"cannot measure checkpoints: {error}") from error
