"""A rank that hangs before it starts hpctrain, under plain srun, which would wait for it when all others have ended."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from hpctrain.errors import ExitCode
from tests.cluster import Cluster
from tests.ranks_launcher import REPOSITORY

pytestmark = pytest.mark.launches

HANGS = """
import os, time
if os.environ["SLURM_PROCID"] == "1":
    time.sleep(3600)
import hpctrain
hpctrain.init(timeout_s=40)
"""


@pytest.mark.thorough
def test_it_is_named_and_the_step_ends(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run(
        ["srun", "--nodes=3", "--ntasks-per-node=1", sys.executable, "-c", HANGS],
        timeout_s=300, cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    # The first is for a machine on which the nodes' ranks start far apart.
    assert done.returncode in (ExitCode.COMMUNICATION, 128 + signal.SIGKILL, 128 + signal.SIGTERM), (
        done.stderr
    )
    assert re.search(r"rank [02] on hpct\d has waited 35\.0 s at its start", done.stderr), done.stderr
    assert re.search(r"[Aa]bsent.*\b1\b|the absent ranks are on other nodes", done.stderr), done.stderr
    assert list(tmp_path.iterdir()) == []
