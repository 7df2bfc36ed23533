"""Ctrl-C on a real Slurm cluster: on `hpctrain launch`, which starts the ranks with srun, and on srun itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpctrain.errors import ExitCode
from tests.cluster import Cluster
from tests.cluster.training_jobs import Running, running
from tests.interrupts import ENDS_WITHIN_S, Interrupts
from tests.stop_trials import MARK, processes_marked

pytestmark = pytest.mark.launches

NUM_NODES = 4


@pytest.fixture(scope="module")
def interrupts(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Interrupts:
    """In an allocation, where `hpctrain launch` takes srun."""

    @contextmanager
    def start(settings: list[str], folder: Path, environ: dict[str, str]) -> Iterator[Running]:
        words = [word for each in settings for word in ("--set", each)]
        allocation = ["salloc", f"--nodes={NUM_NODES}", "--ntasks-per-node=1", "--quiet"]
        launch = ["hpctrain", "launch", "-n", str(NUM_NODES), "--ranks-per-node", "1", "--"]
        command = [*allocation, *launch, "hpctrain", "train", "recipe.toml", *words]
        with running(cluster, command, folder, environ) as found:
            yield found

    return Interrupts(start, num_ranks=NUM_NODES, folder=tmp_path_factory.mktemp("interrupts"))


# The first two with mpirun: tests/ranks/launch/test_interrupts.py.
@pytest.mark.parametrize(
    "moment", [*(pytest.param(name, marks=pytest.mark.thorough) for name in ("launch", "start")), "save"]
)
def test_one_ctrl_c_ends_all_ranks_with_75(interrupts: Interrupts, moment: str) -> None:
    assert "srun --mpi=pmix" in interrupts.assert_one_ends_all_with_75(moment)


@pytest.mark.thorough
def test_a_second_ctrl_c_ends_ranks_that_save_for_long(interrupts: Interrupts) -> None:
    interrupts.assert_two_end_a_long_save()


def test_ctrl_c_twice_on_srun_itself_ends_the_run_and_leaves_whole_checkpoints(
    cluster: Cluster, interrupts: Interrupts
) -> None:
    """srun reports its tasks at the first one. At another within a second it ends them, in the end by SIGKILL."""
    folder, mark = interrupts.folder, f"srun-{os.getpid()}"
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", "hpctrain", "train", "recipe.toml"]
    command += ["--set", "run.epochs=1000", "--resume", "never"]
    with running(cluster, command, folder, {MARK: mark, "SEEN": str(folder / "seen")}) as started:
        deadline_s = time.monotonic() + 300
        while "\nstep " not in started.output:
            assert time.monotonic() < deadline_s, started.output
            time.sleep(0.05)
        srun = min(
            pid for pid, (command, _) in processes_marked(mark).items() if command.startswith(b"srun\0")
        )
        began_s = time.monotonic()
        for _ in range(2):
            os.kill(srun, signal.SIGINT)
            time.sleep(0.3)
        code = started.wait(timeout_s=300)
        while processes_marked(mark):
            assert time.monotonic() - began_s < ENDS_WITHIN_S, started.output
            time.sleep(0.05)
        print(f"Ctrl-C twice on srun: all ended after {time.monotonic() - began_s:.1f} s, exit code {code}")
        assert code in (ExitCode.STOPPED_EARLY, 128 + signal.SIGKILL), started.output
    interrupts.assert_checkpoints_are_whole()
