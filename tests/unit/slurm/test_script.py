"""Batch scripts: what they say for each kind of job, that shells accept them, a site's own template."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import RecipeError
from hpctrain.run import SlurmSection
from hpctrain.slurm import JobScript, render_script
from hpctrain.slurm.submission import option_text, sweep_points
from tests.ranks_launcher import REPOSITORY
from tests.unit.launch.srun_endings import ENDINGS, Ending
from tests.unit.slurm.jobs_to_render import KINDS, job

sys.path.insert(0, str(REPOSITORY / "scripts"))
import write_ready_scripts as ready

READY = sorted((REPOSITORY / "slurm").glob("*.sbatch"))


@pytest.fixture
def shellcheck() -> str:
    program = shutil.which("shellcheck")
    if program is None:
        if os.environ.get("HPCTRAIN_CLUSTER") == "required":
            pytest.fail("shellcheck is not installed: run `make cluster-setup`")
        pytest.skip("shellcheck is not installed: run `make cluster-setup`")
    return program


def code_of(text: str) -> list[str]:
    """The lines that are neither comments nor empty."""
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def options_of(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize("name", sorted(ready.SCRIPTS))
def test_ready_scripts_are_those_of_the_template(name: str) -> None:
    assert (REPOSITORY / "slurm" / name).read_text() == ready.script(name), "run `make docs`"


def test_shellcheck_finds_nothing_in_any_script(shellcheck: str, tmp_path: Path) -> None:
    assert len(READY) == len(ready.SCRIPTS) + 1
    rendered = [tmp_path / f"{kind}.sbatch" for kind in KINDS]
    for path in rendered:
        path.write_text(render_script(job(path.stem)))
    # SC2016: the values of some kinds have a `$` in single quotes, which is meant.
    for words in ([*READY], ["--exclude=SC2016", *rendered]):
        done = subprocess.run([shellcheck, *words], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout


def test_a_script_is_short_and_says_what_the_section_says() -> None:
    text = render_script(job("plain"))
    assert len(code_of(text)) <= 57
    assert max(map(len, text.splitlines())) <= 120
    assert "\n\n\n" not in text
    assert options_of(text) == [
        '--job-name="a run"', "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=01:00:00",
        "--output=slurm-%x-%j.out", "--signal=B:USR1@120", "--requeue", "--open-mode=append",
    ]  # fmt: skip
    assert "export PATH='/opt/my env'/bin:$PATH" in text
    assert (
        "srun --mpi=pmix --wait=30 \\\n"
        "  hpctrain train 'my recipe.toml' --set run.epochs=3 --set 'run.name=a b' \"$@\" &\n"
    ) in text


@pytest.mark.parametrize(
    ("kind", "there", "not_there"),
    [
        ("gpus", ["#SBATCH --gpus-per-node=2"], []),
        ("successor", ["#SBATCH --no-requeue", "sbatch --parsable --dependency=\"afterany:$job\" ${SLURM_ARRAY"],
         ["scontrol"]),
        ("end", ["#SBATCH --no-requeue"], ["scontrol", "sbatch --parsable"]),
        ("seeds", ["#SBATCH --array=0-3%2", "--set run.seed=\"$SLURM_ARRAY_TASK_ID\"",
                   "scontrol requeue \"$job\"",
                   "#SBATCH --output=slurm-%x-%A_%a.out"], []),
        ("sweep", ["#SBATCH --array=0-3\n", "--set optimizer.lr=0.1", "--set run.name=wide"], ["run.seed"]),
        ("chained sweep", ["--array=\"$SLURM_ARRAY_TASK_ID\"} \"$0\""], []),
        ("mpirun", ["mpirun -n \"$SLURM_NTASKS\" \\\n", "binding_policy=none"], ["srun"]),
        ("supervise", ["#SBATCH --no-kill", "ranks=$(((SLURM_JOB_NUM_NODES - 1) * SLURM_NTASKS_PER_NODE))",
                       "hpctrain supervise -n \"$ranks\" -- \\\n  hpctrain train"], ["srun", "state saved"]),
        ("elastic", ["#SBATCH --no-kill", "hpctrain supervise --elastic 2:4 -- \\\n  hpctrain train"], ["srun"]),
        ("shrinkable", ["smaller='runs/it'\"'\"'s here/slurm'/nodes-$SLURM_JOB_ID"], []),
        ("apptainer", ["apptainer exec --nv --bind \"$PWD\" --bind /tmp --bind /var:/data 'my image.sif'"], ["PATH="]),
        ("pyxis", ["--container-image='nvcr.io#a/b:1' --container-mounts=\"$PWD:$PWD\",/tmp:/tmp"], ["PATH="]),
        ("mpich", ["srun --mpi=pmi2"], ["PMIX"]),
        ("archive", ["tar -xf '/shared/my environment.tar'", "\n    clean\n"],
         ["/opt/"]),
        ("everything", ["--time-min=00:10:00", "--mail-user=me@example.org", "--mail-type=END,FAIL",
                        "module load gcc/12 openmpi", "\nulimit -c 0\n", "export A='b c'\nexport B='$HOME'\n",
                        '#SBATCH --output="out put-%j.txt"'], []),
    ],
)  # fmt: skip
def test_each_kind_of_job_has_its_own_lines_and_no_others(
    kind: str, there: list[str], not_there: list[str]
) -> None:
    text = render_script(job(kind))
    for words in there:
        assert words in text
    for words in not_there:
        assert not any(words in line for line in code_of(text)), words


def code_decided(script: str, *, code: int, lines: Sequence[str], folder: Path) -> int:
    """What the script's part that judges the launcher's code makes of `code`, after `lines` have been printed."""
    start, end = script.index("failed() {"), script.index("# A busy controller")
    output, earlier = folder / "output", b"srun: error: hpct0: task 1: Exited with exit code 4\n"
    output.write_bytes(earlier + "".join(f"{line}\n" for line in lines).encode())
    with output.open("ab") as stderr:
        done = subprocess.run(
            ["bash", "-c", f"printed={len(earlier)} code={code}\n{script[start:end]}\necho $code"],
            stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=300, check=True,
        )  # fmt: skip
    return int(done.stdout)


def test_a_script_ends_with_the_code_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    """Only what this start has printed counts, and the launcher's code where nothing says who failed."""
    text = render_script(job("plain"))
    cases = {**ENDINGS, "nothing is printed": Ending(code=75, right=75, lines=())}
    found = {
        name: code_decided(text, code=case.code, lines=case.lines, folder=tmp_path)
        for name, case in cases.items()
    }
    assert found == {name: case.right for name, case in cases.items()}
    failed = ["hpctrain: rank 1 ends the run (exit code 3), so that no other rank waits for it"]
    text = render_script(job("mpirun"))
    assert code_decided(text, code=75, lines=failed, folder=tmp_path) == 3
    assert code_decided(text, code=75, lines=(), folder=tmp_path) == 75


def test_the_combinations_of_a_sweep_reach_the_ranks_as_they_were_written(tmp_path: Path) -> None:
    """Bash runs the script's part for arrays; the words are those that `hpctrain train` would get."""
    text = render_script(job("sweep"))
    assert len(sweep_points(job("sweep").settings)) == 4
    start, end = text.index("# What each task"), text.index("start=$((")
    printed = subprocess.run(
        ["bash", "-c", f"say() {{ :; }}\n{text[start:end]}\nprintf '%s\\0' \"$@\""],
        env={"SLURM_ARRAY_TASK_ID": "3", "PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=300,
        check=True,
    )  # fmt: skip
    assert printed.stdout.split("\0")[:-1] == [
        "--set", "run.directory=runs/it's here/task-3", "--set", "optimizer.lr=0.01",
        "--set", 'task.options={ "a b" = "c\'d\\"$x" }', "--set", 'run.name="é"',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("gpu,long", "gpu,long"), ("a b", '"a b"'), ("--mem=0", "--mem=0"), ("--comment=a b", '--comment="a b"'),
        ('say "x"\\', '"say \\"x\\"\\\\"'), ("a#b", '"a#b"'), ("[intel&gpu]", '"[intel&gpu]"'),
    ],
)  # fmt: skip
def test_option_values_are_quoted_where_slurm_needs_it(text: str, written: str) -> None:
    assert option_text(text) == written


def test_a_sites_template_replaces_blocks_of_ours(tmp_path: Path) -> None:
    (tmp_path / "greeting.j2").write_text("echo from the site\n")
    # Its name is that of the template that it extends.
    template = tmp_path / "job.sbatch.j2"
    template.write_text(
        '{% extends "job.sbatch.j2" %}\n'
        '{% block setup %}\n{% include "greeting.j2" %}\nmodule load {{ name }}/{{ slurm.nodes }}\n{% endblock %}\n'
    )
    text = render_script(job("plain"), template=template)
    assert "echo from the site\nmodule load a run/2\n" in text
    assert "srun --mpi=pmix" in text
    assert "export PATH" not in text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (None, "cannot be used"),
        ("{% if %}", "cannot be used, line 1"),
        ("{{ slurm.nodse }}", "'nodse'"),
        ('{% extends "no.j2" %}', "no.j2"),
    ],
)
def test_a_faulty_template_is_refused(source: str | None, expected: str, tmp_path: Path) -> None:
    template = tmp_path / "mine.j2"
    if source is not None:
        template.write_text(source)
    with pytest.raises(RecipeError, match=r"mine\.j2") as caught:
        render_script(job("plain"), template=template)
    assert expected in str(caught.value)


def test_whatever_a_value_holds_the_shell_takes_it_as_one_word(tmp_path: Path) -> None:
    """A recipe path, a run directory and an override with all that a shell reads; bash prints the command's words."""
    odd = "a'b\"c$(touch hacked)`touch hacked`;\\ *"
    settings: dict[str, Any] = {"environment": {"ODD": odd}, "on_stop": "end"}
    made = JobScript(
        name=odd, about=["x"], settings=SlurmSection(**settings), recipe=Path(odd), run_directory=odd,
        overrides=[f"run.name={odd}"],
    )  # fmt: skip
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf \'%s\\0\' "$ODD" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "job.sh").write_text(render_script(made))
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": "1",
        "SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "a",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "job.sh"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split("\0")[:-1] == [
        odd, "--mpi=pmix", "--wait=30", "hpctrain", "train", odd, "--set", f"run.name={odd}",
    ]  # fmt: skip
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    ("variables", "asked_for"),
    [
        ({"SLURM_JOB_ID": "7"}, "7"),
        # The last task of an array has the array's own number, by which Slurm would queue all tasks again.
        ({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "7_3"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}, "7_0"),
    ],
)
@pytest.mark.parametrize("script", ["train", "preemptible", "gpu", "chain"])
def test_a_script_that_is_submitted_as_an_array_asks_for_its_own_task_only(
    tmp_path: Path, script: str, variables: Mapping[str, str], asked_for: str
) -> None:
    for name, does in {
        "srun": "exit 75", "hpctrain": "exit 75", "sleep": "exit 0",
        "scontrol": 'echo "$@" >> asked', "sbatch": 'echo "$@" >> asked; echo 12',
    }.items():  # fmt: skip
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environ = {
        "HPCTRAIN_ENVIRONMENT": str(tmp_path / "none"), "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_CPUS_PER_TASK": "1", "SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "a", "SLURM_JOB_NUM_NODES": "1",
        **variables,
    }  # fmt: skip
    words = ["bash", str(REPOSITORY / "slurm" / f"{script}.sbatch"), "recipe.toml"]
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 75, done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    if script == "chain":
        task = variables.get("SLURM_ARRAY_TASK_ID")
        assert len(asked) == 1
        assert f"--dependency=afterany:{asked_for}" in asked[0]
        assert ("--array" in asked[0], f"--array={task}" in asked[0]) == (task is not None, task is not None)
    else:
        assert asked == [f"requeue {asked_for}"]
