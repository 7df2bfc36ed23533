"""The flow of the scripts for PBS, LSF and Flux: with stand-ins for their commands, since none of them can be had here.

What is tested is what the scripts do with the answers, not that the schedulers answer so. Slurm's script is tested on a
real Slurm (tests/cluster).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.ranks_launcher import REPOSITORY
from tests.states import wait_for

pytestmark = pytest.mark.timing

SCRIPTS = ("train.pbs", "train.lsf", "train.flux")
# Notes how it was called and how many seconds are left, and leaves with 75; where asked to wait, after a signal.
HPCTRAIN = """#!/bin/bash
echo "hpctrain $* left=$((HPCTRAIN_DEADLINE - $(date +%s)))" >> "$NOTES"
if [[ $WAIT ]]; then
  trap 'sleep 0.1; exit 75' USR1 TERM
  touch "$NOTES.started"
  for _ in {1..300}; do sleep 0.1; done
fi
exit 75
"""
QSTAT = """#!/bin/bash
printf 'Job Id: %s\\n    Resource_List.select = 2:ncpus=2:\\n\\tmpiprocs=2\\n' "$2"
echo '    Resource_List.walltime = 01:00:09'
"""
QSUB = """#!/bin/bash
echo "qsub $* recipe=$HPCTRAIN_RECIPE options=$HPCTRAIN_OPTIONS attempt=$HPCTRAIN_ATTEMPT" >> "$NOTES"
echo 43.pbs
"""
FLUX = """#!/bin/bash
echo "flux $* attempt=$HPCTRAIN_ATTEMPT" >> "$NOTES"
case "$1 $2" in
  "job timeleft") echo 3609 ;;
  "run "*) shift 2; exec "$@" ;;
  "--parent batch") echo f2 ;;
esac
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the stand-ins, in which a script is run."""
    (tmp_path / "bin").mkdir()
    for name, text in {"hpctrain": HPCTRAIN, "qstat": QSTAT, "qsub": QSUB, "flux": FLUX}.items():
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "hosts").write_text("a\na\nb\nb\n")
    return tmp_path


def start(place: Path, script: str, *words: str, **variables: str) -> subprocess.Popen[str]:
    environ = {
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "NOTES": str(place / "notes"),
        "PBS_O_WORKDIR": str(place),
        "PBS_JOBID": "42.pbs",
        "PBS_NODEFILE": str(place / "hosts"),
        "PBS_QUEUE": "workq",
        "LSB_JOBID": "42",
        "LSB_DJOB_NUMPROC": "4",
        "LSB_DJOB_HOSTFILE": str(place / "hosts"),
        **variables,
    }
    return subprocess.Popen(
        ["bash", str(REPOSITORY / "batch" / script), *words], cwd=place, env=environ, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, stderr = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, stderr


def signalled(place: Path, script: str, number: signal.Signals) -> int:
    """Starts a script, sends the signal to all its processes once the ranks run; returns its exit code."""
    process = start(place, script, HPCTRAIN_RECIPE="r.toml", WAIT="yes")
    wait_for((place / "notes.started").exists)
    os.killpg(process.pid, number)  # as schedulers do
    return end_of(process)[0]


def notes(place: Path) -> str:
    """What the stand-ins have noted; seconds that are left are rounded to minutes."""
    text = (place / "notes").read_text()
    return re.sub(r"left=(\d+)", lambda found: f"left={round(int(found[1]) / 60)}min", text)


def test_pbs_passes_its_time_limit_on_and_submits_the_next_job_with_the_same_resources(place: Path) -> None:
    recipe = {"HPCTRAIN_RECIPE": "r.toml", "HPCTRAIN_OPTIONS": "--set run.epochs=2"}
    code, stderr = end_of(start(place, "train.pbs", **recipe))
    assert code == 75
    assert "4 ranks for 3609 s" in stderr
    assert "job 43.pbs resumes from there" in stderr
    assert notes(place).splitlines() == [
        f"hpctrain launch -n 4 --hostfile {place}/hosts -- hpctrain train r.toml --set run.epochs=2 left=60min",
        "qsub -l select=2:ncpus=2:mpiprocs=2 -l walltime=01:00:09 -q workq"
        " -v HPCTRAIN_RECIPE,HPCTRAIN_OPTIONS,HPCTRAIN_ATTEMPT batch/train.pbs"
        " recipe=r.toml options=--set run.epochs=2 attempt=1",
    ]


def test_pbs_resumes_from_its_own_checkpoint_and_submits_no_more_jobs_than_the_limit(place: Path) -> None:
    code, stderr = end_of(start(place, "train.pbs", HPCTRAIN_RECIPE="r.toml", HPCTRAIN_ATTEMPT="20"))
    assert code == 75
    assert "hpctrain train r.toml --resume auto" in notes(place)
    assert "qsub" not in notes(place)
    assert "submit it again to resume" in stderr


def test_a_job_of_pbs_comes_back_when_it_was_asked_to_stop_and_not_when_it_was_cancelled(place: Path) -> None:
    assert signalled(place, "train.pbs", signal.SIGUSR1) == 75
    assert "qsub" in notes(place)
    for name in ("notes", "notes.started"):
        (place / name).unlink()
    assert signalled(place, "train.pbs", signal.SIGTERM) == 75
    assert "qsub" not in notes(place)


def test_lsf_leaves_with_75_to_be_queued_again_and_with_another_code_when_it_was_cancelled(
    place: Path,
) -> None:
    code, stderr = end_of(start(place, "train.lsf", HPCTRAIN_RECIPE="r.toml", HPCTRAIN_LIMIT_MIN="30"))
    assert code == 75
    assert "LSF queues job 42 again" in stderr
    assert notes(place).endswith("hosts -- hpctrain train r.toml left=30min\n")
    assert signalled(place, "train.lsf", signal.SIGTERM) == 143


def test_flux_passes_its_time_limit_on_and_submits_the_next_job_to_the_enclosing_instance(
    place: Path,
) -> None:
    code, stderr = end_of(start(place, "train.flux", "r.toml", HPCTRAIN_FLUX="-N 2 -n 8", HPCTRAIN_RANKS="8"))
    assert code == 75
    assert "job f2 resumes from there" in stderr
    assert notes(place).splitlines() == [
        "flux job timeleft attempt=",
        "flux run --ntasks=8 hpctrain train r.toml attempt=",
        "hpctrain train r.toml left=60min",
        "flux --parent batch -N 2 -n 8 batch/train.flux r.toml attempt=1",
    ]


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_a_recipe_the_script_says_how_to_give_one(place: Path, script: str) -> None:
    code, stderr = end_of(start(place, script))
    assert code == 2
    assert "no recipe" in stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_scripts_say_that_they_were_never_run_and_shellcheck_has_nothing_against_them(
    script: str,
) -> None:
    path = REPOSITORY / "batch" / script
    assert "NEVER RUN HERE" in path.read_text()
    subprocess.run(["bash", "-n", str(path)], check=True)
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("no shellcheck on the PATH")
    done = subprocess.run([program, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
