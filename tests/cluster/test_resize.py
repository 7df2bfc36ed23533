"""`hpctrain slurm resize` of waiting and running jobs on a real Slurm, and a run that asks for other nodes itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import pack_arrays
from hpctrain.slurm.jobs import newest_submission, recorded_ids
from tests.cluster import Cluster
from tests.cluster.test_slurm_commands import RUN, sets, slurm, status, submit
from tests.cluster.training_jobs import LONG, output, trains, wait_for
from tests.run_files import losses_of, newest, records_of, summary_of
from tests.runbook import find_shown

pytestmark = pytest.mark.launches

# Steps whose time is proportional to a rank's samples.
ASKS = """
[run]
name = "asks"
directory = "runs/asks"
steps = 3000
[task]
target = "tests.scaling_tasks:Proportional"
options = { sample_s = 0.03, size = 1000 }
[data]
train = "samples"
global_batch = 16
[optimizer]
name = "sgd"
[reduction]
algorithm = "direct"
[checkpoint]
every_steps = 20
[stragglers]
window_s = 0.5
[slurm]
nodes = 2
[scaling]
act = true
goal = "time"
max_nodes = 4
act_after_minutes = 0.0
every_s = 0.5
"""


def resize(cluster: Cluster, folder: Path, target: str, *words: str, code: int = 0) -> str:
    """`hpctrain slurm resize TARGET WORDS` on the head; what it has printed."""
    done = cluster.run(["hpctrain", "slurm", "resize", target, *words], cwd=folder, timeout_s=300)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}\n{output(folder)}"
    return done.stdout + done.stderr


def test_a_waiting_job_asks_for_other_nodes_and_keeps_its_number(cluster: Cluster, folder: Path) -> None:
    number = submit(
        cluster, folder, *sets(nodes=4, tasks_per_node=2, options='["--hold"]'), "--set", "run.epochs=1"
    )
    does = f"job {number} (PENDING): asks for 2 nodes from now on, and keeps its place in the queue\n"
    assert resize(cluster, folder, str(number), "--nodes", "2", "--dry-run") == f"would do: {does}"
    assert cluster.job(number)["NumNodes"] in ("4", "4-4")
    assert resize(cluster, folder, str(number), "--nodes", "2", "--reason", "half is free") == does
    facts = cluster.job(number)
    assert (facts["JobState"], facts["NumNodes"], facts["NumTasks"]) == ("PENDING", "2-2", "4")
    changed = newest_submission(folder / RUN)
    assert (changed.job_id, changed.by, changed.nodes, changed.reason) == (
        str(number),
        "queue",
        2,
        "half is free",
    )
    assert cluster.run(["scontrol", "release", str(number)], timeout_s=300).returncode == 0
    end = cluster.wait_for(number, timeout_s=300)
    assert (end.state, end.exit_code) == ("COMPLETED", 0), output(folder)
    found = json.loads((folder / RUN / "environment.json").read_text())
    assert found["ranks_by_node"] == [[0, 1], [2, 3]]
    refused = resize(cluster, folder, str(number), "--nodes", "3", code=2)
    assert f"job {number} has ended (COMPLETED)" in refused


def test_a_running_job_is_resized_by_its_number_or_told_why_not(cluster: Cluster, folder: Path) -> None:
    first = submit(cluster, folder, *sets(nodes=2, time=10), *LONG)
    wait_for(trains(folder), folder=folder)
    for words, code, expected in (
        (["--nodes", "2"], 2, f"job {first} has 2 nodes already"),
        (["--nodes", "9"], 2, "9 nodes are not possible: partition "),
        (["--nodes", "100"], 2, "cannot be split over the 100 ranks"),
    ):
        assert expected in resize(cluster, folder, str(first), *words, code=code)
    assert "Slurm knows no job 99999" in resize(cluster, folder, "99999", "--nodes", "1", code=2)
    other = cluster.submit(["--hold", "--wrap", "true"], cwd=folder)
    try:
        assert f"job {other} was not submitted by `hpctrain slurm submit`" in resize(
            cluster, folder, str(other), "--nodes", "1", code=2
        )
    finally:
        cluster.run(["scancel", str(other)], timeout_s=300)
    would = resize(cluster, folder, str(first), "--nodes", "3", "--dry-run")
    assert "would submit a job with 3 nodes: " in would
    assert f"would do: job {first}: asked to save and stop" in would
    assert (cluster.job(first)["JobState"], recorded_ids(folder / RUN)) == ("RUNNING", [str(first)])

    done = resize(cluster, folder, str(first), "--nodes", "3")
    second = recorded_ids(folder / RUN)[-1]
    assert f"submitted job {second} with 3 nodes, to begin after it" in done
    end = cluster.wait_for(first, timeout_s=300)
    assert (end.state, end.exit_code, end.num_restarts) == ("FAILED", 75, 0), output(folder)
    stopped_at = summary_of(folder / RUN)["step"]
    wait_for(lambda: f"(step {stopped_at})" in output(folder), folder=folder)
    assert f"job {second}: start 1: 3 ranks on" in output(folder)
    slurm(cluster, folder, "cancel")
    cluster.wait_for(int(second), timeout_s=300)
    assert status(cluster, folder)[0]["job"]["job_id"] == second


def test_a_run_asks_for_more_nodes_gets_them_and_stays_there(cluster: Cluster, folder: Path) -> None:
    pack_arrays(folder / "samples", {"x": np.arange(4 * 168, dtype=np.float32).reshape(168, 4) / 672})
    (folder / "asks.toml").write_text(ASKS)
    done = cluster.run(["hpctrain", "slurm", "submit", "asks.toml"], cwd=folder, timeout_s=300)
    assert done.returncode == 0, done.stderr
    run = folder / "runs" / "asks"
    wait_for(lambda: len(recorded_ids(run)) == 2, folder=folder)
    first, second = (int(number) for number in recorded_ids(run))
    end = cluster.wait_for(first, timeout_s=300)
    assert (end.state, end.exit_code, end.num_restarts) == ("FAILED", 75, 0), output(folder)
    (asked,) = records_of(run, "resize")
    wait_for(lambda: max(losses_of(run)) >= asked["step"] + 30, folder=folder)
    done = cluster.run(["hpctrain", "slurm", "cancel", "asks.toml"], cwd=folder, timeout_s=300)
    assert done.returncode == 0, done.stderr
    end = cluster.wait_for(second, timeout_s=300)
    assert (end.state, end.exit_code, end.num_restarts) == ("FAILED", 75, 0), output(folder)

    assert (asked["nodes"], asked["to_nodes"]) == (2, 4)
    reason = asked["reason"]
    assert reason.startswith("4 nodes instead of 2 would finish in ")
    stopped = [record["reason"] for record in records_of(run, "stopped")]
    assert stopped[0] == "scaling: 4 instead of 2 nodes on rank 0"
    assert len(records_of(run, "resize")) == 1
    assert len(stopped) == 2  # the second stop is the test's
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert [len(one["environment"]["node_names"]) for one in starts] == [2, 4]
    assert starts[1]["before"]["stopped"] == "scaling"
    assert starts[1]["step"] == asked["step"] + 1
    submission = newest_submission(run)
    assert (submission.job_id, submission.by, submission.nodes) == (str(second), "resize", 4)
    assert submission.reason == reason
    for text in (
        f"job {first}: the run asks for 4 nodes: ", "asked to save and stop", f"submitted job {second} with 4 nodes",
    ):  # fmt: skip
        find_shown(output(folder), text, page="f7-stop-and-resume.md")
    assert not list((run / "slurm").glob("wish-*"))
    # No step or sample is lost or repeated.
    steps = newest(run, "step")
    assert sorted(steps) == list(range(1, max(steps) + 1))
    samples = sum(
        record["samples"] for rank in range(4) for record in newest(run, "step", rank=rank).values()
    )
    assert samples == steps[max(steps)]["global_samples"]
