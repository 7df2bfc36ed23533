"""The schedule adasum on real ranks: equal to its definition in sessions, resumed to the bit in recipes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.ranks.reduce import adasum_cases
from tests.ranks_launcher import run_command, run_ranks
from tests.run_files import losses_of

pytestmark = pytest.mark.launches
RECIPE = """
[run]
name = "adasum"
directory = "run"
steps = 8
deterministic = true
[task]
target = "hpctrain.tasks.digits:Digits"
[data]
train = "data/train"
global_batch = 30
[optimizer]
name = "sgd"
lr = 0.1
clip_norm = 1.0
[reduction.schedule]
method = "adasum"
within_node = "mean"
[checkpoint]
every_steps = 4
"""


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_a_session_trains_as_the_definition_says(num_ranks: int) -> None:
    outputs = run_ranks(num_ranks, adasum_cases.trainings).outputs
    for name, found in outputs[0].items():
        assert found["error"] < 1e-12, name
        assert all(output[name]["parameters"] == found["parameters"] for output in outputs), name
    if num_ranks == 4:  # the ways differ, so that the comparison could have failed
        assert outputs[0]["adasum"]["parameters"] != outputs[0]["mean"]["parameters"]


def test_a_resumed_recipe_has_the_losses_of_one_that_was_never_stopped(
    tmp_path: Path, packed_digits: Path
) -> None:
    (tmp_path / "data").symlink_to(packed_digits)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    hpctrain = str(Path(sys.executable).with_name("hpctrain"))

    def train(*options: str) -> dict[int, float]:
        run_command(
            3,
            [hpctrain, "train", "recipe.toml", *options],
            cwd=tmp_path,
            expect=0,
            env={"HPCTRAIN_RANKS_PER_NODE": "2"},
        )
        return losses_of(tmp_path / "run")

    whole = train()
    train("--resume", "never", "--set", "run.steps=4")
    assert train() == whole
    assert len(whole) == 8
