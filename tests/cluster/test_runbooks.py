"""Each failure that has a runbook is provoked on a real cluster: its line is printed, with the exit code it names.

Where another module provokes one already, the line is looked for there: F2 in test_stragglers.py; F3, a lost rank, F7
and F8 in test_slurm.py; F3, a cut link, in test_cut_link.py; F9 in tests/faults/test_training_faults.py.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import h5py
import pytest

from hpctrain.errors import ExitCode
from tests.cluster import Cluster
from tests.ranks_launcher import REPOSITORY
from tests.runbook import find_shown

pytestmark = pytest.mark.launches

# Each node's own, which the others do not see.
LOCAL = Path("/tmp/local")

RECIPE = """
[run]
name = "digits"
directory = "runs/digits"
steps = 1000
timeout_s = 8
[task]
target = "tests.faults.planned_failures:FailsInOneRun"
[data]
train = "data/digits/train"
global_batch = 64
[optimizer]
lr = 1e-3
max_skipped_in_row = 2
[guards]
max_roll_backs = 1
[checkpoint]
every_steps = 5
"""


@pytest.fixture
def local(cluster: Cluster) -> Iterator[dict[str, Path]]:
    """Node -> its folder LOCAL, as this process sees it."""
    found = {node: cluster.plan.own_tmp(node) / LOCAL.name for node in cluster.node_names}
    for path in found.values():
        path.mkdir()
    yield found
    for path in found.values():
        shutil.rmtree(path)


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


def train(
    cluster: Cluster, folder: Path, *settings: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`srun hpctrain train`, a rank on each of four nodes."""
    words = [word for each in settings for word in ("--set", each)]
    srun = ["srun", "--nodes=4", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    return cluster.run(
        [*srun, "hpctrain", "train", "recipe.toml", *words], cwd=folder, env=env, timeout_s=300
    )


def assert_shown(ended: subprocess.CompletedProcess[str], *texts: str, page: str, code: int) -> None:
    """The ranks have ended with `code`, and printed a line with each of the texts that the page shows."""
    printed = ended.stdout + ended.stderr
    assert ended.returncode == code, printed
    for text in texts:
        find_shown(printed, text, page=page)


def test_a_module_that_one_node_lacks_ends_all_at_start(
    cluster: Cluster, folder: Path, local: dict[str, Path]
) -> None:
    for node, path in local.items():
        if node != "hpct2":
            (path / "own_task.py").write_text("from hpctrain.tasks.digits import Digits\n")
    env = {"PYTHONPATH": f"{LOCAL}:{REPOSITORY}"}
    ended = train(cluster, folder, "task.target=own_task:Digits", "task.options={}", env=env)
    assert_shown(ended, "cannot be imported", page="f1-start-failure.md", code=ExitCode.USAGE)
    assert not (folder / "runs").exists()


@pytest.mark.thorough  # tests/faults/test_training_faults.py
def test_another_number_of_ranks_than_the_recipe_asks_for_ends_all_at_start(
    cluster: Cluster, folder: Path
) -> None:
    ended = train(cluster, folder, "run.ranks=16")
    assert_shown(ended, "the recipe asks for", page="f9-wrong-topology.md", code=ExitCode.LAUNCH)


def test_another_copy_of_the_data_on_one_node_ends_all_at_start(
    cluster: Cluster, folder: Path, local: dict[str, Path]
) -> None:
    for node, path in local.items():
        split = "test" if node == "hpct3" else "train"
        shutil.copytree(folder / "data" / "digits" / split, path / "digits")
    ended = train(cluster, folder, f"data.train={LOCAL}/digits")
    assert_shown(ended, "must be the same on every rank", page="f10-data.md", code=ExitCode.DATA)


def test_a_run_meets_one_failure_after_the_other(cluster: Cluster, folder: Path) -> None:
    # Two micro-batches from step 3 on, so call 24 is in step 13: after the checkpoint of step 10.
    ended = train(cluster, folder, "task.options={short_at=3,nan_from=24}")
    assert_shown(ended, "ran out of memory", page="f6-out-of-memory.md", code=ExitCode.DIVERGED)
    assert_shown(
        ended, "rolled back to step", "has diverged", page="f5-divergence.md", code=ExitCode.DIVERGED
    )

    newest = folder / "runs" / "digits" / "checkpoints" / "step-00000010.h5"
    damage(newest, tensor="model%2F2.weight")
    verified = cluster.run(
        ["hpctrain", "checkpoint", "verify", str(newest.parent.relative_to(folder))],
        cwd=folder,
        timeout_s=300,
    )
    assert_shown(
        verified, "DAMAGED", "checkpoints damaged", page="f4-damaged-checkpoint.md", code=ExitCode.CHECKPOINT
    )

    ended = train(cluster, folder, "task.options={stop_at=8}")
    code = ExitCode.COMMUNICATION
    assert_shown(ended, "CHECKPOINT REJECTED", "resumed from", page="f4-damaged-checkpoint.md", code=code)
    assert_shown(ended, "micro-batches: 2 of", page="f6-out-of-memory.md", code=code)
    assert_shown(
        ended,
        "has waited",
        "did not come",
        "last heard of",
        page="f3-hang-or-lost-rank.md",
        code=code,
    )


def damage(checkpoint: Path, *, tensor: str) -> None:
    """Turns over a bit of a tensor. tensor: its name in the file."""
    with h5py.File(checkpoint) as hdf5:
        offset = hdf5["tensors"][tensor].id.get_offset()
    with checkpoint.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
