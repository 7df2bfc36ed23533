"""Recipes: what is read, what is refused and in which words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import ExitCode, RecipeError
from hpctrain.run.recipe.load import load_recipe, parse_recipe, to_toml
from tests.ranks_launcher import REPOSITORY


def minimal(**sections: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "run": {"directory": "runs/x", "epochs": 2},
        "task": {"target": "tasks:Task"},
        "data": {"train": "data/x", "global_batch": 8},
    }
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values}
    return document


def test_a_minimal_recipe_is_filled_with_defaults() -> None:
    recipe = parse_recipe(minimal())
    assert recipe.run.backend == "auto"
    assert recipe.checkpoint.keep == 3


@pytest.mark.parametrize("path", sorted((REPOSITORY / "examples").rglob("*.toml")), ids=lambda p: p.name)
def test_example_recipes_are_valid_and_survive_being_written(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    (tmp_path / "again.toml").write_text(to_toml(recipe))
    assert load_recipe(tmp_path / "again.toml") == recipe


def test_written_toml_keeps_odd_strings_and_nested_options(tmp_path: Path) -> None:
    options = {
        "text": 'quote " back \\ line\nend \x7f é',
        "nested": {"a b": [1, 2.5, True, "x"]},
        "empty": {},
    }
    recipe = parse_recipe(minimal(task={"options": options}))
    (tmp_path / "r.toml").write_text(to_toml(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "r.toml").task.options == options


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (minimal(optimizer={"lrr": 0.1}), "optimizer.lrr: there is no such key; did you mean lr?"),
        ({**minimal(), "optimiser": {}}, "optimiser: there is no such key; did you mean optimizer?"),
        (minimal(run={"zzz": 1}), "run.zzz: there is no such key; valid here: directory, name"),
        (
            minimal(data={"global_batch": "64"}),
            'data.global_batch: found "64": input should be a valid integer',
        ),
        (
            minimal(data={"global_batch": 0}),
            "data.global_batch: found 0: input should be greater than or equal to 1",
        ),
        (minimal(optimizer={"lr": float("nan")}), "optimizer.lr"),
        (
            minimal(reduction={"wire": "fp8"}),
            "reduction.wire: found \"fp8\": input should be 'auto', 'fp32', 'fp16', 'bf16'",
        ),
        (minimal(run={"steps": 3}), "set either epochs or steps, and only one of them"),
        (minimal(optimizer={"lr_scaling": "linear"}), "needs reference_batch"),
        (minimal(optimizer={"schedule": "step"}), "needs step_every"),
        (minimal(optimizer={"name": "adam", "momentum": 0.9}), "momentum applies only to sgd"),
        (minimal(run={"ranks": 16}), "data.global_batch = 8 cannot be split over run.ranks = 16"),
        ({"run": {"directory": "x", "epochs": 1}, "task": {"target": "a:b"}}, "data: missing"),
        (minimal(task={"target": "no colon"}), "task.target"),
        (minimal(stop={"signals": ["SIGKILL"]}), "found \"SIGKILL\": input should be 'SIGTERM', 'SIGUSR1'"),
        (minimal(stop={"signals": []}), "stop.signals: found []"),
        (minimal(stop={"signals": ["SIGHUP", "SIGHUP"]}), "names SIGHUP, SIGHUP: each signal once"),
        (minimal(stop={"signals": ["SIGUSR2"]}), "SIGUSR2 is checkpoint.signal and one of stop.signals"),
    ],
)
def test_a_faulty_recipe_is_refused_in_plain_words(document: dict[str, Any], expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(document)
    assert expected in str(caught.value)
    assert caught.value.exit_code == ExitCode.USAGE


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(minimal(run={"seed": -1}, data={"global_batch": "x"}, optimizer={"lrr": 1}))
    assert {"run.seed", "data.global_batch", "optimizer.lrr"} <= {
        line.strip().split(":")[0] for line in str(caught.value).splitlines()
    }


def test_overrides_take_toml_values_and_bare_words(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(to_toml(parse_recipe(minimal())))
    recipe = load_recipe(
        path, overrides=["optimizer.lr=0.5", "run.name=second", "task.options.width=3", "data.shuffle=false"]
    )
    assert (recipe.optimizer.lr, recipe.run.name, recipe.task.options, recipe.data.shuffle) == (
        0.5,
        "second",
        {"width": 3},
        False,
    )


@pytest.mark.parametrize("override", ["lr=3", "optimizer.lr", "optimizer..lr=3", "run.seed.x=1"])
def test_an_override_that_cannot_be_applied_is_refused(tmp_path: Path, override: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(to_toml(parse_recipe(minimal())))
    with pytest.raises(RecipeError, match="--set"):
        load_recipe(path, overrides=[override])


def test_a_recipe_that_is_no_toml_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[run\n")
    with pytest.raises(RecipeError, match="is not TOML"):
        load_recipe(tmp_path / "bad.toml")
    with pytest.raises(RecipeError, match="cannot be read: No such file"):
        load_recipe(tmp_path / "none.toml")


def test_the_recipe_reference_is_what_the_code_says() -> None:
    script = REPOSITORY / "scripts" / "write_recipe_reference.py"
    done = subprocess.run(
        [sys.executable, str(script), str(REPOSITORY / "docs" / "recipe.md"), "--check"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"parallel": {"micro_batches": 4}}, "set pipeline to 2 or more"),
        ({"parallel": {"pipeline": 4, "micro_batches": 2}}, "needs at least 4 micro-batches"),
        (
            {"parallel": {"pipeline": 2, "micro_batches": 4, "shard": "gradients"}},
            "would save no memory over 'optimizer'",
        ),
        (
            {"parallel": {"pipeline": 2, "tensor": 2, "micro_batches": 4, "shard": "optimizer"}},
            "tensor = 2 cannot be combined with shard = 'optimizer'",
        ),
        (
            {
                "parallel": {
                    "pipeline": 2, "micro_batches": 4, "schedule": "zero-bubble",
                    "activation_checkpointing": "selective",
                }
            },
            "= 'selective': use another schedule",
        ),
        ({"data": {"micro_batches": 2}}, "set parallel.micro_batches instead"),
        ({"data": {"on_damage": "skip", "check": "always"}}, "on_damage = 'skip' cannot be combined"),
        ({"reduction": {"wire": "fp16"}}, r"reduction.wire: with parallel.pipeline = 2 .* leave the section"),
        ({"run": {"ranks": 3}}, "parallel.pipeline = 2 does not divide run.ranks = 3"),
        (
            {"parallel": {"pipeline": 2, "tensor": 2, "micro_batches": 4}, "run": {"ranks": 6}},
            "needs a multiple of 4 ranks, run.ranks is 6",
        ),
        ({"optimizer": {"name": "lamb"}}, "use adamw, adam or sgd"),
    ],
)  # fmt: skip
def test_what_a_pipeline_cannot_be_combined_with_is_refused(
    sections: dict[str, dict[str, Any]], says: str
) -> None:
    document = minimal(**{"parallel": {"pipeline": 2, "micro_batches": 4}, **sections})
    with pytest.raises(RecipeError, match=says):
        parse_recipe(document)


def test_a_recipe_with_a_pipeline_survives_being_written(tmp_path: Path) -> None:
    split = {"pipeline": 2, "micro_batches": 4, "tensor": 2, "shard": "parameters"}
    recipe = parse_recipe(minimal(parallel=split))
    (tmp_path / "again.toml").write_text(to_toml(recipe))
    assert load_recipe(tmp_path / "again.toml") == recipe
