"""`run.compile`: the same training, compiled once per node, and refused where it cannot work."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from hpctrain.data import pack_arrays
from hpctrain.errors import ExitCode
from tests.ranks.train import compiled_cases
from tests.ranks_launcher import RanksResult, run_command, run_ranks

pytestmark = [pytest.mark.launches]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("compiled")
    images, labels = load_digits(return_X_y=True)
    pack_arrays(
        where / "data",
        {
            "image": images[:1438].reshape(-1, 1, 8, 8).astype(np.float32),
            "label": labels[:1438].astype(np.int64),
            "id": np.arange(1438),
        },
    )
    return where


@pytest.fixture(scope="module", params=[1, 2])
def launch(request: pytest.FixtureRequest, directory: Path) -> RanksResult:
    return run_ranks(request.param, compiled_cases.everything, str(directory), timeout_s=850)


def test_a_compiled_run_trains_as_an_eager_one(launch: RanksResult) -> None:
    for output in launch.outputs:
        eager, compiled = output["eager"], output["compiled"]
        assert compiled["names"] == eager["names"]
        assert len(compiled["losses"]) == compiled_cases.STEPS
        # Each operation rounds once; 33 steps of AdamW let that grow.
        np.testing.assert_allclose(compiled["losses"], eager["losses"], rtol=1e-4)
        np.testing.assert_allclose(compiled["parameters"], eager["parameters"], rtol=1e-2, atol=1e-4)
        # The batch from which the code was made has not changed the running statistics.
        np.testing.assert_allclose(compiled["means"], eager["means"], rtol=1e-2, atol=1e-4)
        assert compiled["losses"] != eager["losses"]  # otherwise nothing was compiled


def test_a_resumed_compiled_run_has_the_bits_of_one_without_interruption(launch: RanksResult) -> None:
    for output in launch.outputs:
        assert output["resumed"]["losses"] == output["whole"]["losses"]
        assert output["resumed"]["fingerprint"] == output["whole"]["fingerprint"]


def test_an_eager_run_continues_from_a_checkpoint_of_a_compiled_one(launch: RanksResult) -> None:
    for output in launch.outputs:
        found = output["then eager"]["losses"]
        assert len(found) == compiled_cases.STEPS
        np.testing.assert_allclose(found, output["eager"]["losses"], rtol=1e-4)


def test_it_is_compiled_once_per_node_and_said(launch: RanksResult) -> None:
    assert "compiled the model, its blocks one by one, on the first rank of each node in" in launch.stdout


def test_copies_of_a_compiled_model_are_their_own(launch: RanksResult) -> None:
    for output in launch.outputs:
        assert output.get("copies") in (None, {"copy": True, "pickle": True})


def test_sharded_optimizers_train_compiled_models(launch: RanksResult) -> None:
    for output in launch.outputs:
        for shard in {"optimizer", "gradients"} & set(output):
            np.testing.assert_allclose(output[shard]["losses"], output["eager"]["losses"], rtol=1e-4)


def test_a_bucket_is_sent_while_backward_continues(launch: RanksResult) -> None:
    for output in launch.outputs:
        if "order" in output:
            events = output["order"]
            assert events.index("bucket 0") < events.index("first block") < len(events) - 1, events


def test_ranks_do_not_wait_for_ever_for_the_first_one(directory: Path) -> None:
    found = run_ranks(2, compiled_cases.hang, str(directory), timeout_s=300, expect=None)
    assert found.returncode == ExitCode.COMMUNICATION
    assert "rank 0" in found.stderr
    assert "run.compile: the first rank of each node compiles the model" in found.stderr
    assert "30 s" in found.stderr


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_without_a_compiler_it_is_refused_before_training(
    packed_digits: Path, tmp_path: Path, num_ranks: int
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[run]\ndirectory = "{tmp_path / "run"}"\nsteps = 2\ncompile = true\n'
        '[task]\ntarget = "hpctrain.tasks.digits:Digits"\n'
        f'[data]\ntrain = "{packed_digits / "train"}"\nglobal_batch = 8\n'
    )
    command = [sys.executable, "-m", "hpctrain.cli.main", "train", str(recipe)]
    found = run_command(
        num_ranks, command, cwd=tmp_path, env={"CXX": "/missing/c++"}, expect=int(ExitCode.LAUNCH)
    )
    assert "run.compile = true needs a C++ compiler on every node" in found.stderr
    assert "CXX = /missing/c++" in found.stderr
    assert "leave run.compile out" in found.stderr
    assert not (tmp_path / "run").exists()


def test_a_compiler_that_fails_is_reported_before_training(packed_digits: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[run]\ndirectory = "{tmp_path / "run"}"\nsteps = 2\ncompile = true\n'
        '[task]\ntarget = "hpctrain.tasks.digits:Digits"\n'
        f'[data]\ntrain = "{packed_digits / "train"}"\nglobal_batch = 8\n'
    )
    command = [sys.executable, "-m", "hpctrain.cli.main", "train", str(recipe)]
    environment = {"CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    found = run_command(None, command, cwd=tmp_path, env=environment, expect=int(ExitCode.USAGE))
    assert "torch.compile cannot compile the model of hpctrain.tasks.digits:Digits" in found.stderr
    assert "step 1/2" not in found.stdout
