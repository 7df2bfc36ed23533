"""A rank under srun that the kernel kills, as its node lacks memory: `hpctrain supervise` divides the batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hpctrain.supervise import AttemptEnd
from tests.cluster import Cluster
from tests.cluster.supervised_jobs import command_of, submit
from tests.cluster.training_jobs import output
from tests.memory_group import memory_group
from tests.run_files import losses_of
from tests.supervised_runs import attempts

pytestmark = pytest.mark.launches

# One rank needs some 1,400 MB with its whole share of a batch, and some 300 MB with little of it.
NODE_BYTES = 1_000_000_000
RECIPE = """
[run]
name = "short-of-memory"
directory = "run"
steps = 6
[task]
target = "tests.faults.faulty_tasks:Hungry"
[data]
train = "data/digits/train"
global_batch = 1024
[optimizer]
lr = 1e-3
"""


@contextmanager
def little_memory(cluster: Cluster, node: str) -> Iterator[None]:
    """What slurmd starts on the node has `NODE_BYTES` of memory together."""
    (slurmd,) = [pid for pid in cluster.processes(node) if b"slurmd\0" in command_of(pid)]
    with memory_group(NODE_BYTES) as group:
        (group / "cgroup.procs").write_text(str(slurmd))
        try:
            yield
        finally:
            (group.parent / "cgroup.procs").write_text(str(slurmd))


def losses(folder: Path) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The loss of each step; of a step that was repeated, the later one."""
    return np.array(list(losses_of(folder / "run").values()))


def trained(cluster: Cluster, folder: Path, name: str, *, data: Path) -> Path:
    """Runs the job to its end, a rank on each of two nodes. Returns its folder."""
    where = folder / name
    where.mkdir()
    (where / "data").symlink_to(data)
    (where / "recipe.toml").write_text(RECIPE)
    job = submit(cluster, where, "--nodelist=hpct1,hpct2", "--nodes=2", "--ntasks-per-node=1")
    ended = cluster.wait_for(job, timeout_s=500)
    assert ended.exit_code == 0, output(where)
    return where


def micro_batches(folder: Path) -> int:
    summary: Mapping[str, int] = json.loads((folder / "run" / "summary.json").read_text())
    return summary["micro_batches"]


@pytest.mark.thorough  # tests/ranks/train/test_guards.py, under mpirun
def test_after_the_kernel_has_killed_a_rank_on_one_node_all_divide_the_batch_and_the_losses_are_the_same(
    cluster: Cluster, tmp_path: Path, data: Path
) -> None:
    roomy = trained(cluster, tmp_path, "roomy", data=data)
    assert micro_batches(roomy) == 1
    with little_memory(cluster, "hpct2"):
        short = trained(cluster, tmp_path, "short", data=data)
    *killed, finished = attempts(short)
    assert killed, output(short)
    assert [attempt.cause for attempt in killed] == [AttemptEnd.OUT_OF_MEMORY] * len(killed), output(short)
    assert finished.cause is AttemptEnd.FINISHED
    assert finished.nodes == ("hpct1", "hpct2")  # a node is not lost for that
    assert micro_batches(short) == 2 ** len(killed)
    np.testing.assert_allclose(losses(short), losses(roomy), rtol=1e-5)
