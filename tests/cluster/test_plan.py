"""The plan of a cluster, without any cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.gluster_volume import Volume
from tests.cluster.plan import (
    HEAD,
    ClusterPlan,
    bytes_sent,
    folders,
    hosts_file,
    place_setup,
    shape_command,
    slurm_conf,
)
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
    "fields",
    [
        {"num_nodes": 0},
        {"num_nodes": 65},
        {"cores_per_node": 0},
        {"rate": "fast"},
        {"rate": "200"},
        {"num_nodes": 2, "volumes": (Volume.DISPERSED,)},
    ],
)
def test_a_plan_that_cannot_be_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"between 1 and 64|at least [13]|write a number"):
        plan(**fields)


def test_a_dispersed_volume_has_three_bricks_and_a_distributed_one_a_brick_on_every_node() -> None:
    made = plan(num_nodes=4, volumes=tuple(Volume))
    commands = {volume: volume.create(made.directory, node_names=made.node_names) for volume in made.volumes}
    for volume, num_bricks in ((Volume.DISTRIBUTED, 4), (Volume.DISPERSED, 3)):
        bricks = [word.split(":")[1] for word in commands[volume] if ":" in word]
        assert len(set(bricks)) == num_bricks
        assert set(map(Path, bricks)) <= set(folders(made))
        assert volume.mount_point(made.directory) in folders(made)
    words = " ".join(commands[Volume.DISPERSED])
    assert "disperse 3 redundancy 1" in words
    assert "disperse" not in " ".join(commands[Volume.DISTRIBUTED])


def test_every_place_of_a_cluster_with_volumes_has_what_glusterfs_keeps_to_itself() -> None:
    made = plan(num_nodes=3, volumes=tuple(Volume))
    logs = set()
    for place in made.addresses:
        setup = place_setup(made, place=place)
        covered = {command[-1] for command in setup if command[0] == "mount"}
        assert {"/run", "/var/lib/glusterd", "/var/log/glusterfs"} <= covered
        logs |= {command[2] for command in setup if command[-1] == "/var/log/glusterfs"}
    assert len(logs) == 4  # no two places write to the same
    assert not any("gluster" in word for command in place_setup(plan(), place=HEAD) for word in command)


def test_what_is_shared_under_tmp_stands_where_it_stood_and_the_rest_is_every_places_own() -> None:
    made = ClusterPlan(directory=Path("/tmp/lab/cluster"), num_nodes=2)
    shared = [Path("/tmp/work/runs"), Path("/tmp/work"), Path("/srv/data"), Path("/tmp"), Path("/tmpfs/x")]
    covers = set()
    for place in made.addresses:
        commands = [c for c in place_setup(made, place=place, shared=shared) if c[0] == "mount"]
        # With what has been mounted in them.
        *binds, (own, covered) = [command[-2:] for command in commands if "--rbind" in command]
        assert (commands[-1][-2:], covered) == ([own, "/tmp"], "/tmp")
        stood = ["/tmp/lab/cluster", "/tmp/work", "/tmp/work/runs"]
        assert binds == [[path, path.replace("/tmp", own, 1)] for path in stood]
        assert Path(own) in folders(made)
        covers.add(own)
    assert len(covers) == 3


def test_the_server_of_a_brick_is_known_by_its_command_line() -> None:
    words = [b"/usr/sbin/glusterfsd", b"-s", b"hpct1", b"--volfile-id", b"dispersed.hpct1.var-x-bricks", b""]
    assert Volume.DISPERSED.is_served_by(words, node="hpct1")
    assert not Volume.DISPERSED.is_served_by(words, node="hpct2")
    assert not Volume.DISTRIBUTED.is_served_by(words, node="hpct1")
    assert not Volume.DISPERSED.is_served_by([b"grep", *words[1:]], node="hpct1")
    assert not Volume.DISPERSED.is_served_by([], node="hpct1")


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
        volumes=["dispersed"],
        ready=ready,
    )
    assert Record.read(tmp_path) is None
    record.write(tmp_path)
    assert Record.read(tmp_path) == record
    assert record.stale is stale
