"""One rank of test_start: python -m tests.ranks.launch.start_rank CASE."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import torch

CHILD = "import hpctrain; hpctrain.init(timeout_s=60); print('the child has started')"
MPI_FIRST = (
    "from mpi4py import MPI; import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
)


def absent(timeout_s: str, left: str) -> None:
    """Rank 0 starts, rank 1 leaves, rank 2 hangs, rank 3 starts late. left: a file by which the others know that rank 1
    has left: if one had started MPI before, Open MPI would end the run itself."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    if rank == 1:
        Path(f"{left}.partial").write_text(str(os.getpid()))
        Path(f"{left}.partial").rename(left)
        sys.exit(0)
    if rank == 2:
        time.sleep(600)
    while not Path(left).exists() or Path("/proc", Path(left).read_text()).exists():
        time.sleep(0.05)
    if rank == 3:
        time.sleep(2)
    import hpctrain

    hpctrain.init(timeout_s=float(timeout_s))
    print("started", flush=True)


def started(how: str) -> None:
    """A late rank, a second start, and a child that must not start; then rank 1 exits alone."""
    import hpctrain

    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        time.sleep(3)
    with hpctrain.init(timeout_s=200):
        pass
    session = hpctrain.init(timeout_s=200)
    assert float(session.all_reduce(torch.ones(()))) == session.world_size
    assert not list(Path("/dev/shm").glob(f"hpctrain-start-{os.getuid()}-*-{os.getppid()}-*"))
    if session.rank == 0:
        done = subprocess.run([sys.executable, "-c", CHILD], check=False, timeout=200)
        print(f"the child's code is {done.returncode}", flush=True)
    session.world.barrier()
    if session.rank == 1:
        if how == "raise":
            raise SystemExit(3)
        sys.exit(256 if how == "256" else 3)
    while True:
        session.all_reduce(torch.ones(3))
        time.sleep(0.05)


def mpi4py_first(how: str) -> None:
    """mpi4py was imported first, and finalizes MPI unless it is kept from it; then rank 1 exits alone."""
    import mpi4py.MPI  # noqa: F401

    import hpctrain

    session = hpctrain.init(timeout_s=300 if how == "3" else 30)
    session.world.barrier()
    if session.rank == 1:
        raise SystemExit(int(how))
    while True:
        session.all_reduce(torch.ones(3))
        time.sleep(0.05)


def file_at_exit(path: str) -> None:
    """An MPI-IO file of h5py's is open when the program ends."""
    import h5py
    from mpi4py import MPI

    import hpctrain

    session = hpctrain.init(timeout_s=300)
    globals()["kept"] = file = h5py.File(path, "w", driver="mpio", comm=MPI.COMM_WORLD)
    file.create_dataset("x", (4,), "i8")[session.rank] = session.rank + 1


def child_of_mpi() -> None:
    """Rank 0 has started MPI without hpctrain."""
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        subprocess.run([sys.executable, "-c", MPI_FIRST, CHILD], check=False, timeout=200)
    else:
        subprocess.run([sys.executable, "-c", "from mpi4py import MPI"], check=False, timeout=200)


def one_ends(code: str) -> None:
    """All ranks end without closing the session, with one code."""
    import hpctrain

    session = hpctrain.init(timeout_s=200)
    session.world.barrier()
    print(f"rank {session.rank} ends", flush=True)
    sys.exit(int(code))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
