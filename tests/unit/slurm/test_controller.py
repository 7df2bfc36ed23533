"""Slurm's commands: retries while the controller is busy, refusals with what to change, no job submitted twice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import ExitCode, LaunchError, RecipeError, UsageError
from hpctrain.launch import SlurmRefused, SlurmUnavailable
from hpctrain.launch.slurm_commands import is_busy
from hpctrain.slurm import (
    ResizeWay,
    carry_out_resize,
    check_idle,
    plan_job,
    plan_resize,
    run_of_job,
    stop_jobs,
    submit_job,
)
from hpctrain.slurm.jobs import Job, newest_submission, recorded_ids
from tests.unit.slurm.busy_slurm import FakeSlurm

FAILED = "1 err sbatch: error: Batch job submission failed:"
BUSY = f"{FAILED} Unable to contact slurm controller (connect failure)"
LOST = f"{FAILED} Socket timed out on send/recv operation"
RECIPE = """
[run]
directory = "runs/x"
epochs = 2
[task]
target = "tasks:Task"
[data]
train = "data/x"
global_batch = 8
[slurm]
nodes = 4
"""


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    (tmp_path / "bin").mkdir()
    return FakeSlurm(tmp_path / "bin")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return Path("recipe.toml")


def test_a_busy_controller_is_asked_again_and_the_user_is_told(slurm: FakeSlurm) -> None:
    slurm.answers(
        "squeue", BUSY, "1 err slurm_load_jobs error: Zero Bytes were transmitted or received", "0 out yes"
    )
    assert slurm.controller.ask(["squeue", "-h"]) == "yes\n"
    assert slurm.calls("squeue") == ["-h", "-h", "-h"]
    assert len(slurm.said) == 2
    assert "connect failure" in slurm.said[0]


def test_a_controller_that_stays_busy_is_given_up(slurm: FakeSlurm) -> None:
    slurm.answers("squeue", BUSY)
    with pytest.raises(
        SlurmUnavailable, match=r"squeue failed 4 times: .*connect failure.*`scontrol ping`"
    ) as caught:
        slurm.controller.ask(["squeue"])
    assert caught.value.exit_code == ExitCode.LAUNCH
    assert len(slurm.calls("squeue")) == 4


@pytest.mark.timing
def test_a_command_that_does_not_answer_is_ended_and_asked_again(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path, timeout_s=2.0)
    slurm.answers("squeue", "0 sleep 600", "0 out yes")
    assert slurm.controller.ask(["squeue"]) == "yes\n"
    assert "no answer within" in slurm.said[0]


@pytest.mark.parametrize(
    ("told", "change"),
    [
        ("invalid partition specified: nowhere", "set slurm.partition to one that `sinfo --summarize` lists"),
        ("Invalid account or account/partition combination specified", "set slurm.account"),
        ("Invalid qos specification", "set slurm.qos"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "lower slurm.time"),
        ("Node count specification invalid", "lower slurm.nodes"),
        (
            "Requested node configuration is not available",
            "no node has this, or too few have: compare slurm.tasks_per_node",
        ),
        ("Invalid feature specification", "set slurm.constraint"),
        ("Invalid generic resource (gres) specification", "gpus_per_task"),
        ("Requested reservation is invalid", "set slurm.reservation"),
        ("Job dependency problem", "slurm.dependency"),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "wait for running",
        ),
        ("Invalid job array specification", "slurm.array"),
    ],
)
def test_a_refusal_is_not_repeated_and_says_what_to_change(slurm: FakeSlurm, told: str, change: str) -> None:
    slurm.answers("sbatch", f"{FAILED} {told}")
    with pytest.raises(SlurmRefused) as caught:
        slurm.controller.ask(["sbatch", "x"])
    assert told in str(caught.value)
    assert change in str(caught.value).partition("What to do: ")[2]
    assert len(slurm.calls("sbatch")) == 1


def test_a_refusal_after_sbatchs_own_retries_is_a_refusal() -> None:
    assert is_busy("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying")
    assert not is_busy("sbatch: error: Batch job submission failed: Invalid qos specification")


def test_without_slurm_the_message_says_where_to_go(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path)
    with pytest.raises(LaunchError, match=r"there is no no-such-squeue on the PATH: .*login node"):
        slurm.controller.ask(["no-such-squeue"])


def test_a_submitted_job_is_found_in_the_run_directory(
    slurm: FakeSlurm, recipe: Path, tmp_path: Path
) -> None:
    slurm.answers("sbatch", BUSY, "0 out 12;cluster")
    planned = plan_job(recipe, overrides=["slurm.nodes=2", "run.epochs=3"])
    job = submit_job(planned, slurm.controller, arguments=["--resume", "never"])
    assert job.job_id == "12"
    assert newest_submission(tmp_path / "runs" / "x") == job
    assert (job.nodes, job.tasks_per_node) == (2, 1)
    assert Path(job.script).read_text() == planned.text
    assert 'hpctrain train recipe.toml --set run.epochs=3 "$@"' in planned.text
    assert slurm.calls("sbatch")[-1] == f"--parsable {job.script} --resume never"


def test_a_job_whose_answer_was_lost_is_not_submitted_twice(slurm: FakeSlurm, recipe: Path) -> None:
    slurm.answers("sbatch", LOST, "0 out 99")
    slurm.answers("squeue", "0 out 11|/other/script\\n12|SCRIPT")
    program = slurm.folder / "squeue"
    # As squeue does, it lists the path that sbatch was given.
    program.write_text(
        program.read_text().replace("printf '%b\\n' \"$text\"; else", f"sed s:SCRIPT:$(awk '{{print $2}}' "
        f"{slurm.folder}/sbatch.calls): <<< \"$(printf '%b' \"$text\")\"; else")
    )  # fmt: skip
    assert submit_job(plan_job(recipe), slurm.controller).job_id == "12"
    assert len(slurm.calls("sbatch")) == 1


def test_a_job_whose_answer_was_lost_and_that_is_not_there_is_submitted_again(
    slurm: FakeSlurm, recipe: Path
) -> None:
    slurm.answers("sbatch", LOST, "0 out 13")
    slurm.answers("squeue", "0 out 11|/other/script")
    assert submit_job(plan_job(recipe), slurm.controller).job_id == "13"
    assert len(slurm.calls("sbatch")) == 2


def test_a_refused_job_leaves_no_script_and_no_record(slurm: FakeSlurm, recipe: Path, tmp_path: Path) -> None:
    slurm.answers("sbatch", f"{FAILED} Invalid qos specification")
    with pytest.raises(SlurmRefused):
        submit_job(plan_job(recipe), slurm.controller)
    assert not list((tmp_path / "runs" / "x" / "slurm").iterdir())
    assert recorded_ids(tmp_path / "runs" / "x") == []


def test_no_second_job_of_a_run_while_one_waits_or_runs(slurm: FakeSlurm, recipe: Path) -> None:
    planned = plan_job(recipe)
    slurm.answers("sbatch", "0 out 12")
    check_idle(planned, slurm.controller)
    submit_job(planned, slurm.controller)
    line = "12|{}|Resources|0:00|1:00:00|1:00:00|4|N/A|"
    slurm.answers("squeue", "0 out " + line.format("PENDING"))
    with pytest.raises(UsageError, match=r"job 12 of runs/x is PENDING: .*hpctrain slurm cancel"):
        check_idle(planned, slurm.controller)
    slurm.answers("squeue", "0 out " + line.format("COMPLETED"))
    check_idle(planned, slurm.controller)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["run.ranks=3"], r"run.ranks = 3, but \[slurm\] starts 4 \(nodes = 4, tasks_per_node = 1\)"),
        (["slurm.nodes=16"], r"global_batch = 8 cannot be split over the 16 ranks"),
        (['slurm.sweep={ "optimizer.lr" = [0.1, -1.0] }'], r"combination 1 \(optimizer.lr=-1.0\)"),
        (['slurm.sweep={ "optimizer.lrr" = [0.1] }'], r"did you mean lr\?"),
        (
            ["slurm.array=0-3", "checkpoint.directory=c"],
            r"checkpoint.directory would be the same for all tasks",
        ),
        (['stop.signals=["SIGTERM"]'], r"asks the ranks to stop by SIGUSR1 or"),
        (['stop.signals=["SIGUSR2"]', "checkpoint.signal=none", "slurm.launcher=supervise"], r"SIGUSR1 or"),
        (["slurm.template=no.j2"], r"the template .*no.j2 cannot be used"),
    ],
)
def test_a_job_that_does_not_fit_its_recipe_is_refused(
    recipe: Path, overrides: list[str], expected: str
) -> None:
    with pytest.raises(RecipeError, match=expected):
        plan_job(recipe, overrides=overrides)


def test_the_ranks_are_asked_by_a_signal_that_the_recipe_takes(recipe: Path) -> None:
    assert 'kill -USR1 "$step"' in plan_job(recipe).text
    other = plan_job(recipe, overrides=['stop.signals=["SIGTERM", "SIGUSR2"]', "checkpoint.signal=none"])
    assert 'kill -USR2 "$step"' in other.text
    assert "--signal=B:USR1@" in other.text  # to the script, which hands it on


def test_a_recipe_without_the_section_or_without_hpctrain_is_refused(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"there is no hpctrain in .*empty/bin: set slurm.python"):
        plan_job(recipe, overrides=["slurm.python=empty"])
    recipe.write_text(RECIPE.partition("[slurm]")[0])
    with pytest.raises(RecipeError, match=r"recipe.toml has no section \[slurm\]"):
        plan_job(recipe)
    assert plan_job(recipe, overrides=["slurm.nodes=2"]).describe() == "2 nodes x 1 rank"


def test_waiting_jobs_are_cancelled_and_running_ones_asked(slurm: FakeSlurm) -> None:
    slurm.answers("scancel", "0 out")
    stop_jobs([Job(job_id="1", state="PENDING"), Job(job_id="2_3", state="RUNNING")], slurm.controller)
    assert slurm.calls("scancel") == ["1", "--batch --signal=TERM 2_3", "--batch --signal=USR1 2_3"]


QUEUED = "0 out 12|{state}|None|0:10|1:00:00|59:50|4|2026-01-01T00:00:00|n[0-3]"


def known_job(slurm: FakeSlurm, run: Path, *, state: str = "RUNNING", uid: int | None = None, partition: str = "all",
              max_nodes: str = "UNLIMITED", total_nodes: int = 16, update: str = "0 out") -> None:  # fmt: skip
    """Makes squeue and scontrol answer as for the job 12 of a run."""
    slurm.answers("squeue", QUEUED.format(state=state))
    script = next((run / "slurm").glob("*.sbatch"), Path("nowhere"))
    owner = os.getuid() if uid is None else uid
    slurm.answers(
        "scontrol",
        f"0 out JobId=12 UserId=someone({owner}) JobState={state} Partition={partition} Command={script.resolve()} "
        "WorkDir=/",
        f"0 out PartitionName={partition} MinNodes=0 MaxNodes={max_nodes} TotalNodes={total_nodes}",
        update,
    )


def test_a_resize_that_slurm_refuses_changes_nothing(slurm: FakeSlurm, recipe: Path) -> None:
    slurm.answers(
        "sbatch",
        "0 out 12",
        f"{FAILED} Node count specification invalid",
    )
    slurm.answers("scancel", "0 out")
    submit_job(plan_job(recipe), slurm.controller)
    known_job(slurm, Path("runs/x"))
    plan = plan_resize(Path("runs/x"), nodes=8, controller=slurm.controller)
    with pytest.raises(SlurmRefused, match=r"lower slurm.nodes"):
        carry_out_resize(plan, slurm.controller)
    assert slurm.calls("scancel") == []
    assert recorded_ids(Path("runs/x")) == ["12"]


def test_a_resize_keeps_the_overrides_and_begins_after_the_old_job(slurm: FakeSlurm, recipe: Path) -> None:
    slurm.answers("sbatch", "0 out 12", "0 out 13")
    slurm.answers("scancel", "0 out")
    submit_job(plan_job(recipe, overrides=["run.epochs=9", "slurm.nodes=4"]), slurm.controller)
    known_job(slurm, Path("runs/x"))
    plan = plan_resize(Path("runs/x"), nodes=2, controller=slurm.controller, overrides=["slurm.time=10"])
    assert plan.describe() == ["job 12: asked to save and stop"]
    done = carry_out_resize(plan, slurm.controller, reason="2 pay")
    assert done.overrides == ("run.epochs=9", "slurm.time=10", "slurm.nodes=2")
    assert slurm.calls("sbatch")[-1].startswith("--parsable --dependency=afterany:12 ")
    text = Path(done.script).read_text()
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --time=10\n" in text
    assert "--set run.epochs=9" in text
    found = newest_submission(Path("runs/x"))
    assert (found.job_id, found.by, found.reason) == ("13", "resize", "2 pay")


def test_a_waiting_job_is_changed_in_the_queue_or_submitted_again(slurm: FakeSlurm, recipe: Path) -> None:
    slurm.answers("sbatch", "0 out 12", "0 out 13")
    slurm.answers("scancel", "0 out")
    submit_job(plan_job(recipe, overrides=["slurm.nodes=4"]), slurm.controller)
    known_job(slurm, Path("runs/x"), state="PENDING")
    plan = plan_resize(Path("runs/x"), nodes=2, controller=slurm.controller)
    assert plan.way is ResizeWay.QUEUE
    done = carry_out_resize(plan, slurm.controller)
    assert slurm.calls("scontrol")[-1] == "update JobId=12 NumNodes=2-2 NumTasks=2 NumCPUs=2"
    assert (done.job_id, done.by, done.nodes) == ("12", "queue", 2)
    assert newest_submission(Path("runs/x")).overrides == ("slurm.nodes=2",)
    assert len(slurm.calls("sbatch")) == 1

    (slurm.folder / "scontrol.calls").unlink()
    known_job(
        slurm,
        Path("runs/x"),
        state="PENDING",
        update="1 err slurm_update error: Requested operation is invalid",
    )
    plan = plan_resize(Path("runs/x"), nodes=3, controller=slurm.controller)
    done = carry_out_resize(plan, slurm.controller)
    assert (done.job_id, done.by, done.nodes) == ("13", "resize", 3)
    assert slurm.calls("scancel") == ["12"]


def test_a_resize_that_is_not_possible_says_why(slurm: FakeSlurm, recipe: Path) -> None:
    slurm.answers("sbatch", "0 out 12")
    submit_job(plan_job(recipe, overrides=["slurm.nodes=4"]), slurm.controller)
    run = Path("runs/x")

    def refused(*, nodes: int, **facts: Any) -> str:
        (slurm.folder / "scontrol.calls").unlink(missing_ok=True)
        known_job(slurm, run, **facts)
        with pytest.raises((UsageError, RecipeError)) as error:
            plan_resize(run, nodes=nodes, controller=slurm.controller)
        return str(error.value)

    assert refused(nodes=4) == "job 12 has 4 nodes already: give another number"
    assert "cannot be split over the 4096 ranks" in refused(nodes=4096)
    assert refused(nodes=8, max_nodes="6") == (
        "8 nodes are not possible: partition all gives a job 0 to 6 nodes, and has 16"
    )
    assert refused(nodes=8, total_nodes=6).endswith("gives a job 0 to any number of nodes, and has 6")
    if os.getuid() != 0:  # root may change everybody's jobs
        assert refused(nodes=2, uid=os.getuid() + 1) == "job 12 is someone's, not yours: ask someone"


def test_a_job_is_found_by_its_number_or_the_message_says_what_it_is(slurm: FakeSlurm, recipe: Path) -> None:
    slurm.answers("sbatch", "0 out 12")
    submit_job(plan_job(recipe, overrides=["slurm.nodes=4"]), slurm.controller)
    known_job(slurm, Path("runs/x"))
    assert run_of_job("12", slurm.controller).resolve() == Path("runs/x").resolve()

    def refused(answer: str) -> str:
        (slurm.folder / "scontrol.calls").unlink(missing_ok=True)
        slurm.answers("scontrol", answer)
        with pytest.raises(UsageError) as error:
            run_of_job("12", slurm.controller)
        return str(error.value)

    assert "Slurm knows no job 12" in refused("1 err slurm_load_jobs error: Invalid job id specified")
    mine = f"UserId=me({os.getuid()})"
    other = refused(f"0 out JobId=12 {mine} JobState=RUNNING Command=/home/me/job.sh WorkDir=/home/me")
    assert "job 12 was not submitted by `hpctrain slurm submit`" in other
    (script,) = Path("runs/x/slurm").glob("*.sbatch")
    ended = refused(f"0 out JobId=12 {mine} JobState=COMPLETED Command={script.resolve()} WorkDir=/")
    assert "job 12 has ended (COMPLETED)" in ended
