"""The doctor's checks of network and forking: pure, from given facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.comm.backends.library_probe import transports_in
from hpctrain.run.doctor.finding import Finding, Severity
from hpctrain.run.doctor.network import judge_network, keeps_to_tcp, kernel_version, read_network

PORT = {"device": "mlx5_0", "port": "1", "active": True, "layer": "InfiniBand", "rate": "200 Gb/sec"}


def only(findings: list[Finding], topic: str) -> Finding:
    (found,) = (finding for finding in findings if finding.topic == topic)
    return found


def network(*, kernel: str = "6.1.0", may_open: bool = True, **variables: str) -> dict[str, Any]:
    return {"ports": [PORT], "may_open": may_open, "variables": variables, "kernel": kernel}


@pytest.mark.parametrize(
    ("facts", "mpi", "words"),
    [
        (network(may_open=False), {}, "may not open /dev/infiniband"),
        (network(UCX_TLS="tcp,self"), {}, "UCX_TLS=tcp,self keeps communication on TCP"),
        (
            network(),
            {"transports": ["mca_btl_tcp", "mca_btl_vader", "mca_pml_ob1"]},
            "uses its component ob1",
        ),
        ({**network(), "ports": [{**PORT, "active": False}]}, {}, "no port of the RDMA devices is active"),
    ],
)
def test_tcp_where_there_is_infiniband_is_a_warning(
    facts: dict[str, Any], mpi: dict[str, Any], words: str
) -> None:
    found = only(judge_network({"network": facts, "mpi": mpi}), "network")
    assert found.level is Severity.WARNING
    assert words in found.text
    assert found.remedy


@pytest.mark.parametrize(
    ("transports", "words"),
    [
        (["mca_pml_ucx", "libucp"], "through UCX"),
        (["mca_pml_ob1", "mca_btl_openib"], "MPI does not show"),
        (["mca_mtl_ofi", "mca_pml_cm", "libfabric"], "through libfabric"),
        ([], "MPI does not show"),
    ],
)
def test_infiniband_in_use_or_not_known_to_be_unused_is_fine(transports: list[str], words: str) -> None:
    found = only(judge_network({"network": network(), "mpi": {"transports": transports}}), "network")
    assert found.level is Severity.OK
    assert words in found.text
    assert "mlx5_0 200 Gb/sec (InfiniBand)" in found.text


@pytest.mark.parametrize(
    ("variables", "forced"),
    [
        ({}, False),
        ({"OMPI_MCA_btl": "tcp,self"}, False),  # pml ucx is chosen all the same
        ({"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self,vader"}, True),
        ({"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "openib,self,vader"}, False),
        ({"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^tcp"}, False),
        ({"UCX_TLS": "rc_x,sm,self"}, False),
        ({"UCX_TLS": "all"}, False),
        ({"UCX_TLS": "^tcp"}, False),
        ({"UCX_TLS": "sm,self,tcp"}, True),
        ({"FI_PROVIDER": "tcp;ofi_rxm"}, True),
        ({"FI_PROVIDER": "verbs;ofi_rxm"}, False),
        ({"I_MPI_FABRICS": "shm:tcp"}, True),
        ({"I_MPI_FABRICS": "shm:ofi"}, False),
    ],
)
def test_settings_that_keep_mpi_on_tcp_are_recognised(variables: dict[str, str], forced: bool) -> None:
    assert (keeps_to_tcp(variables) is not None) is forced


@pytest.mark.parametrize(
    ("kernel", "mpi", "variables", "level"),
    [
        ("6.1.0-13-amd64", {}, {}, Severity.OK),
        ("4.18.0-553.el8_10.x86_64", {}, {}, Severity.WARNING),
        ("4.18.0-553.el8_10.x86_64", {"rdma_fork": "unneeded"}, {}, Severity.OK),
        ("6.1.0-13-amd64", {"rdma_fork": "disabled"}, {}, Severity.WARNING),
        ("5.3.18", {"rdma_fork": "enabled"}, {}, Severity.OK),
        ("5.3.18", {"rdma_fork": "disabled"}, {"RDMAV_FORK_SAFE": "1"}, Severity.OK),
    ],
)
def test_forking_with_memory_of_rdma_devices_is_judged(
    kernel: str, mpi: dict[str, Any], variables: dict[str, str], level: Severity
) -> None:
    found = only(judge_network({"network": network(kernel=kernel, **variables), "mpi": mpi}), "fork safety")
    assert found.level is level


def test_a_node_without_rdma_devices_has_nothing_to_warn_of(tmp_path: Path) -> None:
    findings = judge_network({"network": read_network({}, root=tmp_path), "mpi": {}})
    assert {finding.level for finding in findings} == {Severity.OK}
    assert "no InfiniBand" in only(findings, "network").text


def test_ports_are_read_as_the_kernel_shows_them(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    for name, text in (("state", "4: ACTIVE"), ("link_layer", "InfiniBand"), ("rate", "200 Gb/sec (4X HDR)")):
        (port / name).write_text(text + "\n")
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()
    read = read_network({"UCX_TLS": "rc", "HOME": "/root"}, root=tmp_path)
    assert read["ports"] == [PORT]
    assert read["may_open"]
    assert read["variables"] == {"UCX_TLS": "rc"}


def test_transports_and_kernel_versions_are_parsed() -> None:
    maps = (
        "7f01-7f02 r-xp 00000000 08:01 1 /usr/lib/openmpi/mca_pml_ob1.so\n"
        "7f03-7f04 r-xp 00000000 08:01 2 /usr/lib/openmpi/mca_btl_tcp.so\n"
        "7f05-7f06 r-xp 00000000 08:01 3 /usr/lib/libucp.so.0.0.0\n"
        "7f07-7f08 r-xp 00000000 08:01 4 /usr/lib/libc.so.6\n"
    )
    assert transports_in(maps) == ["libucp", "mca_btl_tcp", "mca_pml_ob1"]
    assert kernel_version("5.14.0-427.el9.x86_64") == (5, 14)
    assert kernel_version("6.18-rc2") == (6, 18)
    assert kernel_version("unknown") == (0, 0)
