"""Worker processes that transform batches, for Python code that holds the interpreter lock.

The parent process reads a batch and sends it to a worker in shared memory. The worker returns the result in the same
way. Workers are new processes without the launcher's environment variables; they are never forked, since that breaks
MPI (pytorch#13787). Workers end when the parent ends. If a worker dies, another worker is started and transforms the
batch again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from hpctrain.data.transforms import shared_memory
from hpctrain.data.transforms.shared_memory import INDICES
from hpctrain.data.transforms.torch_dtypes import as_tensor
from hpctrain.data.transforms.transform import (
    Arrays,
    BatchTransform,
    TransformContext,
    TransformFunction,
    find_transform,
    import_name,
)
from hpctrain.errors import DataError, RecipeError

# Parent's side of a worker process: starts it, sends batches, and ends it.


_POLL_S = 0.5
_END_TIMEOUT_S = 1.0
# Below this size a copy costs less than a separate mapping.
_COPIED_BYTES = 256 << 10

# Environment variables of launchers and MPI libraries. A worker is not a rank: a library that it imports could join
# the job as its parent's rank because of them.
_LAUNCHER_PREFIXES = (
    *(
        "OMPI_",
        "PMIX_",
        "PMI_",
        "PMI2_",
        "PRTE_",
        "ORTE_",
        "OPAL_",
        "MPI_",
        "MPIR_",
        "MPICH_",
        "HYDRA_",
        "HYDI_",
    ),
    *("I_MPI_", "MV2_", "MVP_", "SLURM_", "SLURMD_", "PALS_", "FLUX_", "HOROVOD_"),
)
# glibc's allocator keeps memory for the next batch: new pages for each batch cost more than the copies.
_KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# The worker's modules need only numpy: torch would take seconds and 200 MB.
_PROGRAM = (
    "import sys; from hpctrain.data.transforms.worker_process import main; "
    "sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))"
)


class WorkerDied(Exception):
    """Raised when a worker process has ended unexpectedly. The message says how it ended."""


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of a worker: those of the parent, except the variables of MPI launchers.

    Further variables limit numerical libraries to one thread, let the allocator keep memory, and let the worker import
    hpctrain.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}
    package_root = str(Path(shared_memory.__file__).resolve().parents[3])
    searched = [package_root, *filter(None, [environ.get("PYTHONPATH")])]
    return {**_KEPT_MEMORY, **kept, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(searched)}


class Worker:
    """One worker process, to be used by one thread at a time. Raises DataError if the process cannot be started."""

    def __init__(self, transform: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lifeline, self._lifeline = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(lifeline)],
                stdin=subprocess.DEVNULL,
                env=worker_environment(os.environ),
                pass_fds=(theirs.fileno(), lifeline),
            )
        except OSError as error:
            os.close(self._lifeline)
            self._control.close()
            raise DataError(f"a worker of the loader cannot be started: {error}") from error
        finally:
            theirs.close()
            os.close(lifeline)
        self._ended = False
        self.is_ready = False
        with contextlib.suppress(OSError):  # it died already: `_receive` detects that
            shared_memory.send(self._control, {"transform": transform, "sys_path": sys.path})

    def transform(self, request: Mapping[str, Any], descriptor: int) -> Arrays:
        """Sends a batch to the worker and returns the transformed arrays.

        `descriptor` is the file descriptor of the shared memory that contains the batch (see `write_arrays`). `request`
        is the message to the worker, which describes the batch. Raises WorkerDied if the process ended, DataError if
        the transform function raised an error.
        """
        if not self.is_ready:
            self._receive()
            self.is_ready = True
        try:
            shared_memory.send(self._control, request, descriptors=(descriptor,))
        except OSError:
            raise self._death() from None
        message, descriptors = self._receive()
        try:
            return _arrays(descriptors[0], message["arrays"])
        finally:
            os.close(descriptors[0])

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        waiting = select.poll()
        waiting.register(self._control, select.POLLIN)
        # The socket of a dead worker is closed at once, unless a fork of this process also has it open: poll both.
        while not waiting.poll(_POLL_S * 1000) and self.process.poll() is None:
            pass
        received = shared_memory.receive(self._control) if waiting.poll(0) else None
        if received is None:
            raise self._death()
        if "error" in received[0]:
            trace = received[0].get("traceback")
            raise DataError(received[0]["error"] + (f"\nIn the worker:\n{trace}" if trace else ""))
        return received

    def _death(self) -> WorkerDied:
        self.end()
        code = self.process.returncode
        if code is None or code >= 0:
            return WorkerDied(f"worker {self.process.pid} ended with exit code {code}")
        words = f"worker {self.process.pid} was killed by signal {-code} ({signal.Signals(-code).name})"
        return WorkerDied(words + (": possibly out of memory" if -code == signal.SIGKILL else ""))

    def end(self) -> None:
        """Ends the process and waits until it has ended. May be called more than once."""
        if self._ended:
            return
        self._ended = True
        self._control.close()  # ends an idle worker
        try:
            self.process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._lifeline)


def _arrays(descriptor: int, description: shared_memory.Description) -> Arrays:
    """Returns the arrays in shared memory as views of the memory, which is freed with the last view.

    If the memory is smaller than `_COPIED_BYTES`, the arrays are views of a copy.
    """
    num_bytes = os.fstat(descriptor).st_size
    # torch maps the memory without keeping a descriptor, unlike mmap: thousands of batches may exist.
    memory = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=num_bytes, dtype=torch.uint8)
    content = memory.numpy()  # (num_bytes,)
    if num_bytes < _COPIED_BYTES:
        content = content.copy()
    return {
        entry["name"]: np.ndarray(
            tuple(entry["shape"]), entry["dtype"], buffer=content, offset=entry["first_byte"]
        )
        for entry in description
    }


# Processes that transform batches, for Python code that holds the interpreter lock.


MAX_REMAKES = 3


class _Places:
    """The worker processes of a pool, and which of them are idle.

    This object has no reference to the pool, so that the pool can be garbage-collected.
    """

    def __init__(self, num_workers: int) -> None:
        self.condition = threading.Condition()
        self.idle: list[Worker] = []
        self.all: set[Worker] = set()
        self.vacant = num_workers
        self.closed = False


def _end_all(places: _Places) -> None:
    with places.condition:
        places.closed = True
        idle, busy = places.idle[:], places.all - set(places.idle)
        places.idle.clear()
        places.all.clear()
        places.condition.notify_all()
    for worker in busy:
        worker.process.kill()  # the thread that waits for it then calls `end`
    for worker in idle:
        worker.end()


class WorkerPool:
    """Worker processes for one transform. Each thread that calls the pool uses one worker at a time.

    `transform` is the function's name, "module:function"; see `hpctrain.data.transforms.transform`. The workers start
    when the first batch is transformed. They end on `close()`, when the pool is garbage-collected, and when this
    process ends or is killed. Raises RecipeError if `num_workers` is below 1.
    """

    def __init__(self, transform: str, *, num_workers: int) -> None:
        if num_workers < 1:
            raise RecipeError(f"a pool cannot have {num_workers} workers: at least 1 is needed")
        self.name = transform
        self.input_copies = 2  # the batch that was read, and its copy in shared memory
        self.num_workers = num_workers
        self.num_deaths = 0
        """Number of workers that have ended unexpectedly so far."""
        self._places = _Places(num_workers)
        self._finalizer = weakref.finalize(self, _end_all, self._places)
        self._serving: dict[int, Worker] = {}  # by the thread that waits

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers, sorted."""
        with self._places.condition:
            return sorted(worker.process.pid for worker in self._places.all)

    def place(self, thread: int) -> str:
        """Returns in words which worker process transforms the batch of a thread now.

        `thread` is the identifier of the thread, as of `threading.get_ident`. If all workers are busy, the text says
        so.
        """
        worker = self._serving.get(thread)
        if worker is None:
            return f"no worker yet: all {self.num_workers} are busy"
        return f"worker process {worker.process.pid}" + (
            "" if worker.is_ready else ", which is still importing its module"
        )

    def __call__(self, arrays: Arrays, *, context: TransformContext) -> Arrays:
        """Transforms a batch in a worker process and returns its arrays. If all workers are busy, waits for one.

        Raises DataError if the transform raises an error, if `MAX_REMAKES` + 1 workers died one after another while
        they transformed this batch, or if the pool was closed.
        """
        descriptor, description = shared_memory.write_arrays({**arrays, INDICES: context.indices})
        request = {
            "arrays": description, "seed": context.seed, "epoch": context.epoch, "start": context.start,
        }  # fmt: skip
        try:
            for attempt in range(1 + MAX_REMAKES):
                worker = self._serving[threading.get_ident()] = self._take()
                try:
                    made = worker.transform(request, descriptor)
                except WorkerDied as death:
                    last = death
                    if attempt < MAX_REMAKES and not self._places.closed:
                        # Printed now, since the run continues and only becomes slower.
                        print(f"hpctrain: a batch is transformed again: {death}", file=sys.stderr, flush=True)
                    self._put(worker, alive=False)
                except BaseException:
                    self._put(worker, alive=True)
                    raise
                else:
                    self._put(worker, alive=True)
                    return made
        finally:
            self._serving.pop(threading.get_ident(), None)
            os.close(descriptor)
        first, count = int(context.indices[0]) if len(context.indices) else 0, len(context.indices)
        raise DataError(
            f"{1 + MAX_REMAKES} workers died one after another over one batch with the transform {self.name} (epoch "
            f"{context.epoch}, {count} samples, the first is {first}; last error: {last}): check its memory use, and "
            "the libraries that it calls"
        )

    def _take(self) -> Worker:
        """Returns an idle worker. Starts one if all are busy and fewer than `num_workers` exist; otherwise waits."""
        places = self._places
        with places.condition:
            while True:
                if places.closed:
                    raise DataError("the workers were stopped, since the loader was closed")
                while places.idle:
                    worker = places.idle.pop()
                    if worker.process.poll() is None:
                        return worker
                    # Killed while it was idle: does not count as a failure of this batch.
                    worker.end()
                    self._discard(worker)
                if not places.vacant:
                    places.condition.wait()
                elif places.all:
                    self._start()
                else:
                    while places.vacant:  # the first call starts all workers
                        self._start()

    def _discard(self, worker: Worker) -> None:
        self.num_deaths += 1
        self._places.all.discard(worker)
        self._places.vacant += 1

    def _start(self) -> None:
        worker = Worker(self.name)
        self._places.vacant -= 1
        self._places.all.add(worker)
        self._places.idle.append(worker)
        self._places.condition.notify()

    def _put(self, worker: Worker, *, alive: bool) -> None:
        places = self._places
        with places.condition:
            closed = places.closed
            if not alive and not closed:
                self._discard(worker)
            elif alive and not closed:
                places.idle.append(worker)
            places.condition.notify()
        if closed:
            worker.end()

    def close(self) -> None:
        """Ends the workers and waits until they have ended. May be called more than once."""
        self._finalizer()


# Chooses where a loader's transform runs: in the loader's threads, or in worker processes.


class BatchTransformer(Protocol):
    """Interface of an object that transforms batches: a `BatchTransform`, in the calling thread, or a `WorkerPool`.

    `name` is the name of the transform function. `input_copies` is the number of copies of a batch's input that are in
    memory while the batch is transformed.
    """

    name: str
    input_copies: int

    def place(self, thread: int) -> str:
        """Returns in words in which process a thread's batch is transformed now; "" if the thread itself does that.

        `thread` is the identifier of the thread, as of `threading.get_ident`.
        """

    def __call__(self, arrays: Arrays, *, context: TransformContext) -> Arrays: ...


def build_transformer(transform: str | TransformFunction | None, *, workers: int) -> BatchTransformer | None:
    """Returns the object that runs a loader's transform, or None if `transform` is None.

    With `workers` 0 the calling threads run the transform, otherwise that number of worker processes. Raises
    RecipeError if the transform cannot be imported in this process, or could not be imported in a worker. Also raises
    RecipeError if `workers` is negative, is positive without a transform, or needs shared memory that this system
    lacks.
    """
    if workers < 0:
        raise RecipeError(f"workers = {workers}: must be 0 (threads) or more")
    if transform is None:
        if workers:
            raise RecipeError(
                f"workers = {workers} without a transform: workers only run a transform, and threads read the samples. "
                "Set a transform, or use workers = 0"
            )
        return None
    if workers:
        if not hasattr(os, "memfd_create"):
            raise RecipeError(
                f"workers = {workers}: workers need shared memory of Linux (memfd_create); use workers = 0"
            )
        named = find_transform(transform if isinstance(transform, str) else import_name(transform))
        return WorkerPool(named.name, num_workers=workers)
    if isinstance(transform, str):
        return find_transform(transform)
    return BatchTransform(transform, name=getattr(transform, "__qualname__", repr(transform)))


def transformed(
    fields: dict[str, torch.Tensor], *, by: BatchTransformer, context: TransformContext, pin_memory: bool
) -> dict[str, torch.Tensor]:
    """Transforms the fields of a batch with the transformer `by`, and returns the results as tensors.

    Unsigned integers of 16 and 32 bits become int32 and int64. The tensors are in page-locked memory if `pin_memory`.
    """
    made = by({name: tensor.numpy() for name, tensor in fields.items()}, context=context)
    return {name: as_tensor(array, pin_memory=pin_memory) for name, array in made.items()}
