"""Parent's side of a worker process: starts it, sends batches, and ends it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.data.transforms import shared_memory
from hpctrain.data.transforms.transform import Arrays
from hpctrain.errors import DataError

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
    """Raised if a worker ended; the message says how."""


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns a worker's environment: the parent's without launchers' variables, and with one compute thread."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}
    package_root = str(Path(shared_memory.__file__).resolve().parents[3])
    searched = [package_root, *filter(None, [environ.get("PYTHONPATH")])]
    return {**_KEPT_MEMORY, **kept, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(searched)}


class Worker:
    """One worker process. To be used by one thread at a time. Raises DataError if it cannot be started."""

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
        """Returns the transformed arrays of a batch. descriptor: shared memory of the input, see `write_arrays`.

        Raises WorkerDied if the process ended, DataError if the transform raised an error.
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
        """Ends the process and waits for it. May be called more than once."""
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
    """Returns the arrays as views of the shared memory, freed with the last one; as copies if it is small."""
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
