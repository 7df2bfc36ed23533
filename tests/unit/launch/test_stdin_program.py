"""Commands that read their program from standard input are refused: mpirun gives it to rank 0 only."""

from __future__ import annotations

import pytest

from hpctrain.errors import LaunchError
from hpctrain.launch import refuse_program_on_stdin
from hpctrain.launch.command import reads_program_from_stdin


@pytest.mark.parametrize(
    "command",
    [
        "python -",
        "python",
        "python3.11 -u",
        "/usr/bin/python3 -X dev -W ignore -",
        "python /dev/stdin --steps 3",
        "env OMP_NUM_THREADS=1 python -",
        "env -u A -i B=1 python3",
        "bash",
        "bash -s arguments",
        "sh -",
        "bash -e -x",
    ],
)
def test_a_program_on_standard_input_is_refused(command: str) -> None:
    with pytest.raises(LaunchError, match="save the program as a file"):
        refuse_program_on_stdin(command.split())


@pytest.mark.parametrize(
    "command",
    [
        "python train.py -",
        "python -u train.py",
        "python -c pass",
        "python -Im hpctrain",
        "python -m hpctrain.cli.main train recipe.toml",
        "python --version",
        "python -W error::FutureWarning -Xdev train.py",
        "bash -c true",
        "bash -lc true",
        "bash -e run.sh",
        "env A=1 python train.py",
        "hpctrain train recipe.toml",
        "./pythonic -",
    ],
)
def test_other_commands_are_not(command: str) -> None:
    assert not reads_program_from_stdin(command.split())
