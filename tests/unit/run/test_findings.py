"""What the doctor makes of facts: this machine's real ones, with one thing changed at a time."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.launch import RankCores
from hpctrain.run.doctor.finding import Finding, Severity, worst_severity
from hpctrain.run.doctor.merge_findings import judge_rank, merge_findings
from hpctrain.run.doctor.probes import identity_from, inspect_rank

MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def share(cpus: Iterable[int], limit: float | None = None) -> list[Any]:
    """A rank's cores, as its facts hold them."""
    numbers = frozenset(cpus)
    return RankCores(host="host", cpus=numbers, cores=numbers, limit=limit).to_json()


@pytest.fixture(scope="module")
def facts_of_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Facts as ranks 0 to 3 on one machine would bring them, with cores for all."""
    facts = []
    directory = tmp_path_factory.mktemp("runs")
    for rank in range(4):
        environ = {**MPIRUN, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)}
        found = inspect_rank(run_directory=directory, environ=environ, hostname="host")
        found["cores"].update(usable=list(range(8)), of_machine=8, num_numa_nodes=1, share=share(range(8)))
        found["torch"].update(threads=2, cuda=None)  # a build for CUDA finds no device here
        found["mpi"] = {
            "version": "4.1.2",
            "library": "Open MPI",
            "standard": "3.1",
            "thread_level": "multiple",
        }
        found["horovod"] = {"version": "0.28.1", "built": ["mpi"]}
        found["hdf5"] = {"h5py": "3.16.0", "hdf5": "1.10.8", "parallel": True}
        found["run_directory"].update(kind="lustre", free_bytes=10**12, lfs=True, stripe_count=4)
        found["limits"] = {
            "open_files": [65536, 65536],
            "locked_bytes": [None, None],
            "memory_bytes": 10**11,
        }
        found["network"] = {"ports": [], "may_open": False, "variables": {}, "kernel": "6.1.0"}
        found["start"] = {"seconds": 3.0, "kind": "ext4", "is_shared": False, "prefix": "/env"}
        found["scratch"].update(shm_free_bytes=10**9)
        found["tcp"] = {"congestion_control": "cubic"}
        found["yielding"] = {"library": "/site/_yield_by_sleep.so", "in_effect": False}
        facts.append(found)
    return facts


@pytest.fixture
def facts(facts_of_four: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return copy.deepcopy(facts_of_four)


def of_topic(findings: list[Finding], topic: str) -> list[Finding]:
    return [finding for finding in findings if finding.topic == topic]


def test_ranks_that_are_alike_are_reported_once(facts: list[dict[str, Any]]) -> None:
    findings = merge_findings(facts)
    assert worst_severity(findings) is Severity.OK, findings
    assert len({finding.topic for finding in findings}) == len(findings)
    assert of_topic(findings, "topology")[0].text == "1 node x 4 ranks: host"


@pytest.mark.parametrize(("in_effect", "words"), [(True, "is preloaded"), (False, "not preloaded here")])
def test_it_says_whether_waiting_ranks_sleep(
    facts: list[dict[str, Any]], in_effect: bool, words: str
) -> None:
    for found in facts:
        found["yielding"]["in_effect"] = in_effect
    (finding,) = of_topic(merge_findings(facts), "waiting ranks")
    assert finding.level is Severity.OK
    assert words in finding.text


def test_a_version_that_differs_names_the_ranks_and_hosts(facts: list[dict[str, Any]]) -> None:
    facts[3]["torch"]["version"] = "2.12.0"
    facts[3]["host"] = "other"
    found = of_topic(merge_findings(facts), "torch")[-1]
    version = facts[0]["torch"]["version"]
    assert found.level is Severity.PROBLEM
    assert found.text == f"differs between ranks: {version} on ranks 0-2 (host), 2.12.0 on rank 3 (other)"


@pytest.mark.parametrize(
    ("change", "topic", "level", "words"),
    [
        ({"torch": {"error": "cannot be loaded"}}, "torch", Severity.PROBLEM, "cannot be loaded"),
        ({"torch": {"cuda": "12.8"}}, "torch", Severity.WARNING, "no device is visible"),
        ({"sums": {"compiled": False}}, "sums on a node", Severity.WARNING, "numpy computes the sums"),
        (
            {"yielding": {"library": None, "in_effect": False}},
            "waiting ranks",
            Severity.WARNING,
            "was not compiled",
        ),
        ({"mpi": {"thread_level": "serialized"}}, "MPI", Severity.PROBLEM, "threads: serialized"),
        ({"mpi": {"error": "not installed"}}, "MPI", Severity.WARNING, "not installed"),
        ({"mpi": {"error": "MPI cannot start (exit code 1)"}}, "MPI", Severity.PROBLEM, "cannot start"),
        ({"horovod": {"error": "not installed"}}, "Horovod", Severity.WARNING, "not installed"),
        ({"horovod": {"built": ["gloo"]}}, "Horovod", Severity.WARNING, "but not with MPI"),
        ({"hdf5": {"error": "cannot be loaded: x"}}, "HDF5", Severity.PROBLEM, "cannot be loaded"),
        (
            {"run_directory": {"error": "cannot be written"}},
            "run directory",
            Severity.PROBLEM,
            "cannot be written",
        ),
        ({"run_directory": {"free_bytes": 10**9}}, "run directory", Severity.WARNING, "1.0 GB free"),
        ({"run_directory": {"kind": "tmpfs"}}, "run directory", Severity.WARNING, "tmpfs"),
        ({"scratch": {"shm_free_bytes": 10**6}}, "scratch", Severity.WARNING, "/dev/shm"),
        ({"launcher": {"error": "two launches"}}, "launcher", Severity.PROBLEM, "two launches"),
        ({"communication": {"error": "no"}}, "communication", Severity.PROBLEM, "no"),
    ],
)
def test_each_fault_has_its_finding(
    facts: list[dict[str, Any]], change: dict[str, dict[str, Any]], topic: str, level: Severity, words: str
) -> None:
    for part, values in change.items():
        facts[0].setdefault(part, {}).update(values)
    found = of_topic(judge_rank(facts[0]), topic)[0]
    assert found.level is level
    assert words in found.text
    assert found.remedy or topic == "communication"
    assert worst_severity(merge_findings(facts)) is not Severity.OK


def test_an_hdf5_that_is_not_parallel_is_no_fault(facts: list[dict[str, Any]]) -> None:
    facts[0]["hdf5"]["parallel"] = False
    (found,) = of_topic(judge_rank(facts[0]), "HDF5")
    assert found.level is Severity.OK
    assert "not parallel" in found.text


def test_a_fault_of_one_rank_is_reported_with_its_rank(facts: list[dict[str, Any]]) -> None:
    facts[2]["run_directory"] = {"path": facts[0]["run_directory"]["path"], "error": "cannot be written (x)"}
    found = [finding for finding in merge_findings(facts) if finding.level is Severity.PROBLEM]
    assert any(finding.text.startswith("rank 2 (host): ") for finding in found)
    assert any("unusable on rank 2 (host)" in finding.text for finding in found)


def test_several_ranks_without_any_library_are_a_problem(facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        rank["mpi"] = {"error": "not installed"}
        rank["horovod"] = {"error": "not installed"}
    assert of_topic(merge_findings(facts), "MPI")[0].level is Severity.PROBLEM


@pytest.mark.parametrize(
    ("usable", "of_machine", "threads", "level", "remedy"),
    [
        (range(8), 8, 2, Severity.OK, ""),
        (range(8), 8, 8, Severity.WARNING, "OMP_NUM_THREADS=2"),
        (range(2), 2, 1, Severity.WARNING, "start fewer ranks"),
        (range(1), 64, 1, Severity.WARNING, "--bind-to none"),
    ],
)
def test_overcommitted_cores_are_a_warning(
    facts: list[dict[str, Any]], usable: range, of_machine: int, threads: int, level: Severity, remedy: str
) -> None:
    for rank in facts:
        rank["cores"].update(usable=list(usable), of_machine=of_machine)
        rank["torch"]["threads"] = threads
    found = of_topic(merge_findings(facts), "cores")
    assert len(found) == 1
    assert found[0].level is level
    assert remedy in found[0].remedy


def on_two_nodes(facts: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(facts):
        found["host"] = found["launcher"]["node_name"] = f"node{rank // 2}"


def test_bbr_between_nodes_is_a_warning_that_names_them(facts: list[dict[str, Any]]) -> None:
    facts[2]["tcp"] = facts[3]["tcp"] = {"congestion_control": "bbr"}
    assert not of_topic(merge_findings(facts), "TCP")  # on one node nothing goes over TCP
    on_two_nodes(facts)
    (found,) = of_topic(merge_findings(facts), "TCP")
    assert found.level is Severity.WARNING
    assert "ranks 2-3 (node1)" in found.text
    assert "cubic" in found.remedy


def test_other_congestion_control_and_systems_that_do_not_tell_are_fine(facts: list[dict[str, Any]]) -> None:
    on_two_nodes(facts)
    facts[0]["tcp"] = {"error": "the system does not say"}
    del facts[1]["tcp"]  # an older version's
    assert not of_topic(merge_findings(facts), "TCP")


def test_ranks_bound_to_cores_of_their_own_are_fine(facts: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(facts):
        mine = [2 * number, 2 * number + 1]
        rank["cores"].update(usable=mine, share=share(mine), num_numa_nodes=2)
    (found,) = of_topic(merge_findings(facts), "cores")
    assert found.level is Severity.OK
    assert found.text == "4 ranks on 8 cores, 2 threads each, a rank may run on 2 NUMA nodes"


def test_ranks_that_share_cores_while_others_are_free_are_named(facts: list[dict[str, Any]]) -> None:
    for rank, mine in zip(facts, ([0], [0], [2, 3], [4, 5, 6]), strict=True):
        rank["cores"].update(usable=mine, share=share(mine))
        rank["torch"]["threads"] = 1
    (found,) = of_topic(merge_findings(facts), "cores")
    assert found.level is Severity.WARNING
    assert "ranks 0-1 share cores while others are free" in found.text
    assert "--bind-to core" in found.remedy


def test_a_control_groups_limit_is_compared_with_the_threads(facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        rank["cores"]["share"] = share(range(8), limit=4.0)
    (found,) = of_topic(merge_findings(facts), "cores")
    assert found.level is Severity.WARNING
    assert "their control group limits them to the CPU time of 4 cores" in found.text


def test_contradictory_variables_are_a_fact_and_not_an_exception(tmp_path: Path) -> None:
    environ = {**MPIRUN, "OMPI_COMM_WORLD_RANK": "9"}
    facts = inspect_rank(run_directory=tmp_path, environ=environ, hostname="host")
    assert identity_from(facts) is None
    assert of_topic(merge_findings([facts]), "launcher")[0].level is Severity.PROBLEM


def test_a_run_directory_is_tried_where_it_would_be_made(tmp_path: Path) -> None:
    facts = inspect_rank(run_directory=tmp_path / "a" / "b", environ=os.environ, hostname="host")
    assert facts["run_directory"]["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    facts = inspect_rank(run_directory=tmp_path / "file" / "b", environ={}, hostname="host")
    assert "error" in facts["run_directory"]
