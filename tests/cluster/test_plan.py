"""The plan of a cluster, without any cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.plan import HEAD, ClusterPlan, bytes_sent, hosts_file, shape_command, slurm_conf
from tests.cluster.record import Lifetime, Process, Record

NET_DEV = """Inter-|   Receive                        |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:  100       1    0    0    0     0          0         0   100       1    0    0    0     0       0          0
  eth0: 5000      10    0    0    0     0          0         0  7000      12    0    0    0     0       0          0
"""


def plan(**fields: object) -> ClusterPlan:
    return ClusterPlan(directory=Path("/var/somewhere"), **fields)  # type: ignore[arg-type]


def test_every_place_has_a_name_and_an_address_of_its_own() -> None:
    addresses = plan(num_nodes=64).addresses
    assert len(set(addresses.values())) == len(addresses) == 65
    for name, address in addresses.items():
        assert f"\n{address} {name}\n" in hosts_file(plan(num_nodes=64))


def test_slurm_knows_every_node_and_writes_only_into_the_clusters_directory() -> None:
    text = slurm_conf(plan(num_nodes=3, cores_per_node=5))
    for node in ("hpct0", "hpct1", "hpct2"):
        assert f"NodeName={node} NodeHostname={node}" in text
    assert "CoresPerSocket=5" in text
    settings = dict(line.split("=", 1) for line in text.splitlines())
    for key in ("StateSaveLocation", "SlurmdSpoolDir", "TmpFS", "SlurmctldPidFile", "SlurmdPidFile"):
        assert settings[key].startswith("/var/somewhere/")
    for key in ("SlurmdSpoolDir", "TmpFS", "SlurmdPidFile"):
        assert "%n" in settings[key]  # two nodes must not share one
    assert settings["SlurmctldHost"].startswith(HEAD)


@pytest.mark.parametrize(
    "fields", [{"num_nodes": 0}, {"num_nodes": 65}, {"cores_per_node": 0}, {"rate": "fast"}, {"rate": "200"}]
)
def test_a_plan_that_cannot_be_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"between 1 and 64|at least 1|write a number"):
        plan(**fields)


def test_a_limit_is_set_and_taken_away() -> None:
    assert "rate 200mbit" in " ".join(shape_command(device="eth0", rate="200mbit"))
    assert shape_command(device="eth0", rate=None) == ["tc", "qdisc", "delete", "dev", "eth0", "root"]


def test_the_bytes_that_left_are_read_from_the_kernels_table() -> None:
    assert bytes_sent(NET_DEV) == 7000
    with pytest.raises(ValueError, match="eth7"):
        bytes_sent(NET_DEV, device="eth7")


def test_a_process_id_given_out_again_is_another_process() -> None:
    mine = Process.of(1)
    assert mine.alive
    assert not Process(pid=1, started=mine.started + 1).alive


@pytest.mark.parametrize(
    ("lifetime", "ready", "stale"),
    [(Lifetime.OWNER, True, True), (Lifetime.KEPT, True, False), (Lifetime.KEPT, False, True)],
)
def test_a_record_comes_back_as_written_and_knows_whether_it_is_stale(
    tmp_path: Path, lifetime: Lifetime, ready: bool, stale: bool
) -> None:
    gone = Process(pid=1, started=-1)
    record = Record(
        num_nodes=2,
        rate=None,
        cores_per_node=2,
        lifetime=lifetime,
        owner=gone,
        places={HEAD: gone},
        ready=ready,
    )
    assert Record.read(tmp_path) is None
    record.write(tmp_path)
    assert Record.read(tmp_path) == record
    assert record.stale is stale
