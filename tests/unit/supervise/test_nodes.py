"""Facts about nodes: Slurm's answers, probes, and the check of a node, run on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.errors import LaunchError
from hpctrain.supervise.nodes import (
    MARK_VARIABLE,
    Allocation,
    Checks,
    NodeWatch,
    find_allocation,
    read_check,
    read_job,
    survey_nodes,
)

pytestmark = pytest.mark.timing

HERE = socket.gethostname()
LOCAL = Allocation(job="local", number=0, nodes=(HERE,), in_slurm=False)


def test_the_job_is_read_from_what_scontrol_prints() -> None:
    text = (
        "JobId=12 JobName=train UserId=root(0) EndTime=1795500000 Deadline=N/A ReqNodeList=hpct[0-9] "
        "ExcNodeList=hpct7 NodeList=hpct[0-1,3] BatchHost=hpct0 NumNodes=3"
    )
    found = read_job(text)
    assert found.nodes == "hpct[0-1,3]"
    assert found.time_limit == 1795500000.0
    assert read_job("JobId=12 NodeList=(null) EndTime=Unknown").time_limit is None
    assert read_job("JobId=12 NodeList=(null) EndTime=Unknown").nodes == ""
    assert read_job("").nodes == ""
    assert not found.preempted


@pytest.mark.parametrize(
    ("times", "preempted"),
    [
        ("StartTime=1795500000 PreemptEligibleTime=1795500000 PreemptTime=None", False),
        ("StartTime=1795500000 PreemptEligibleTime=1795500000 PreemptTime=1795500030", True),
        # Of the allocation before: the job was queued again since.
        ("StartTime=1795500100 PreemptEligibleTime=1795500100 PreemptTime=1795500030", False),
    ],
)
def test_a_job_is_preempted_where_slurm_says_so_of_this_allocation(times: str, preempted: bool) -> None:
    assert read_job(f"JobId=12 {times} SuspendTime=None NodeList=hpct0").preempted is preempted


def test_a_heterogeneous_job_is_refused() -> None:
    with pytest.raises(LaunchError, match="the Slurm job 12 is heterogeneous, with 2 components"):
        find_allocation({"SLURM_JOB_ID": "12", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST": "hpct0"})


def test_outside_slurm_the_allocation_is_this_machine() -> None:
    found = find_allocation({})
    assert found.nodes == (HERE,)
    assert not found.in_slurm
    assert found.job.startswith("local-")


def checks(where: Path, **more: object) -> Checks:
    return Checks(mark="0123abcd", run_directory=where, **more)  # type: ignore[arg-type]


def test_a_node_that_is_well_is_usable(tmp_path: Path) -> None:
    found = survey_nodes(
        [HERE], allocation=LOCAL, checks=checks(tmp_path, paths=[str(tmp_path)]), environ=os.environ
    )
    assert found.usable == (HERE,)
    assert found.unusable == {}
    assert found.oom_kills[HERE] >= 0


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"paths": ["/nowhere/data"]}, "/nowhere/data is not there"),
        ({"script": "/bin/false"}, "/bin/false ended with 1:"),
        ({"script": "/no/such/check"}, "/no/such/check ended with 127"),
    ],
)
def test_a_node_that_fails_a_check_is_not_usable(
    tmp_path: Path, more: dict[str, object], reason: str
) -> None:
    found = survey_nodes([HERE], allocation=LOCAL, checks=checks(tmp_path, **more), environ=os.environ)
    assert found.usable == ()
    assert found.unusable[HERE].startswith(reason)
    assert found.silent == ()


def test_a_node_whose_check_hangs_is_silent_to_nobody_else_and_costs_the_limit(tmp_path: Path) -> None:
    script = tmp_path / "check"
    script.write_text("#!/bin/sh\nsleep 60\n")
    script.chmod(0o755)
    began_s = time.monotonic()
    found = survey_nodes(
        [HERE],
        allocation=LOCAL,
        checks=checks(tmp_path, script=str(script), timeout_s=1.0),
        environ=os.environ,
    )
    assert time.monotonic() - began_s < 30
    assert found.unusable[HERE] == "no answer to the check within 1 s"
    assert found.silent == ()  # no node at all has answered: it may be Slurm


def test_ranks_of_an_earlier_attempt_are_ended_and_no_other_process(tmp_path: Path) -> None:
    def sleeper(mark: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
        process = subprocess.Popen(words, env={**os.environ, MARK_VARIABLE: mark}, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    ours, others = sleeper("0123abcd"), sleeper("9999abcd")
    with ours, others:
        try:
            found = survey_nodes([HERE], allocation=LOCAL, checks=checks(tmp_path), environ=os.environ)
            assert found.usable == (HERE,)
            assert ours.wait(60) == -signal.SIGKILL
            assert others.poll() is None
        finally:
            for process in (ours, others):
                process.kill()


def test_half_a_line_is_no_answer() -> None:
    text = (
        "srun: warning\nhpctrain-node a ok 12\nhpctrain-node b bad /data is not there\nhpctrain-node c ok 1"
    )
    assert read_check(text) == {"a": ("ok", "12"), "b": ("bad", "/data is not there")}


def test_a_node_is_lost_after_two_silences_and_one_that_never_answered_is_not_judged() -> None:
    watch = NodeWatch([], addresses={}, slurmd_port=6818)
    watch.note_kernels({"a": True, "b": True, "c": False}, asked=10.0)
    watch.note_kernels({"a": True, "b": False, "c": False}, asked=12.0)
    assert watch.lost() == {}
    watch.note_kernels({"a": True, "b": True, "c": False}, asked=14.0)  # a packet was lost, not the node
    watch.note_kernels({"a": True, "b": False, "c": False}, asked=16.0)
    assert watch.lost() == {}
    watch.note_kernels({"a": True, "b": False, "c": False}, asked=18.0)
    assert watch.lost() == {"b": 14.0}


def test_this_machines_kernel_answers_where_nothing_listens() -> None:
    watch = NodeWatch([HERE], addresses={HERE: ("127.0.0.1",)}, slurmd_port=6818)
    watch.look()
    assert watch._answered.keys() == {HERE}
    assert watch.lost() == {}


def test_a_host_without_slurmd_is_not_asked_further(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and does not listen
        there = Allocation(
            job="12", number=0, nodes=(HERE,), in_slurm=True, addresses={HERE: ("127.0.0.1",)},
            slurmd_port=reserved.getsockname()[1],
        )  # fmt: skip
        found = survey_nodes([HERE], allocation=there, checks=checks(tmp_path), environ=os.environ)
    assert found.usable == ()
    assert found.silent == (HERE,)
    assert found.unusable == {HERE: "slurmd does not answer there"}


def test_a_node_whose_daemon_left_srun_is_lost_if_slurmd_is_gone_too() -> None:
    """A process with a connection to a listener stands for srun, an address of this machine for the node."""
    script = (
        "import socket, sys\ns = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\nsys.stdin.read()"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as no_slurmd:
        no_slurmd.bind(("127.0.0.1", 0))
        srun = subprocess.Popen(
            [sys.executable, "-c", script, str(listener.getsockname()[1])], stdin=subprocess.PIPE
        )
        with srun:
            try:
                stepd, _ = listener.accept()
                lost = NodeWatch(
                    [HERE], addresses={HERE: ("127.0.0.1",)}, slurmd_port=no_slurmd.getsockname()[1]
                )
                ended = NodeWatch(
                    [HERE], addresses={HERE: ("127.0.0.1",)}, slurmd_port=listener.getsockname()[1]
                )
                for watch in (lost, ended):
                    watch.launched(srun.pid)
                    watch.look()
                    assert watch.lost() == {}
                stepd.close()
                seen = time.time()
                for _ in range(2):
                    for watch in (lost, ended):
                        watch._next_s = 0.0
                        watch.look()
                assert list(lost.lost()) == [HERE]
                assert lost.lost()[HERE] <= seen
                assert ended.lost() == {}  # the ranks there have ended, the node is well
            finally:
                srun.kill()
