"""Processes that transform batches, for Python code that holds the interpreter lock.

The parent reads a batch and sends it to a worker in shared memory; the worker returns the result in the same way.
Workers are new processes (never forked: that breaks MPI, pytorch#13787) without the launcher's environment, and end
with the parent. A worker that dies is replaced, and its batch is transformed again.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref

from hpctrain.data.transforms import shared_memory
from hpctrain.data.transforms.shared_memory import INDICES
from hpctrain.data.transforms.transform import Arrays, TransformContext
from hpctrain.data.transforms.worker_handle import Worker, WorkerDied
from hpctrain.errors import DataError, RecipeError

MAX_REMAKES = 3


class _Places:
    """The workers, and which of them are idle. It has no reference to the pool, which can so be collected."""

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
    """Worker processes for one transform. Each thread that calls the pool uses one of them.

    transform: "module:function", see `hpctrain.data.transforms.transform`.
    The processes start with the first batch. They end on `close()`, when the pool is collected, and when this process
    ends or is killed. Raises RecipeError if `num_workers` is below 1.
    """

    def __init__(self, transform: str, *, num_workers: int) -> None:
        if num_workers < 1:
            raise RecipeError(f"a pool cannot have {num_workers} workers: at least 1 is needed")
        self.name = transform
        self.input_copies = 2  # the batch that was read, and its copy in shared memory
        self.num_workers = num_workers
        self.num_deaths = 0
        """Number of workers that ended unexpectedly."""
        self._places = _Places(num_workers)
        self._finalizer = weakref.finalize(self, _end_all, self._places)
        self._serving: dict[int, Worker] = {}  # by the thread that waits

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers, sorted."""
        with self._places.condition:
            return sorted(worker.process.pid for worker in self._places.all)

    def place(self, thread: int) -> str:
        """See `BatchTransformer`."""
        worker = self._serving.get(thread)
        if worker is None:
            return f"no worker yet: all {self.num_workers} are busy"
        return f"worker process {worker.process.pid}" + (
            "" if worker.is_ready else ", which is still importing its module"
        )

    def __call__(self, arrays: Arrays, *, context: TransformContext) -> Arrays:
        """Returns the transformed batch. Waits for an idle worker if necessary.

        Raises DataError if the transform raises an error, if `MAX_REMAKES` + 1 workers died over this batch, or if
        the pool was closed.
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
        """Returns an idle worker, or a new one if fewer than `num_workers` exist; otherwise waits."""
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
        """Ends the workers and waits for them. May be called more than once."""
        self._finalizer()
