"""`hpctrain plan`: its table, its document, its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import ExitCode
from tests.fsdp2 import needs_fsdp2
from tests.ranks_launcher import REPOSITORY, rank_environment

EXAMPLES = REPOSITORY / "examples"


def plan(*words: str, cwd: Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain.cli.main", "plan", *words],
        cwd=cwd, env=rank_environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == expect, done.stderr
    return done


def document(*words: str, cwd: Path, expect: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(*words, "--json", cwd=cwd, expect=expect).stdout)
    return found


@pytest.fixture
def digits(packed_digits: Path, tmp_path: Path) -> Path:
    """A directory in which the data of `examples/digits.toml` are."""
    (tmp_path / "data").mkdir()
    os.symlink(packed_digits, tmp_path / "data" / "digits")
    return tmp_path


def test_digits_are_planned_with_activations(digits: Path) -> None:
    needs_fsdp2()
    recipe = str(EXAMPLES / "digits.toml")
    done = plan(recipe, "--ranks", "4", "--memory", "1GB", cwd=digits)
    assert "151,306 parameters, batches of 64 samples, on 1 node x 4 ranks" in done.stdout
    assert "It fits as it is" in done.stdout
    assert "note:" not in done.stdout
    # The model has no repeated blocks, which is why ways are refused, for one reason.
    assert done.stdout.count("refused: activation checkpointing works on repeated blocks") == 1
    shown = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("│")]
    assert shown == ["none", "optimizer", "gradients", "parameters"]
    found = document(recipe, "--ranks", "4", "--memory", "1GB", cwd=digits)
    whole = found["ways"][0]
    assert whole["bytes"]["parameters"] == 4 * 151_306
    assert whole["bytes"]["activations"] > 16 * 4 * (32 + 64) * 64
    assert whole["fits"]
    assert whole["micro_batches"] == 1
    assert {way["way"] for way in found["ways"]} >= {
        "optimizer",
        "gradients, blocks",
        "parameters, selective",
    }
    assert found["chosen"] == {"way": "none", "micro_batches": 1, "recipe": [], "without_reduction": False}


def test_characters_are_planned_without_their_data(tmp_path: Path) -> None:
    needs_fsdp2()
    recipe = str(EXAMPLES / "characters.toml")
    wide = ["--set", "task.options={ window = 128, width = 512, layers = 24, heads = 4 }"]
    asked = [recipe, "--ranks", "8", "--ranks-per-node", "4", *wide, "--set", "data.prefetch_mb=1"]
    found = document(*asked, "--memory", "400MB", cwd=tmp_path)
    assert "no training data can be read" in found["notes"][0]
    assert found["chosen"]["way"] == "parameters within node"
    assert found["chosen"]["recipe"] == ["[parallel]", 'shard = "parameters"', 'shard_within = "node"']
    assert found["chosen"]["without_reduction"]
    elements = found["parameters"]
    by_name = {way["way"]: way for way in found["ways"]}
    sizes = {name: way["bytes"] for name, way in by_name.items() if "bytes" in way}
    assert sizes["parameters"]["optimizer"] == pytest.approx(8 * elements / 8, rel=0.01)
    assert sizes["parameters within node"]["optimizer"] == pytest.approx(8 * elements / 4, rel=0.01)
    assert sizes["gradients"]["optimizer"] == pytest.approx(8 * elements / 8, rel=0.01)
    # Almost all of the model is in split layers, and in blocks that are divided over the stages.
    assert sizes["none, tensor 4"]["optimizer"] == pytest.approx(8 * elements / 4, rel=0.1)
    assert sizes["pipeline 4 1f1b"]["optimizer"] == pytest.approx(8 * elements / 4, rel=0.1)
    assert by_name["pipeline 4 1f1b"]["waiting"] == pytest.approx(
        3 / (by_name["pipeline 4 1f1b"]["micro_batches"] + 3)
    )
    assert sizes["none"]["activations"] is None
    text = plan(*asked, "--memory", "400MB", cwd=tmp_path).stdout
    assert "Leave the section [reduction] out" in text
    assert '[parallel]\nshard = "parameters"\nshard_within = "node"' in text
    assert "pipeline 4 zero-bubble" not in text
    assert "pipeline 4 zero-bubble" in plan(*asked, "--all", cwd=tmp_path).stdout


def test_the_recipes_own_pipeline_of_split_layers_is_marked_and_recommended_as_it_is(tmp_path: Path) -> None:
    recipe = str(EXAMPLES / "characters_pipeline.toml")
    wide = ["--set", "task.options={ window = 128, width = 512, layers = 24, heads = 4 }"]
    asked = [recipe, "--ranks", "8", *wide, "--set", "parallel.tensor=2", "--set", "data.prefetch_mb=1"]
    text = plan(*asked, "--memory", "79.2GiB", cwd=tmp_path).stdout
    assert "│ pipeline 2 1f1b, tensor 2 *" in text
    assert "Recommended, the first that fits: none. Leave the section [parallel] out." in text
    assert "As the recipe is now, pipeline 2 1f1b, tensor 2, it fits too." in text
    needs_fsdp2()
    sharded = [*asked, "--set", "parallel.shard=parameters"]
    assert "│ pipeline 2 1f1b, parameters, tensor 2 *" in plan(*sharded, cwd=tmp_path).stdout
    found = document(*sharded, cwd=tmp_path)
    sizes = {way["way"]: way["bytes"] for way in found["ways"] if "bytes" in way}
    elements = found["parameters"]
    # Almost all of the model is in split layers of blocks, which are divided over the stages.
    assert sizes["pipeline 2 1f1b, tensor 2"]["optimizer"] == pytest.approx(8 * elements / 4, rel=0.1)
    assert sizes["pipeline 2 1f1b, parameters, tensor 2"]["optimizer"] == pytest.approx(
        8 * elements / 8, rel=0.1
    )
    assert sizes["pipeline 2 1f1b, parameters"]["optimizer"] == pytest.approx(8 * elements / 8, rel=0.1)


def test_a_recipe_that_is_split_fits_as_it_is(tmp_path: Path) -> None:
    recipe, keys = str(EXAMPLES / "characters.toml"), ["parallel.shard=gradients", "data.prefetch_mb=1"]
    wide = ["--set", "task.options={ window = 128, width = 512, layers = 24, heads = 4 }"]
    asked = [recipe, "--ranks", "8", *wide, *(word for key in keys for word in ("--set", key))]
    ways = {way["way"]: way for way in document(*asked, cwd=tmp_path)["ways"]}
    enough = ways["gradients"]["bytes"]["total"]
    text = plan(*asked, "--memory", str(enough), cwd=tmp_path).stdout
    assert text.rstrip().endswith("It fits as it is.")


def test_where_nothing_fits_the_code_is_that_of_a_run_out_of_memory(tmp_path: Path) -> None:
    recipe = str(EXAMPLES / "characters.toml")
    done = plan(recipe, "--ranks", "2", "--memory", "1MB", cwd=tmp_path, expect=int(ExitCode.OUT_OF_MEMORY))
    assert "Nothing fits into 1 MB" in done.stdout
    assert "--memory" in plan(recipe, "--ranks", "2", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits.toml", "--ranks", "100"], "cannot be split over run.ranks = 100"),
        (["characters.toml", "--ranks", "100000"], "cannot be split over run.ranks = 100000"),
        (["characters.toml", "--ranks", "2", "--memory", "much"], "'much' is no size"),
        (["characters.toml", "--ranks", "2", "--memory", "0.4B"], "whole number of bytes"),
        (["characters.toml", "--ranks", "2", "--set", "task.target=nowhere:Task"], "cannot be imported"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    done = plan(str(EXAMPLES / words[0]), *words[1:], cwd=tmp_path, expect=int(ExitCode.USAGE))
    assert message in done.stderr
    assert "Traceback" not in done.stderr
