"""Processes that transform batches, for Python that holds the interpreter lock.

The parent reads; a worker gets a batch in shared memory, and sends another back. Workers are started afresh
(never forked: that breaks MPI, pytorch#13787), know nothing of the launcher, and end when the parent does.
A worker that dies is replaced, and its batch is made again from what was read.
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
    """The workers and who is free. It does not know the pool, which can so be collected."""

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
        worker.process.kill()  # the thread that waits for it ends it
    for worker in idle:
        worker.end()


class WorkerPool:
    """Workers that all do one transform. Each thread that calls the pool keeps one of them busy.

    transform: "module:function", see `hpctrain.data.transforms.transform`.
    The processes start when the first batch comes, and end on `close()`, when the pool is collected, when
    the interpreter ends, and when this process is killed.
    """

    def __init__(self, transform: str, *, num_workers: int) -> None:
        if num_workers < 1:
            raise RecipeError(f"a pool of {num_workers} workers was asked for: at least 1 is needed")
        self.name = transform
        self.input_copies = 2  # what was read, and what is sent
        self.num_workers = num_workers
        self.num_deaths = 0
        """Workers that ended without being told to."""
        self._places = _Places(num_workers)
        self._finalizer = weakref.finalize(self, _end_all, self._places)

    @property
    def pids(self) -> list[int]:
        """The processes that live, for tools that look at them."""
        with self._places.condition:
            return sorted(worker.process.pid for worker in self._places.all)

    def __call__(self, arrays: Arrays, *, context: TransformContext) -> Arrays:
        """The transformed batch. Its arrays lie in memory that is freed with them.

        Raises DataError if the transform raises, or if `MAX_REMAKES` more workers died of this batch.
        """
        descriptor, description = shared_memory.write_arrays({**arrays, INDICES: context.indices})
        request = {
            "arrays": description, "seed": context.seed, "epoch": context.epoch, "start": context.start,
        }  # fmt: skip
        try:
            for attempt in range(1 + MAX_REMAKES):
                worker = self._take()
                try:
                    made = worker.transform(request, descriptor)
                except WorkerDied as death:
                    last = death
                    if attempt < MAX_REMAKES:
                        # Told at once: the run goes on, and somebody may wonder why it is slow.
                        print(f"hpctrain: a batch is made again: {death}", file=sys.stderr, flush=True)
                    self._put(worker, alive=False)
                except BaseException:
                    self._put(worker, alive=True)
                    raise
                else:
                    self._put(worker, alive=True)
                    return made
        finally:
            os.close(descriptor)
        first, count = int(context.indices[0]) if len(context.indices) else 0, len(context.indices)
        raise DataError(
            f"{1 + MAX_REMAKES} workers in turn died over one batch with the transform {self.name} (epoch "
            f"{context.epoch}, {count} samples, the first is {first}; last: {last}): look for what it needs in "
            "memory, and for faults in the libraries that it calls"
        )

    def _take(self) -> Worker:
        """An idle worker, or a new one if there is a vacancy; else wait."""
        places = self._places
        with places.condition:
            while True:
                if places.closed:
                    raise DataError("the workers have been ended: the loader was closed")
                while places.idle:
                    worker = places.idle.pop()
                    if worker.process.poll() is None:
                        return worker
                    # Killed while it had nothing to do: that is not the fault of the batch that comes now.
                    worker.end()
                    self._discard(worker)
                if not places.vacant:
                    places.condition.wait()
                elif places.all:
                    self._start()
                else:
                    while places.vacant:  # at the beginning all start together
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
        """End the workers and wait for them. May be called again."""
        self._finalizer()
