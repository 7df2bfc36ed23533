"""Parameters that are gathered during the next step, on real ranks: a rank that does not come, and one that ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpctrain.errors import ExitCode
from tests.ranks_launcher import run_command

pytestmark = pytest.mark.launches

# Rank LATE sleeps in its update, after which it would gather; each rank is a node of its own.
PROGRAM = """
import sys, time
from pathlib import Path
import torch
import hpctrain

late, at_step, seconds, folder = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
session = hpctrain.init(timeout_s=4)
session.world.publish_in(folder)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 2))
session.parallelize(model, hpctrain.ParallelPlan(shard="gradients"))

class Late(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        if session.rank == late and step == at_step:
            time.sleep(seconds)

updater = session.distributed_optimizer(model, Late(model.parameters(), lr=0.01), bucket_bytes=20_000)
for step in range(3):
    updater.backward(model(torch.ones(3, 200)).sum(), weight=1 / session.world_size)
    updater.step()
    print(f"<step {step} returned>", flush=True)
if session.rank == late:
    print(f"<sum {float(sum(p.sum() for p in model.parameters())):.3f}>", flush=True)
"""


def run(num_ranks: int, folder: Path, *, late: int, at_step: int, seconds: float) -> tuple[int, str, str]:
    argv = [sys.executable, "-c", PROGRAM, str(late), str(at_step), str(seconds), str(folder)]
    result = run_command(num_ranks, argv, env={"HPCTRAIN_RANKS_PER_NODE": "1"}, timeout_s=300)
    return result.returncode, result.stdout, result.stderr


def test_a_rank_that_does_not_come_to_a_gathering_is_named(tmp_path: Path) -> None:
    code, stdout, stderr = run(3, tmp_path, late=1, at_step=1, seconds=600)
    assert code == ExitCode.COMMUNICATION, stderr
    assert stdout.count("<step 0 returned>") == 3
    assert stdout.count("<step 1 returned>") == 2  # the others went on, to the next forward
    assert "<step 2" not in stdout
    assert "did not come: rank 1\n" in stderr
    assert " parameters" in stderr


def test_a_rank_that_ends_after_its_last_step_leaves_no_other_waiting(tmp_path: Path) -> None:
    """Neither closes its session, and only one reads its parameters."""
    code, stdout, stderr = run(2, tmp_path, late=0, at_step=2, seconds=2)
    assert code == 0, stderr
    assert stdout.count("<step 2 returned>") == 2
    assert stdout.count("<sum ") == 1
