"""`hpctrain slurm` on a real Slurm cluster: submit, status, cancel, resize, arrays, successors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from hpctrain.slurm import render_script
from hpctrain.slurm.jobs import recorded_ids
from tests.cluster import Cluster
from tests.cluster.plan import HEAD
from tests.cluster.training_jobs import LONG, RECIPE, STOPPED, output, trains, wait_for
from tests.run_files import summary_of
from tests.unit.slurm.jobs_to_render import KINDS, job

pytestmark = pytest.mark.launches

RUN = Path("runs", "digits")


def slurm(
    cluster: Cluster, folder: Path, action: str, *words: str, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """`hpctrain slurm ACTION examples/digits.toml WORDS` on the head. Fails if it does not end with `code`."""
    done = cluster.run(["hpctrain", "slurm", action, RECIPE, *words], cwd=folder, timeout_s=300)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}\n{output(folder)}"
    return done


def sets(**settings: object) -> list[str]:
    """`--set slurm.KEY=VALUE` for each."""
    return [word for key, value in settings.items() for word in ("--set", f"slurm.{key}={value}")]


def submit(cluster: Cluster, folder: Path, *words: str) -> int:
    printed = slurm(cluster, folder, "submit", *words).stdout
    assert printed.startswith("submitted job "), printed
    assert f"run directory: {RUN}\n" in printed
    return int(printed.split()[2].rstrip(":"))


def status(cluster: Cluster, folder: Path) -> list[dict[str, Any]]:
    return json.loads(slurm(cluster, folder, "status", "--json").stdout)


def test_a_submitted_recipe_trains_to_its_end_on_four_nodes_of_two_ranks(
    cluster: Cluster, folder: Path
) -> None:
    before = cluster.bytes_sent()
    number = submit(cluster, folder, *sets(nodes=4, tasks_per_node=2), "--set", "run.epochs=1")
    end = cluster.wait_for(number, timeout_s=300)
    assert (end.state, end.exit_code) == ("COMPLETED", 0), output(folder)
    found = json.loads((folder / RUN / "environment.json").read_text())
    assert found["launcher"] == "Slurm"
    assert found["algorithm"] == "hierarchical"
    assert found["node_names"] == list(cluster.node_names)
    assert found["ranks_by_node"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [rank["host"] for rank in found["ranks"]] == [name for name in cluster.node_names for _ in "01"]
    assert found["variables"]["SLURM_JOB_ID"] == str(number)
    sent = cluster.bytes_sent()
    assert all(sent[node] > before[node] + 100_000 for node in cluster.node_names)  # they did talk

    (found,) = status(cluster, folder)
    assert (found["job"]["job_id"], found["job"]["state"]) == (str(number), "COMPLETED")
    progress = found["progress"]
    assert (progress["status"], progress["step"], progress["total_steps"]) == ("finished", 23, 23)
    assert (progress["num_starts"], progress["checkpoint"]["step"]) == (1, 23)
    assert found["attempts"] is None  # this cluster has no accounting database
    told = slurm(cluster, folder, "status").stdout
    assert told.splitlines()[0] == f"digits: job {number} COMPLETED, the run is finished"
    assert "step 23 of 23" in told


def test_a_run_is_followed_shrunk_resized_and_cancelled(cluster: Cluster, folder: Path) -> None:
    first = submit(cluster, folder, *sets(nodes=4, stop_before_s=15, time=10, shrinkable="true"), *LONG)
    wait_for(trains(folder), folder=folder)
    (found,) = status(cluster, folder)
    assert (found["job"]["job_id"], found["job"]["state"]) == (str(first), "RUNNING")
    assert found["job"]["node_list"] == "hpct[0-3]"
    assert 0 < found["job"]["left_s"] < found["job"]["limit_s"] == 600
    progress = found["progress"]
    assert progress["total_steps"] == 46000
    assert 0 < progress["step"] < 46000
    assert 1 < progress["steps_per_s"] < 50  # a step sleeps for 20 ms
    assert progress["samples_per_s"] == pytest.approx(64 * progress["steps_per_s"], rel=0.1)
    assert found["seconds_to_go"] == pytest.approx((46000 - progress["step"]) / progress["steps_per_s"])

    refused = slurm(cluster, folder, "submit", *sets(nodes=1), code=2)
    assert f"job {first} of runs/digits is RUNNING" in refused.stderr

    # Fewer nodes: the job gives one back.
    assert "to continue with 3 nodes" in slurm(cluster, folder, "resize", "--nodes", "3").stdout
    wait_for(lambda: "start 1: 3 ranks on hpct[0-2]" in output(folder), folder=folder)
    lines = output(folder).count("\nstep ")
    wait_for(trains(folder, num_lines=lines + 2), folder=folder)
    facts = cluster.job(first)
    assert (facts["JobState"], facts["NumNodes"], facts["Restarts"]) == ("RUNNING", "3", "0")
    assert output(folder).count("resumed from") == 1
    assert not list(folder.glob("slurm_job_*"))

    # Another job, since something else changes too. Its own overrides are kept: a run of LONG steps.
    resized = slurm(cluster, folder, "resize", "--nodes", "2", *sets(time=9)).stdout
    assert f"job {first}: asked to save and stop" in resized
    second = recorded_ids(folder / RUN)[-1]
    end = cluster.wait_for(first, timeout_s=300)
    assert (end.state, end.exit_code, end.num_restarts) == ("FAILED", 75, 0), output(folder)
    stopped_at = summary_of(folder / RUN)["step"]
    wait_for(lambda: f"(step {stopped_at})" in output(folder), folder=folder)
    assert f"job {second}: start 1: 2 ranks on" in output(folder)

    slurm(cluster, folder, "cancel")
    end = cluster.wait_for(int(second), timeout_s=300)
    assert (end.state, end.exit_code, end.num_restarts) == ("FAILED", 75, 0), output(folder)
    assert summary_of(folder / RUN)["ranks"] == 2
    assert summary_of(folder / RUN)["status"] == "stopped"
    assert "no job of runs/digits waits or runs" in slurm(cluster, folder, "cancel").stdout


def test_each_task_of_an_array_is_a_run_and_a_stopped_one_comes_back_alone(
    cluster: Cluster, folder: Path
) -> None:
    number = submit(cluster, folder, *sets(array="1-2"), *STOPPED)
    first = folder / f"slurm-digits-{number}_1.out"
    wait_for(lambda: first.exists() and first.read_text().count("\nstep ") >= 2, folder=folder)
    asked = cluster.run(["scancel", "--batch", "--signal=USR1", f"{number}_1"], timeout_s=300)
    assert asked.returncode == 0, asked.stderr
    wait_for(
        lambda: f"job {number}_1: stopped with the state saved; queueing it again" in output(folder),
        folder=folder,
    )
    for found in status(cluster, folder):
        assert found["progress"]["total_steps"] == 460
    refused = slurm(cluster, folder, "resize", "--nodes", "2", code=2)
    assert f"job {number} is an array: cancel it and submit it again" in refused.stderr
    for task in (1, 2):
        wait_for(
            lambda task=task: (
                (folder / RUN / f"task-{task}" / "summary.json").exists()
                and summary_of(folder / RUN / f"task-{task}")["status"] == "finished"
            ),
            folder=folder,
        )
        recipe = (folder / RUN / f"task-{task}" / "recipe.toml").read_text()
        assert f"seed = {task}\n" in recipe
    assert output(folder).count("start 2:") == 1
    starts = [
        len((folder / RUN / f"task-{task}" / "starts.jsonl").read_text().splitlines()) for task in (1, 2)
    ]
    assert starts == [2, 1]
    found = status(cluster, folder)
    assert [each["name"] for each in found] == ["digits, task 1", "digits, task 2"]
    assert {each["progress"]["status"] for each in found} == {"finished"}


def test_where_requeueing_is_forbidden_a_successor_goes_on(cluster: Cluster, folder: Path) -> None:
    words = [*sets(on_stop="successor"), *STOPPED, "--resume", "never"]
    first = submit(cluster, folder, *words)
    wait_for(trains(folder), folder=folder)
    asked = cluster.run(["scancel", "--batch", "--signal=USR1", str(first)], timeout_s=300)
    assert asked.returncode == 0, asked.stderr
    end = cluster.wait_for(first, timeout_s=300)
    assert (end.exit_code, end.num_restarts) == (75, 0), output(folder)
    second = recorded_ids(folder / RUN)[-1]
    assert int(second) > first
    end = cluster.wait_for(int(second), timeout_s=300)
    assert (end.state, end.exit_code) == ("COMPLETED", 0), output(folder)
    assert "start 2: 1 ranks" in output(folder)
    (found,) = status(cluster, folder)
    assert (found["job"]["job_id"], found["progress"]["status"]) == (second, "finished")
    assert found["progress"]["num_starts"] == 2


def test_an_environment_is_unpacked_on_each_node_and_removed(cluster: Cluster, folder: Path) -> None:
    command = folder / "environment" / "bin" / "hpctrain"
    command.parent.mkdir(parents=True)
    command.write_text('#!/bin/sh\necho "unpacked $0" >&2\nexec python -m hpctrain.cli.main "$@"\n')
    command.chmod(0o755)
    subprocess.run(["tar", "-cf", "environment.tar", "environment"], cwd=folder, check=True, timeout=300)
    shutil.rmtree(folder / "environment")
    unpacks = sets(nodes=2, tasks_per_node=2, python_archive="environment.tar")
    number = submit(cluster, folder, *unpacks, "--set", "run.epochs=1")
    end = cluster.wait_for(number, timeout_s=300)
    assert (end.state, end.exit_code) == ("COMPLETED", 0), output(folder)
    assert output(folder).count(f"unpacked /tmp/hpctrain-{number}/environment/bin/hpctrain") == 4
    left = cluster.run(
        ["srun", "--nodes=2", "--ntasks-per-node=1", "find", "/tmp", "-maxdepth", "1", "-name", f"hpctrain-{number}"],
        timeout_s=300, cwd=folder,
    )  # fmt: skip
    assert left.returncode == 0, left.stderr
    assert left.stdout == ""
    number = submit(cluster, folder, *sets(nodes=2, python_archive="missing.tar"))
    end = cluster.wait_for(number, timeout_s=300)
    assert (end.state, end.exit_code) == ("FAILED", 5), output(folder)
    assert "missing.tar cannot be unpacked in /tmp/hpctrain-" in output(folder)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"partition": "nowhere"}, "set slurm.partition to one that `sinfo --summarize` lists"),
        ({"constraint": "infiniband"}, "set slurm.constraint"),
        ({"options": '["--no-such-option"]'}, "slurm.options: this Slurm does not know the option"),
        ({"gpus_per_task": 9}, "no node has this"),
    ],
)
def test_a_job_that_slurm_refuses_is_explained(
    cluster: Cluster, folder: Path, settings: dict[str, Any], expected: str
) -> None:
    refused = slurm(cluster, folder, "submit", *sets(**settings), code=5)
    assert expected in refused.stderr
    assert not list((folder / RUN / "slurm").glob("*"))


def test_slurm_checks_a_job_without_taking_it(cluster: Cluster, folder: Path) -> None:
    checked = slurm(cluster, folder, "submit", "--test-only", *sets(nodes=2, tasks_per_node=2))
    assert "to start at" in checked.stdout
    assert "using 4 processors" in checked.stdout
    refused = slurm(cluster, folder, "submit", "--test-only", *sets(reservation="none"), code=5)
    assert "set slurm.reservation" in refused.stderr
    printed = slurm(cluster, folder, "submit", "--dry-run", *sets(nodes=2))
    assert printed.stdout.startswith("#!/bin/bash\n")
    assert not (folder / RUN).exists()


def test_a_job_that_waits_says_why(cluster: Cluster, folder: Path) -> None:
    number = submit(cluster, folder, *sets(nodes=2, options='["--hold"]'))
    lines = slurm(cluster, folder, "status").stdout.splitlines()
    assert lines[0] == f"digits: job {number} PENDING, 2 nodes asked for"
    assert "it is held" in lines[1]
    assert lines[2] == "  no step yet"
    assert f"job {number} (PENDING): cancelled" in slurm(cluster, folder, "cancel").stdout
    assert cluster.job(number)["JobState"] == "CANCELLED"


def test_a_job_is_submitted_once_though_the_controllers_answer_was_lost(
    cluster: Cluster, folder: Path
) -> None:
    """slurmctld stands still until sbatch has given up; the request is in its socket, and it takes the job then."""
    (controller,) = (
        pid for pid in cluster.processes(HEAD) if b"slurmctld" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(controller, signal.SIGSTOP)
    resumed = threading.Timer(14.0, os.kill, [controller, signal.SIGCONT])
    resumed.start()
    try:
        done = slurm(cluster, folder, "submit", *sets(nodes=1, options='["--hold"]'))
    finally:
        resumed.join()
    assert "Socket timed out on send/recv operation; trying again in 5 s" in done.stderr
    number = int(done.stdout.split()[2].rstrip(":"))
    listed = cluster.run(["squeue", "--noheader", "--format=%i|%o"], timeout_s=300).stdout.splitlines()
    assert [line for line in listed if str(folder) in line] == [f"{number}|{done.stdout.split()[-1]}"]
    slurm(cluster, folder, "cancel")


def test_slurm_takes_every_kind_of_script_and_reads_every_value_as_it_was_meant(
    cluster: Cluster, folder: Path
) -> None:
    for kind in KINDS:
        script = folder / f"{kind}.sbatch"
        script.write_text(render_script(job(kind)))
        done = cluster.run(["sbatch", "--test-only", str(script)], timeout_s=300, cwd=folder)
        assert done.returncode == 0, f"{kind}: {done.stderr}"
        assert "to start at" in done.stderr
    number = cluster.submit(["--hold", str(folder / "everything.sbatch")], cwd=folder)
    shown = cluster.run(["scontrol", "show", "job", str(number)], timeout_s=300).stdout
    assert cluster.run(["scancel", str(number)], timeout_s=300).returncode == 0
    for words in (
        "JobName=a run\n", "NumNodes=2-2 ", "TimeLimit=00:30:00 TimeMin=00:10:00", "Comment=it's \"a\" b\\c #1",
        "StdOut=" + str(folder / f"out put-{number}.txt"), "MailUser=me@example.org", "Requeue=1",
    ):  # fmt: skip
        assert words in shown
