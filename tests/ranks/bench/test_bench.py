"""`hpctrain bench` with real ranks: documents, notes, errors, and that nothing is left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.bench.workplace import assert_nothing_left
from tests.ranks_launcher import run_command, start_command
from tests.states import wait_for

pytestmark = pytest.mark.launches

HPCTRAIN = [sys.executable, "-m", "hpctrain.cli.main"]


def allreduce(directory: Path, num_ranks: int | None, *options: str, **how: Any) -> tuple[Any, Any]:
    path = directory / "all.json"
    argv = [*HPCTRAIN, "bench", "allreduce", *options, "--repeats", "2", "--json", str(path)]
    result = run_command(num_ranks, argv, **how)
    return result, json.loads(path.read_text()) if path.exists() else None


def test_two_ranks_measure_what_can_run_and_name_what_cannot(tmp_path: Path) -> None:
    plot = tmp_path / "all.svg"
    can_plot = importlib.util.find_spec("matplotlib") is not None
    options = ["--backend", "mpi", "--sizes", "4KB,64KiB", "--wires", "fp32,int8", "--in-flight", "2"]
    options += ["--algorithms", "auto,flat,direct,hierarchical"]
    result, document = allreduce(
        tmp_path, 2, *options, *(["--plot", str(plot)] if can_plot else []),
        expect=0, env={"HPCTRAIN_RANKS_PER_NODE": "1"},
    )  # fmt: skip
    assert document["schema"] == "hpctrain.bench.allreduce/1"
    assert document["topology"] == "2 nodes x 1 rank (emulated)"
    assert document["backend"] == "mpi"
    assert document["machine"]["cores"] == os.cpu_count()
    assert document["versions"]["packages"]["torch"]
    assert len(document["environment"]["ranks"]) == 2
    assert document["settings"]["sizes_bytes"] == [4000, 65536]
    cells = {(c["algorithm"], c["wire"], c["bytes"]): c for c in document["cells"]}
    for size in (4000, 65536):
        assert len(cells["flat", "fp32", size]["samples_s"]) == 2
        assert cells["flat", "fp32", size]["relative_error"] < 1e-6
        assert cells["direct", "int8", size]["relative_error"] < 0.05
        assert (
            cells["direct", "int8", size]["sent_bytes_per_node"]
            >= cells["direct", "int8", size]["bound_bytes_per_node"]
        )
    auto = next(c for c in document["calibrations"] if c["wire"] == "fp32")
    assert auto["algorithm"] in {c["algorithm"] for c in auto["candidates"]}
    assert cells["auto", "fp32", 4000]["algorithm_run"] == auto["algorithm"]
    assert f"auto, fp32: {auto['algorithm']} (fp32); buckets of " in result.stdout
    assert ("flat", "int8", 4000) not in cells
    assert any("flat" in note and "int8" in note for note in document["notes"])
    for note in document["notes"]:
        assert note in result.stdout
    assert "busbw" in result.stdout
    assert "\x1b" not in result.stdout  # mpirun's terminal is not a person's
    if can_plot:
        assert b"</svg>" in plot.read_bytes()


def test_alone_it_is_one_rank_and_says_that_nothing_is_sent(tmp_path: Path) -> None:
    result, document = allreduce(tmp_path, None, "--sizes", "4KB", "--link-mbit", "measure", expect=0)
    assert {(c["algorithm"], c["busbw_bytes_per_s"]) for c in document["cells"]} <= {
        ("flat", 0.0),
        ("auto", 0.0),
    }
    assert document["link"] is None
    assert "one rank sends nothing" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--algorithms", "nccl-hierarchical,flat,nccl-torus"], "cannot be measured in one process"),
        (["--wires", "fp8"], "choose among auto, fp32, fp16"),
    ],
)
def test_what_cannot_be_is_refused_before_the_ranks_meet(
    tmp_path: Path, options: list[str], words: str
) -> None:
    result, document = allreduce(tmp_path, None, *options, expect=2)
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert document is None


def step_argv(place: Path, *options: str) -> list[str]:
    words = [*HPCTRAIN, "bench", "step", str(place / "recipe.toml"), "--scratch", str(place / "scratch")]
    return [*words, "--json", str(place / "steps.json"), *options]


def test_steps_are_measured_on_one_rank_and_two_and_leave_nothing(place: Path) -> None:
    options = ["--ranks", "1,2", "--steps", "4", "--warmup-steps", "2", "--repeats", "1"]
    # From elsewhere: the task is found beside the recipe, the data where the user is.
    result = run_command(None, step_argv(place, *options), cwd=place, timeout_s=300, expect=0)
    document = json.loads((place / "steps.json").read_text())
    assert document["schema"] == "hpctrain.bench.step/1"
    rows = {(row["mode"], row["ranks"]): row for row in document["rows"]}
    assert {key: row["global_batch"] for key, row in rows.items()} == {
        ("strong", 1): 32, ("strong", 2): 32, ("weak", 1): 32, ("weak", 2): 64,
    }  # fmt: skip
    for run in document["runs"]:
        assert len(run["step_s"]) == 4
        assert run["samples"] == [run["global_batch"]] * 4
        assert (
            run["environment"]["topology"]
            == f"1 node x {run['num_ranks']} rank{'s' * (run['num_ranks'] > 1)}"
        )
        assert run["samples_per_s"] == pytest.approx(sum(run["samples"]) / sum(run["step_s"]))
    assert rows["strong", 1]["efficiency"] == 1
    assert rows["weak", 2]["exposed_s"]["median"] > 0
    assert document["recipe"]["run"]["directory"] == "runs/digits"
    assert "run 3/3" in result.stderr
    assert "efficiency relative to 1 rank" in result.stdout
    assert_nothing_left(place)


@pytest.mark.thorough  # test_scaling.py
def test_a_run_that_fails_is_shown_with_its_last_lines_and_its_code(place: Path) -> None:
    result = run_command(None, step_argv(place, "--ranks", "2"), cwd=place, env={"MINE": "fail"}, expect=2)
    assert "the run on 2 ranks with a global batch of" in result.stderr
    assert "ended with exit code 2" in result.stderr
    assert "the model is out of order" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (place / "steps.json").exists()
    assert_nothing_left(place)


@pytest.mark.thorough  # test_scaling.py
def test_ctrl_c_ends_all_ranks_and_leaves_nothing(place: Path) -> None:
    argv = step_argv(place, "--ranks", "2", "--steps", "1000")
    with start_command(None, argv, cwd=place, env={"MINE": "slow"}) as launched:
        wait_for(lambda: list((place / "scratch").glob("*/*/run/metrics/*")), launched=launched)
        launched.process.send_signal(signal.SIGINT)
        result = launched.wait(timeout_s=300)
        assert result.returncode == 130, result.stderr
        assert "stopped; the ranks have ended" in result.stderr
        assert launched.processes() == {}
    assert_nothing_left(place)
