"""Ctrl-C on `hpctrain launch` with mpirun: at any moment all ranks end soon, with a line that says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.interrupts import MOMENTS, Interrupts
from tests.ranks_launcher import Launched, start_command

pytestmark = [pytest.mark.launches, pytest.mark.cold]

HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))
NUM_RANKS = 2


class Launch:
    def __init__(self, launched: Launched) -> None:
        self._launched = launched

    @property
    def output(self) -> str:
        return self._launched.stdout + self._launched.stderr

    def wait(self, *, timeout_s: float) -> int:
        return self._launched.wait(timeout_s=timeout_s).returncode


@contextmanager
def start(settings: list[str], folder: Path, environ: dict[str, str]) -> Iterator[Launch]:
    words = [word for each in settings for word in ("--set", each)]
    argv = [HPCTRAIN, "launch", "-n", str(NUM_RANKS), "--", "hpctrain", "train", "recipe.toml", *words]
    with start_command(None, argv, env=environ, cwd=folder) as launched:
        yield Launch(launched)


@pytest.fixture(scope="module")
def interrupts(tmp_path_factory: pytest.TempPathFactory) -> Interrupts:
    return Interrupts(start, num_ranks=NUM_RANKS, folder=tmp_path_factory.mktemp("interrupts"))


@pytest.mark.parametrize(
    "moment", [pytest.param(name, marks=[pytest.mark.thorough] * (name == "steps")) for name in MOMENTS]
)
def test_one_ctrl_c_ends_all_ranks_with_75(interrupts: Interrupts, moment: str) -> None:
    interrupts.assert_one_ends_all_with_75(moment)


def test_a_second_ctrl_c_ends_ranks_that_save_for_long(interrupts: Interrupts) -> None:
    interrupts.assert_two_end_a_long_save()
