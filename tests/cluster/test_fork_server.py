"""Ranks that srun starts, on two nodes: forked from a server on each, they are what they would be without."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from hpctrain.launch.fork_server.plan import find_client
from tests.cluster import Cluster, ClusterPlan
from tests.forked_ranks import PROGRAM, differences
from tests.stop_trials import prepare

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(find_client() is None, reason="the program that stands for a rank was not compiled"),
]


def test_ranks_of_srun_are_the_same_forked_or_started(cluster: Cluster, tmp_path: Path) -> None:
    compare(cluster, tmp_path)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs 2 CPUs")
def test_ranks_that_slurm_binds_are_the_same_forked_or_started(
    cluster_folder: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plan = ClusterPlan(
        directory=cluster_folder / f"test-{os.getpid()}-binds",
        num_nodes=2,
        rate=None,
        cores_per_node=2,
        binds_tasks=True,
    )
    with Cluster.up(plan, shared=[tmp_path_factory.getbasetemp()]) as cluster:
        cores = compare(cluster, tmp_path)
    assert all(len(each) == 1 for each in cores)
    assert cores[0] != cores[1]
    assert cores[2] != cores[3]


def compare(cluster: Cluster, tmp_path: Path) -> list[list[str]]:
    """Compares ranks on two nodes that are forked with ranks that are not. Returns the cores of each rank."""
    script = tmp_path / "job.sh"
    hpctrain = Path(sys.executable).with_name("hpctrain")
    launch = f"{hpctrain} launch -n 4 --ranks-per-node 2"
    program = f"{sys.executable} {PROGRAM} describe files"
    script.write_text(
        # As after salloc: Slurm then sets it for the first task of each node.
        "#!/bin/bash\nulimit -Sn 700; umask 027; unset TMPDIR\n"
        f"{launch} --no-fork-server -- {program} 2> cold.err || exit 9\nmkdir cold; mv rank-? cold\n"
        f"{launch} --fork-server -- {program} 2> warm.err || exit 8\nmkdir warm; mv rank-? warm\n"
        f"{launch} --fork-server -- {sys.executable} {PROGRAM} exit > exit 2> exit.err; [[ $? == 3 ]] || exit 7\n"
        f"{launch} --fork-server -- {hpctrain} train recipe.toml > train 2> train.err || exit 6\n"
        # Servers of supervised runs wait for some time.
        "srun --ntasks-per-node=1 --ntasks=2 bash -c 'for file in /dev/shm/hpctrain-fork*/*; do\n"
        f"if [[ $file -nt {script} ]]; then echo $file; fi; done' > left\n"
    )
    prepare(tmp_path)
    (tmp_path / "seen").mkdir()
    job = cluster.submit(
        ["--nodes=2", "--ntasks-per-node=2", str(script)], cwd=tmp_path, env={"SEEN": str(tmp_path / "seen")}
    )
    end = cluster.wait_for(job, timeout_s=300)
    said = "".join(path.read_text() for path in sorted(tmp_path.glob("*.err")))
    assert (end.state, end.exit_code) == ("COMPLETED", 0), said
    assert "starts by itself" not in said
    for rank in range(4):
        found = differences(tmp_path / f"cold/rank-{rank}", tmp_path / f"warm/rank-{rank}")
        assert not found, (rank, found)
    assert "finished at step" in (tmp_path / "train").read_text()
    assert (tmp_path / "left").read_text() == ""
    warm = [json.loads((tmp_path / f"warm/rank-{rank}").read_text()) for rank in range(4)]
    return [rank["status"]["Cpus_allowed_list"].split(",") for rank in warm]
