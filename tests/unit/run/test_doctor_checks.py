"""The doctor's checks of limits, filesystem, clocks, variables, start and Slurm: pure, from given facts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from hpctrain.comm import run_threads
from hpctrain.launch import read_config, read_pairs
from hpctrain.run.doctor.environment import (
    judge_clocks,
    judge_start,
    judge_variables,
    probe_cores,
    read_environment,
    read_start,
    sample_clock,
    skew_bounds,
)
from hpctrain.run.doctor.finding import Finding, Severity, size_text
from hpctrain.run.doctor.network import judge_limits, read_limits
from hpctrain.run.doctor.run_directory import (
    judge_run_directory,
    judge_visibility,
    read_run_directory,
    stripe_count,
)
from hpctrain.run.doctor.slurm_settings import ask_slurm, judge_slurm

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "slurm"
PORT = {"device": "mlx5_0", "port": "1", "active": True, "layer": "InfiniBand", "rate": "200 Gb/sec"}


def only(findings: list[Finding], topic: str) -> Finding:
    (found,) = (finding for finding in findings if finding.topic == topic)
    return found


# ---- limits


@pytest.mark.parametrize(
    ("limits", "ranks", "rdma", "topic", "words"),
    [
        ({"open_files": [1024, 524288]}, 1000, False, "open files", "ulimit -n 4512"),
        ({"open_files": [256, 512]}, 2, False, "open files", "ask the site for a hard limit of 1024"),
        ({"locked_bytes": [8 << 20, 8 << 20]}, 2, True, "locked memory", "LimitMEMLOCK=infinity"),
    ],
)
def test_limits_that_a_run_may_hit_are_warned_of(
    limits: dict[str, Any], ranks: int, rdma: bool, topic: str, words: str
) -> None:
    all_limits = {"open_files": [65536, None], "locked_bytes": [None, None], "memory_bytes": 10**11, **limits}
    facts = {
        "limits": all_limits,
        "launcher": {"num_ranks": ranks},
        "network": {"ports": [PORT] if rdma else []},
    }
    found = only(judge_limits(facts), topic)
    assert found.level is Severity.WARNING
    assert words in found.remedy


def test_little_locked_memory_does_not_matter_without_rdma() -> None:
    limits = {"open_files": [1024, None], "locked_bytes": [65536, 65536], "memory_bytes": 10**11}
    (found,) = judge_limits({"limits": limits, "launcher": {"num_ranks": 8}, "network": {"ports": []}})
    assert found.level is Severity.OK
    assert found.text == "open files 1024, locked memory 65.5 kB"
    assert set(read_limits()) == set(limits)


# ---- the run directory


def disk(**changes: Any) -> dict[str, Any]:
    facts = {
        "path": "runs", "kind": "ext4", "options": ["rw"], "free_bytes": 10**11, "num_checkpoints": 3,
        "num_existing": 0, "checkpoint_bytes": None,
    }  # fmt: skip
    return {"host": "a", "run_directory": {**facts, **changes}}


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"checkpoint_bytes": 12 * 10**9}, Severity.OK, "4 more checkpoints of 12.0 GB need 48.0 GB"),
        ({"checkpoint_bytes": 30 * 10**9}, Severity.WARNING, "4 more checkpoints of 30.0 GB need 120.0 GB"),
        (
            {"checkpoint_bytes": 30 * 10**9, "num_existing": 3},
            Severity.OK,
            "1 more checkpoint of 30.0 GB needs",
        ),
        ({"checkpoint_bytes": 200 * 10**9}, Severity.PROBLEM, "100.0 GB free"),
        ({}, Severity.OK, "runs: ext4, 100.0 GB free"),
    ],
)
def test_room_for_the_checkpoints_is_counted(changes: dict[str, Any], level: Severity, words: str) -> None:
    (found,) = judge_run_directory(disk(**changes))
    assert found.level is level
    assert words in found.text


def test_the_size_of_a_checkpoint_is_that_of_the_newest_one_there(tmp_path: Path) -> None:
    folder = tmp_path / "digits" / "checkpoints"
    folder.mkdir(parents=True)
    for step, size in ((10, 1000), (20, 3000)):
        (folder / f"step-{step:08d}.h5").write_bytes(bytes(size))
    (tmp_path / "digits" / "checkpoints" / "step-00000030").mkdir()
    (folder / "step-00000030" / "data-00000.h5").write_bytes(bytes(5000))
    for directory in (tmp_path, tmp_path / "digits"):
        facts = read_run_directory(directory, num_checkpoints=5)
        assert facts["checkpoint_bytes"] == 5000
        assert facts["num_existing"] == 3
        assert facts["num_checkpoints"] == 5
    assert read_run_directory(tmp_path, checkpoint_bytes=7)["checkpoint_bytes"] == 7


def test_filesystems_have_their_findings() -> None:
    nfs = judge_run_directory(disk(kind="nfs4", options=["rw", "soft"]))
    assert "option soft" in only(nfs, "filesystem").text
    assert len(judge_run_directory(disk(kind="nfs4", options=["rw", "hard"]))) == 1
    without_lfs = only(judge_run_directory(disk(kind="lustre", lfs=False)), "striping")
    assert without_lfs.level is Severity.WARNING
    assert "lfs setstripe" in without_lfs.remedy
    striped = only(judge_run_directory(disk(kind="lustre", lfs=True, stripe_count=-1)), "striping")
    assert striped.level is Severity.OK
    assert "over all servers" in striped.text


def test_the_stripe_count_is_read_from_lustres_own_words() -> None:
    output = "stripe_count:  4 stripe_size:   1048576 pattern:       0 stripe_offset: -1\n"
    assert stripe_count(output) == 4
    assert stripe_count("(Default) stripe_count:  -1 stripe_size: 1048576") == -1
    assert stripe_count("error: getstripe failed") is None


def test_a_folder_that_not_all_nodes_share_is_a_problem() -> None:
    facts = [disk(), disk(seen=True), {**disk(seen=False), "host": "b"}]
    (found,) = judge_visibility(facts)
    assert found.level is Severity.PROBLEM
    assert found.text.startswith("rank 2 (b): a file that rank 0 made in runs was not visible")
    assert judge_visibility(facts[:2]) == []


# ---- clocks


def rank_at(host: str, offset_s: float, *, spread_s: float = 0.001) -> dict[str, Any]:
    """Facts of a rank whose clock is ahead by `offset_s`, from barriers of `spread_s` each."""
    samples = [(second + offset_s, second + offset_s + spread_s) for second in range(5)]
    return {"host": host, "clock": samples}


def test_a_clock_that_is_certainly_wrong_is_named() -> None:
    (found,) = judge_clocks([rank_at("a", 0.0), rank_at("b", 3.5), rank_at("c", -40.0), rank_at("d", 0.3)])
    assert found.level is Severity.WARNING
    assert found.text == "compared with a: b 3.5 s ahead, c 40.0 s behind"


def test_clocks_that_agree_within_what_can_be_measured_are_fine() -> None:
    (found,) = judge_clocks([rank_at("a", 0.0), rank_at("b", 0.2)])
    assert found.level is Severity.OK
    assert found.text == "those of 2 hosts agree within 0.201 s"
    # A barrier of 10 s says nothing of 3 s.
    assert (
        judge_clocks([rank_at("a", 0.0, spread_s=10), rank_at("b", 3.0, spread_s=10)])[0].level is Severity.OK
    )
    assert judge_clocks([rank_at("a", 0.0), rank_at("a", 9.0)]) == []  # one host, one clock


def test_barriers_bound_the_lead_of_a_clock() -> None:
    sampled = run_threads(3, sample_clock)
    for mine in sampled:
        least, greatest = skew_bounds(mine, sampled[0])
        assert least <= 0 <= greatest  # the threads share one clock


# ---- variables, packages, start


def test_variables_that_differ_are_named_with_their_ranks() -> None:
    by_rank = [{"UCX_TLS": "rc"}, {"UCX_TLS": "rc"}, {"UCX_TLS": "tcp", "OMP_PROC_BIND": "true"}]
    findings = judge_variables([{"environment": {"variables": variables}} for variables in by_rank])
    assert [finding.text for finding in findings] == [
        "OMP_PROC_BIND differs between ranks: not set on ranks 0-1, true on rank 2",
        "UCX_TLS differs between ranks: rc on ranks 0-1, tcp on rank 2",
    ]
    assert "mpirun -x UCX_TLS" in findings[1].remedy


def test_secrets_and_variables_of_the_launcher_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "torch-2.0.dist-info").mkdir()
    environ = {
        "HOROVOD_SECRET_KEY": "x", "OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "1", "HOME": "/root",
        "UCX_TLS": "rc", "LD_LIBRARY_PATH": "/a:" * 100,
    }  # fmt: skip
    read = read_environment(environ, search_path=[str(tmp_path), str(tmp_path / "none.zip")])
    assert set(read["variables"]) == {"UCX_TLS", "LD_LIBRARY_PATH"}
    assert re.fullmatch(r"300 characters, hash [0-9a-f]{8}", read["variables"]["LD_LIBRARY_PATH"])
    assert read["num_packages"] == 1


@pytest.mark.parametrize(
    ("seconds", "is_shared", "level"),
    [
        (3.0, True, Severity.OK),
        (20.0, True, Severity.WARNING),
        (20.0, False, Severity.OK),
        (40.0, False, Severity.WARNING),
    ],
)
def test_a_slow_start_of_python_is_told_with_its_rank(
    seconds: float, is_shared: bool, level: Severity
) -> None:
    kind = "lustre" if is_shared else "ext4"
    starts = [
        {"seconds": 2.0, "is_shared": is_shared, "kind": kind},
        {"seconds": seconds, "is_shared": is_shared, "kind": kind},
    ]
    (found,) = judge_start([{"host": f"node{rank}", "start": start} for rank, start in enumerate(starts)])
    assert found.level is level
    assert (
        f"{seconds:.1f} s until everything was imported from {kind}, rank 1 on node1 the slowest"
        in found.text
    )


def test_this_process_has_started_a_while_ago() -> None:
    assert 0 < read_start()["seconds"] < 3600
    assert judge_start([{"host": "a", "start": {"error": "x"}}]) == []


def test_this_machines_cores_are_read() -> None:
    cores = probe_cores({})
    assert cores["usable"] == sorted(os.sched_getaffinity(0))
    assert cores["num_numa_nodes"] >= 1


# ---- Slurm


@pytest.fixture
def slurm() -> dict[str, Any]:
    """Slurm's answers as the test cluster's 22.05 gave them, inside of a job."""
    return {
        "config": read_config((FIXTURES / "show-config.txt").read_text()),
        "partition": read_pairs((FIXTURES / "show-partition.txt").read_text()),
        "job": read_pairs((FIXTURES / "show-job.txt").read_text()),
        "job_id": "5",
        "mpi_types": ["none", "pmi2", "pmix", "pmix_v4"],
    }


def test_the_recorded_settings_are_understood(slurm: dict[str, Any]) -> None:
    findings = judge_slurm(slurm, mpi_library="Open MPI v4.1.4")
    text = only(findings, "Slurm").text
    assert "22.05" in text
    assert "KillWait 5 sec" in text
    assert "noticed after 60 sec" in text
    assert {finding.topic for finding in findings} == {
        "Slurm",
        "Slurm: KillWait",
        "Slurm: cgroups",
        "Slurm: cores",
    }
    assert all(finding.remedy for finding in findings[1:])


@pytest.mark.parametrize(
    ("changes", "topic", "level", "words"),
    [
        ({"job": {"Requeue": "0"}}, "Slurm: requeue", Severity.WARNING, "may not be requeued"),
        ({"job_id": None, "config": {"JobRequeue": "0"}}, "Slurm: requeue", Severity.WARNING, "JobRequeue=0"),
        ({"config": {"KillWait": "30 sec"}}, "Slurm: KillWait", None, ""),
        ({"config": {"ProctrackType": "proctrack/cgroup"}}, "Slurm: cgroups", None, ""),
        ({"config": {"TaskPlugin": "task/affinity,task/cgroup"}}, "Slurm: cores", None, ""),
        ({"config": {"ConstrainCores": "yes"}}, "Slurm: cores", None, ""),
        ({"mpi_types": ["none", "pmi2"]}, "Slurm: PMIx", Severity.WARNING, "srun has no PMIx (none, pmi2)"),
        ({"config": {"MpiDefault": "none"}}, "Slurm: PMIx", Severity.WARNING, "MpiDefault=none"),
        (
            {"config": {"PreemptType": "preempt/partition_prio"}},
            "Slurm: preemption",
            Severity.OK,
            "not preempted",
        ),
        (
            {
                "config": {"PreemptType": "preempt/partition_prio"},
                "partition": {"PreemptMode": "REQUEUE", "GraceTime": "0"},
            },
            "Slurm: preemption",
            Severity.WARNING,
            "SIGTERM to the steps, not the job's own --signal, grace time 0 s",
        ),
        (
            {
                "config": {
                    "PreemptType": "preempt/partition_prio",
                    "SlurmctldParameters": "preempt_send_user_signal",
                },
                "partition": {"PreemptMode": "REQUEUE", "GraceTime": "00:02:00"},
            },
            "Slurm: preemption",
            Severity.OK,
            "the job's own signal is sent, grace time 120 s",
        ),
    ],
)
def test_each_of_slurms_settings_has_its_finding(
    slurm: dict[str, Any], changes: dict[str, Any], topic: str, level: Severity | None, words: str
) -> None:
    for part, value in changes.items():
        slurm[part] = {**slurm[part], **value} if isinstance(value, dict) else value
    findings = judge_slurm(slurm, mpi_library="Open MPI v4.1.4")
    if level is None:
        assert topic not in {finding.topic for finding in findings}
        return
    found = only(findings, topic)
    assert found.level is level
    assert words in found.text
    assert found.remedy or level is Severity.OK


def test_without_slurm_there_is_nothing_to_say_and_in_a_container_of_a_job_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert ask_slurm({}) == {}
    assert judge_slurm(ask_slurm({})) == []
    (found,) = judge_slurm(ask_slurm({"SLURM_JOB_ID": "5"}))
    assert found.level is Severity.WARNING
    assert "by the batch script outside of it" in found.remedy
    (found,) = judge_slurm(
        {"job_id": None, "error": "scontrol failed: Could not establish a configuration source"}
    )
    assert found.level is Severity.OK


def test_sizes_are_shown_for_people() -> None:
    assert [size_text(size) for size in (12, 65536, 5 * 10**6, 2 * 10**12)] == [
        "12 bytes",
        "65.5 kB",
        "5.0 MB",
        "2.0 TB",
    ]
