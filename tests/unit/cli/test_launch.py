"""What `hpctrain launch` refuses before it starts anything, and what it finds out from launchers' output."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from hpctrain.errors import LaunchError
from hpctrain.launch.failure import find_failure
from hpctrain.launch.process import resolve_command

with warnings.catch_warnings():
    # typer itself uses names that newer releases of click deprecate.
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer
    from typer.testing import CliRunner

    from hpctrain.cli.launch import LAUNCH_SETTINGS, launch_command

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:click", "ignore::DeprecationWarning:typer"
)

app = typer.Typer()
app.command(context_settings=LAUNCH_SETTINGS)(launch_command)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-n", "0", "--", "true"], "at least 1 rank"),
        (["-n", "2", "--", "no-such-program"], "'no-such-program', is not an executable program"),
        (["-n", "2", "--", "train.py"], "`python train.py`"),
        (["-n", "2", "--host", "a", "--hostfile", "b", "--", "true"], "give one of them"),
        (["-n", "2", "--hostfile", "no/such/file", "--", "true"], "cannot be read"),
        (["-n", "2", "--host", ",", "--", "true"], "names no machine"),
        (["-n", "2", "--launcher", "srun", "--", "true"], "srun"),
    ],
)
def test_a_launch_that_cannot_be_is_a_launch_error(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    result = CliRunner().invoke(app, options)
    assert isinstance(result.exception, LaunchError)
    assert words in str(result.exception)


def test_an_unknown_launcher_is_a_usage_error() -> None:
    result = CliRunner().invoke(app, ["-n", "2", "--launcher", "sruns", "--", "true"])
    assert result.exit_code == 2


def test_the_command_keeps_its_own_options() -> None:
    result = CliRunner().invoke(app, ["-n", "2", "--dry-run", "--", "echo", "-n", "--dry-run", "x"])
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip().endswith("echo -n --dry-run x")


def test_hpctrain_is_the_one_of_this_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (tmp_path / "hpctrain").write_text("#!/bin/sh\n")
    (tmp_path / "hpctrain").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert resolve_command("hpctrain") == str(tmp_path / "hpctrain")
    assert resolve_command("sh") == "sh"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            b"mpirun noticed that process rank 2 with PID 0 on node vm exited on signal 9 (Killed).",
            ("2", "vm", 137, 9),
        ),
        (b"srun: error: n2: task 2: Killed", ("2", "n2", 137, 9)),
        (b"srun: error: n1: tasks 0-1: Segmentation fault (core dumped)", ("0-1", "n1", 139, 11)),
        (b"srun: error: n1: task 1: Exited with exit code 7", ("1", "n1", 7, None)),
    ],
)
def test_a_rank_that_failed_is_found_in_the_launchers_words(
    line: bytes, expected: tuple[str, str, int, int | None]
) -> None:
    failure = find_failure(line)
    assert failure is not None
    assert (failure.rank, failure.node, failure.exit_code, failure.signal) == expected


@pytest.mark.parametrize(
    "line", [b"srun: error: n2: tasks 2-3: Terminated", b"rank 2 was killed", b"step 3: Killed"]
)
def test_other_lines_tell_of_no_failure(line: bytes) -> None:
    assert find_failure(line) is None
