"""torch.distributed over hpctrain's communicators, on 1 to 4 ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hpctrain.errors import ExitCode
from tests.ranks_launcher import REPOSITORY, run_command

pytestmark = pytest.mark.launches

OPERATIONS = [sys.executable, "-m", "tests.ranks.distributed.operations_program"]
PIPELINE = [sys.executable, "-m", "tests.ranks.distributed.pipeline_program"]
TRAINING = [sys.executable, "-m", "tests.ranks.distributed.training_program"]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.thorough), 3])
def test_every_operation_has_its_result(num_ranks: int) -> None:
    done = run_command(num_ranks, OPERATIONS, expect=0, timeout_s=300)
    assert done.stdout.count("has seen everything") == num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_operation_has_its_result_in_pieces_as_between_hosts(num_ranks: int) -> None:
    nodes = {"HPCTRAIN_RANKS_PER_NODE": "2"} if num_ranks == 3 else {}
    done = run_command(num_ranks, [*OPERATIONS, "pieces"], expect=0, timeout_s=300, env=nodes)
    assert done.stdout.count("has seen everything") == num_ranks


def test_ranks_with_other_tensors_are_named() -> None:
    done = run_command(2, [*OPERATIONS, "mismatch"], timeout_s=300)
    assert done.returncode == ExitCode.COMMUNICATION, done.stderr
    assert "all_reduce (3 x float32) sum" in done.stderr


def test_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    done = run_command(3, [*OPERATIONS, "absent", str(tmp_path / "watch")], timeout_s=300)
    assert done.returncode == ExitCode.COMMUNICATION, done.stderr
    assert "all_reduce" in done.stderr
    assert re.search(r"rank 1 .*operations_program", done.stderr, re.DOTALL), done.stderr


def test_gloo_groups_that_ranks_name_differently_end_the_run_and_are_explained() -> None:
    done = run_command(2, [*OPERATIONS, "names"], timeout_s=300)
    assert done.returncode == ExitCode.COMMUNICATION, done.stderr
    assert "waited 8 s in torch.distributed's store" in done.stderr
    assert "use_local_synchronization=True" in done.stderr
    assert re.search(r"have waited: (rank 0: 3, rank 1: 2|rank [01]: [23])\. From", done.stderr), done.stderr


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.thorough), 4])
def test_models_train_as_in_one_process(num_ranks: int, tmp_path: Path) -> None:
    two_nodes = {"HPCTRAIN_RANKS_PER_NODE": "2"} if num_ranks == 4 else {}
    done = run_command(num_ranks, [*TRAINING, str(tmp_path)], expect=0, timeout_s=300, env=two_nodes)
    assert done.stdout.count("agrees") == num_ranks
    print(re.findall(r"^.*: \d.*$", done.stdout, re.MULTILINE))


def test_the_example_trains_and_goes_on_from_its_checkpoint_on_other_ranks(tmp_path: Path) -> None:
    script = [sys.executable, str(REPOSITORY / "examples" / "torch_distributed.py"), "--directory", "torch"]
    found = {}
    for parallel in ("ddp", "fsdp"):
        done = run_command(2, [*script, "--parallel", parallel, "--epochs", "1"], cwd=tmp_path, expect=0)
        found[parallel] = [float(loss) for _, loss in re.findall(r"epoch (\d) loss ([\d.]+)", done.stdout)]
        assert len(found[parallel]) == 1
    assert found["ddp"] == pytest.approx(found["fsdp"], rel=1e-3)
    done = run_command(3, [*script, "--parallel", "fsdp", "--epochs", "2"], cwd=tmp_path, expect=0)
    ((epoch, loss),) = re.findall(r"epoch (\d) loss ([\d.]+)", done.stdout)
    assert epoch == "1"
    assert float(loss) < found["fsdp"][0]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_pipeline_schedule_trains_as_one_process(num_ranks: int) -> None:
    done = run_command(num_ranks, PIPELINE, expect=0, timeout_s=300)
    assert done.stdout.count("losses and parameters agree") == 5
    # Lines of two ranks may come as one.
    assert len(re.findall(r"rank \d agrees", done.stdout)) == num_ranks


def test_the_example_of_a_pipeline_trains_as_one_rank() -> None:
    script = [sys.executable, str(REPOSITORY / "examples" / "torch_pipeline.py")]
    found = {}
    for num_ranks, schedule in ((1, "1f1b"), (2, "1f1b"), (2, "interleaved")):
        done = run_command(num_ranks, [*script, "--schedule", schedule], expect=0, timeout_s=300)
        found[num_ranks, schedule] = re.findall(r"^step \d+ loss ([\d.]+)", done.stdout, re.MULTILINE)
        assert len(found[num_ranks, schedule]) == 4
    assert found[2, "1f1b"] == found[2, "interleaved"] == found[1, "1f1b"]


def losses_of(script: str, num_ranks: int, *options: str) -> list[float]:
    """Returns the losses of an example's epochs, each rank with its share of a batch of 32."""
    command = [
        sys.executable,
        str(REPOSITORY / "examples" / script),
        "--batch",
        str(32 // num_ranks),
        *options,
    ]
    done = run_command(num_ranks, command, expect=0, timeout_s=300)
    found = re.findall(rf"epoch \d loss ([\d.]+) on {num_ranks} ranks", done.stdout)
    assert len(found) == 3, done.stdout + done.stderr
    return [float(loss) for loss in found]


def test_a_script_for_accelerate_trains_as_in_one_process() -> None:
    pytest.importorskip("accelerate")
    assert losses_of("torch_accelerate.py", 2) == pytest.approx(losses_of("torch_accelerate.py", 1), rel=1e-4)


def test_a_script_for_lightning_trains_as_in_one_process() -> None:
    pytest.importorskip("lightning")
    alone = losses_of("torch_lightning.py", 1)
    for strategy in ("ddp", "fsdp"):
        assert losses_of("torch_lightning.py", 2, "--strategy", strategy) == pytest.approx(alone, rel=1e-4)
