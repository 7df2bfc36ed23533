"""Checkpoints on GlusterFS under srun: real caches on every node, and storage servers that are killed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint import step_of
from tests.cluster import Cluster, Volume
from tests.cluster.gluster_cases import FORMS
from tests.cluster.record import Record, end, namespace_of, processes_in
from tests.ranks_launcher import REPOSITORY
from tests.states import wait_for

pytestmark = pytest.mark.launches

RECIPE = """
[run]
name = "digits"
directory = "run"
steps = 4
seed = 1
backend = "mpi"
[task]
target = "hpctrain.tasks.digits:Digits"
[data]
train = "data/digits/train"
held_out = "data/digits/test"
global_batch = 64
[reduction]
algorithm = "flat"
[checkpoint]
files = "node"
"""
# The cluster belongs to another process, so that a test can kill that.
_OWNER = """
import sys
from pathlib import Path
from tests.cluster import Cluster, ClusterPlan, Volume
plan = ClusterPlan(
    directory=Path(sys.argv[1]), num_nodes=4, rate=None, cores_per_node=4, volumes=tuple(Volume)
)
with Cluster.up(plan, shared=[Path(sys.argv[2])]):
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def owner(gluster_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    directory = gluster_folder / f"test-{os.getpid()}-gluster"
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(directory), str(tmp_path_factory.getbasetemp())], cwd=REPOSITORY,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == "up\n", process.stderr.read()
        yield process
    finally:
        process.stdin.close()
        process.wait(timeout=300)
        process.stdout.close()
        process.stderr.close()
        end(directory)


@pytest.fixture(scope="module")
def cluster(owner: subprocess.Popen[str], gluster_folder: Path) -> Cluster:
    return Cluster.attach(gluster_folder / f"test-{os.getpid()}-gluster")


def srun(num_nodes: int, *command: str, ranks_per_node: int = 2) -> list[str]:
    return ["srun", f"--nodes={num_nodes}", f"--ntasks-per-node={ranks_per_node}", "--overcommit", *command]


def case(*words: str) -> Sequence[str]:
    return ["python", "-m", "tests.cluster.gluster_cases", *words]


def half_written_on(bricks: Mapping[str, Path]) -> str | None:
    """A node whose brick has got a megabyte of a checkpoint that is being written."""
    for node, brick in bricks.items():
        for path in brick.glob("file/.step-*[1-9].h5.*"):  # step 0 is what engines are tried out with
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_blocks * 512 > 1_000_000:
                    return node
    return None


def kill_while_written(cluster: Cluster, volume: Volume) -> float:
    """Kill a server of the volume that has begun to take a checkpoint. When: CLOCK_MONOTONIC, s."""
    nodes = volume.servers(cluster.node_names)
    servers = {node: cluster.brick_server(volume, node=node) for node in nodes}
    bricks = {node: volume.brick(cluster.plan.directory, node=node) for node in nodes}
    node = wait_for(lambda: half_written_on(bricks), every_s=0.002)
    servers[node].kill()
    return time.monotonic()


def _either(happened: Callable[[], bool], ended: Callable[[], int | None]) -> bool:
    return happened() or ended() is not None


@pytest.fixture(scope="module")
def saved(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """4 x 2 ranks save on both volumes; on each a server is killed while it takes part of a checkpoint.

    What the ranks saw, by volume and form, and when each volume's server was killed.
    """
    signals = tmp_path_factory.mktemp("signals")
    volumes = [str(cluster.volume(volume)) for volume in (Volume.DISTRIBUTED, Volume.DISPERSED)]
    ranks = subprocess.Popen(
        cluster.argv(srun(4, *case("saves", str(signals), *volumes)), cwd=REPOSITORY),
        env=cluster.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    killed = {}
    try:
        for volume in (Volume.DISTRIBUTED, Volume.DISPERSED):
            started = signals / f"{volume.value}.saving"
            wait_for(functools.partial(_either, started.exists, ranks.poll), every_s=0.002)
            if ranks.poll() is not None:
                break
            killed[volume.value] = kill_while_written(cluster, volume)
            (signals / f"{volume.value}.killed").touch()
        output, errors = ranks.communicate(timeout=300)
    except BaseException:
        ranks.kill()
        ranks.communicate()
        raise
    assert ranks.returncode == 0, f"{output}\n{errors}\n{cluster.logs()}"
    return {"attempts": json.loads(output.splitlines()[-1]), "killed": killed}


@pytest.fixture(scope="module")
def loaded(cluster: Cluster, saved: dict[str, Any]) -> dict[str, Any]:
    """What 2 x 2 ranks find later: the distributed volume has its server back, the dispersed one still lacks it."""
    cluster.start_bricks(Volume.DISTRIBUTED)
    folders = {
        f"{volume.value} {form}": f"{cluster.volume(volume)}/{form}" for volume in Volume for form in FORMS
    }
    done = cluster.run(srun(2, *case("loads", *folders.values())), timeout_s=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{cluster.logs()}"
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: found[folder] for name, folder in folders.items()}


def test_a_volume_is_the_same_on_every_node_and_not_on_the_machine(cluster: Cluster) -> None:
    for volume in Volume:
        where = cluster.volume(volume)
        wrote = cluster.run(["sh", "-c", f"hostname > {where}/greeting"], timeout_s=300, place="hpct1")
        assert wrote.returncode == 0, wrote.stderr
        for place in ("hpct-head", *cluster.node_names):
            read = cluster.run(["cat", f"{where}/greeting"], timeout_s=300, place=place)
            assert read.stdout == "hpct1\n", read.stderr
        assert list(where.iterdir()) == []
    assert "glusterfs" not in Path("/proc/self/mountinfo").read_text()


def test_eight_ranks_save_on_both_volumes(saved: dict[str, Any]) -> None:
    assert {name: attempts[0][3] for name, attempts in saved["attempts"].items()} == {
        f"{volume.value} {form}": None for volume in Volume for form in FORMS
    }


def test_a_server_of_the_dispersed_volume_killed_while_saving_is_not_even_noticed(
    saved: dict[str, Any],
) -> None:
    attempts = saved["attempts"]["dispersed file"]
    at_s = saved["killed"]["dispersed"]
    assert any(begin_s < at_s < end_s for _, begin_s, end_s, _ in attempts)
    assert [error for *_, error in attempts] == [None] * len(attempts)


def test_a_server_of_the_distributed_volume_killed_while_saving_is_an_error_on_all_ranks(
    saved: dict[str, Any],
) -> None:
    at_s = saved["killed"]["distributed"]
    met = [attempt for attempt in saved["attempts"]["distributed file"] if attempt[1] < at_s < attempt[2]]
    assert len(met) == 1
    _, _, end_s, error = met[0]
    assert error is not None
    assert "NOT AGREED" not in error
    assert end_s - at_s < 10


def test_whatever_was_saved_is_whole_and_nothing_that_was_reported_is_lost(
    saved: dict[str, Any], loaded: dict[str, Any]
) -> None:
    """By other ranks on fewer nodes, and on the dispersed volume without the server that was killed."""
    assert loaded.keys() == saved["attempts"].keys()
    for name, attempts in saved["attempts"].items():
        reported = {step for step, _, _, error in attempts if error is None}
        wrong = {step_of(Path(path)): differing for path, differing in loaded[name]}
        assert {step: differing for step, differing in wrong.items() if differing} == {}
        assert reported <= wrong.keys()


def test_folders_are_whole_on_a_volume_that_lacks_a_server(cluster: Cluster, saved: dict[str, Any]) -> None:
    """Where all ranks make a folder at once, every twentieth or so then answers "stale file handle" for ever."""
    assert saved["killed"].keys() == {volume.value for volume in Volume}
    done = cluster.run(srun(4, *case("folders", str(cluster.volume(Volume.DISPERSED)), "60")), timeout_s=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert json.loads(done.stdout.splitlines()[-1]) == [[]] * 8


def test_training_saved_by_four_nodes_goes_on_on_two(
    cluster: Cluster, saved: dict[str, Any], tmp_path: Path
) -> None:
    """The run directory is on the dispersed volume, which lacks a server."""
    assert Volume.DISPERSED.value in saved["killed"]
    where = cluster.volume(Volume.DISPERSED)
    packed = cluster.run(["hpctrain", "data", "pack", "digits", "data/digits"], timeout_s=300, cwd=where)
    assert packed.returncode == 0, packed.stderr
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    train = ["hpctrain", "train", str(recipe)]
    first = cluster.run(srun(4, *train, ranks_per_node=1), timeout_s=300, cwd=where)
    assert first.returncode == 0, f"{first.stdout}\n{first.stderr}"
    assert "4 ranks, 4 nodes x 1 rank" in first.stdout
    more = [*train, "--set", "run.steps=6"]
    second = cluster.run(srun(2, *more, ranks_per_node=1), timeout_s=300, cwd=where)
    assert second.returncode == 0, f"{second.stdout}\n{second.stderr}"
    assert "2 ranks, 2 nodes x 1 rank" in second.stdout
    assert "resumed from" in second.stdout
    assert "step-00000004" in second.stdout
    assert "finished at step 6" in second.stdout
    listed = cluster.run(["ls", "run/checkpoints/step-00000004"], timeout_s=300, cwd=where)
    assert listed.stdout.split() == [f"data-0000{file}.h5" for file in range(4)]


def test_a_killed_owner_takes_the_volumes_down_while_they_are_written(
    cluster: Cluster, owner: subprocess.Popen[str]
) -> None:
    """The last test of this file: there is no cluster after it."""
    directory = cluster.plan.directory
    record = Record.read(directory)
    assert record is not None
    namespaces = {namespace_of(process.pid, "pid") for process in record.places.values()}
    writer = subprocess.Popen(
        cluster.argv(
            ["dd", "if=/dev/zero", f"of={cluster.volume(Volume.DISPERSED)}/zeros", "bs=1M", "count=2000"],
            cwd=REPOSITORY, place="hpct2",
        ),
        env=cluster.environment(), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        # A test before this one may have left only two of the three servers.
        bricks = directory / "bricks"
        wait_for(lambda: any(bricks.glob("*/dispersed/zeros")))
        assert writer.poll() is None
        owner.kill()
        wait_for(lambda: not processes_in(namespaces, "pid"), timeout_s=60)
    finally:
        writer.kill()
        writer.wait()
    assert "glusterfs" not in Path("/proc/mounts").read_text()
    end(directory)
    assert not directory.exists()
