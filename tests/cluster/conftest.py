"""The cluster that the tests of this folder share; without one they are skipped, with the reason in words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, ClusterPlan, why_no_volumes, why_not
from tests.cluster.cluster import CLUSTERS
from tests.cluster.record import Record, end
from tests.cluster.requirements import FUSE

# .ci/run sets it to `required` where a cluster can be made: then a skipped test is an error.
VARIABLE = "HPCTRAIN_CLUSTER"


@pytest.fixture(scope="session")
def cluster_folder() -> Path:
    """Where clusters of the tests may be made. Skips the test where there can be none."""
    reason = why_not()
    if reason is not None:
        if os.environ.get(VARIABLE) == "required":
            pytest.fail(f"{VARIABLE}=required, and there is no cluster: {reason}")
        pytest.skip(f"no Slurm cluster: {reason}")
    if CLUSTERS.exists():
        for directory in CLUSTERS.glob("test-*"):
            record = Record.read(directory)
            if record is not None and record.stale:  # of an earlier test session that was killed
                end(directory)
    return CLUSTERS


@pytest.fixture(scope="session")
def cluster(cluster_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes with links of 1 Gbit/s, for the whole test session. Every place sees the tests' temporary folders."""
    plan = ClusterPlan(
        directory=cluster_folder / f"test-{os.getpid()}", num_nodes=4, rate="1gbit", cores_per_node=4
    )
    with Cluster.up(plan, shared=[tmp_path_factory.getbasetemp()]) as up:
        yield up


@pytest.fixture(scope="session")
def data(packed_digits: Path) -> Path:
    """A folder with the packed digits, which all places see."""
    return packed_digits.parent


@pytest.fixture
def folder(data: Path, tmp_path: Path) -> Path:
    """A folder that all nodes share, with the digits, as a user would submit from."""
    (tmp_path / "data").symlink_to(data)
    return tmp_path


@pytest.fixture(scope="session")
def gluster_folder(cluster_folder: Path) -> Path:
    """Where clusters with volumes of GlusterFS may be made. Skips the test where there can be none."""
    cluster_folder.mkdir(parents=True, exist_ok=True)
    reason = why_no_volumes(cluster_folder)
    if reason is not None:
        if os.environ.get(VARIABLE) == "required" and FUSE.exists():
            pytest.fail(f"{VARIABLE}=required, and there are no volumes: {reason}")
        pytest.skip(f"no volumes of GlusterFS: {reason}")
    return cluster_folder


@pytest.fixture(autouse=True)
def _daemon_logs_on_failure(request: pytest.FixtureRequest) -> Iterator[None]:
    failed_before = request.session.testsfailed
    yield
    if request.session.testsfailed > failed_before and "cluster" in request.fixturenames:
        print(request.getfixturevalue("cluster").logs())
