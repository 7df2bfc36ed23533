"""A node's link is cut in mid-reduction: every rank names the node and ends with code 6, the cut node's too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.ranks_launcher import REPOSITORY

pytestmark = pytest.mark.launches

TIMEOUT_S = 8.0
NUM_RANKS = 8
CUT = "hpct2"
# The shell says how its rank ended, also where srun cannot hear of it any more.
SCRIPT = (
    'sums=$1; shift; "$@"; echo $? > "$sums/$SLURM_PROCID.partial"; mv "$sums/$SLURM_PROCID"{.partial,.code}'
)


def wait_for(paths: list[Path], *, srun: subprocess.Popen[bytes], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while missing := [path.name for path in paths if not path.exists()]:
        assert time.monotonic() < deadline_s, f"{missing} after {timeout_s:g} s, srun: {srun.poll()}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("backend", "algorithm"),
    [("mpi", "flat"), ("mpi", "hierarchical"), ("mpi", "engine"), ("horovod", "flat"), ("horovod", "engine")],
)
def test_a_cut_link_ends_every_rank_with_code_6_and_the_nodes_name(
    cluster: Cluster, tmp_path: Path, backend: str, algorithm: str
) -> None:
    case = [sys.executable, "-m", "tests.cluster.rank_cases", "reduce_for_ever", backend, algorithm]
    command = ["srun", "--nodes=4", "--ntasks-per-node=2", "--wait=5", f"--output={tmp_path}/%t.log"]
    command += ["bash", "-c", SCRIPT, "sh", str(tmp_path), *case, str(TIMEOUT_S), str(tmp_path)]
    with open(tmp_path / "srun.out", "wb") as told:
        srun = subprocess.Popen(
            cluster.argv(command, cwd=REPOSITORY), env=cluster.environment(),
            stdin=subprocess.DEVNULL, stdout=told, stderr=told, start_new_session=True,
        )  # fmt: skip
    codes = [tmp_path / f"{rank}.code" for rank in range(NUM_RANKS)]
    try:
        wait_for([tmp_path / "sums"], srun=srun, timeout_s=60)
        cluster.cut_link(CUT)
        try:
            wait_for(codes, srun=srun, timeout_s=TIMEOUT_S + 6)
        finally:
            cluster.mend_link(CUT)
        srun.wait(40)
    finally:
        if srun.poll() is None:
            os.killpg(srun.pid, signal.SIGKILL)
            srun.wait()
    logs = {rank: (tmp_path / f"{rank}.log").read_text() for rank in range(NUM_RANKS)}
    assert [path.read_text() for path in codes] == ["6\n"] * NUM_RANKS, logs
    for rank, log in logs.items():
        if rank in (4, 5):
            expected = f"{CUT} (this host) reaches none of the 3 others asked (hpct0, hpct1, hpct3)"
        else:
            expected = f"{CUT} cannot be reached from "
        assert expected in log, log
        assert f"rank {rank} on hpct{rank // 2} " in log
