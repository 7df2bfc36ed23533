"""`hpctrain bench scaling` with real ranks: a sweep that is interrupted and resumed, weak scaling, a failing run."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from hpctrain.launch import core_share, read_cores
from tests.ranks.bench.test_bench import HPCTRAIN
from tests.ranks.bench.workplace import assert_nothing_left
from tests.ranks_launcher import run_command, start_command
from tests.states import wait_for

pytestmark = pytest.mark.launches

# Of each core the first hardware thread: a split is one of cores.
CORES = sorted(read_cores().cores)
TINY = ["--ranks", "1,2", "--steps", "4", "--warmup-steps", "2"]


def argv(place: Path, *options: str) -> list[str]:
    words = [*HPCTRAIN, "bench", "scaling", str(place / "recipe.toml"), "--scratch", str(place / "scratch")]
    return [*words, "--json", str(place / "scaling.json"), *TINY, *options]


def document(place: Path) -> Any:
    return json.loads((place / "scaling.json").read_text())


def test_a_sweep_is_interrupted_refuses_other_data_and_is_resumed(place: Path) -> None:
    with start_command(None, argv(place), cwd=place) as launched:
        wait_for((place / "scaling.json").exists, launched=launched)
        os.kill(launched.process.pid, signal.SIGINT)
        stopped = launched.wait(timeout_s=300)
    assert stopped.returncode == 75, stopped.stderr
    assert "the same command with --resume continues" in stopped.stderr
    assert_nothing_left(place)
    begun = document(place)
    assert not begun["complete"]
    assert 1 <= len(begun["runs"]) < 10

    again = run_command(None, argv(place), cwd=place, expect=2)
    assert "continue it with --resume, or remove it" in again.stderr

    # As if the dataset had been replaced meanwhile: the samples of the next run are others.
    changed, path = document(place), place / "changed.json"
    for run in changed["runs"]:
        run["sample_sums"] = [f"{int(value, 16) ^ 1:016x}" for value in run["sample_sums"]]
    path.write_text(json.dumps(changed))
    refused = run_command(None, argv(place, "--resume", "--json", str(path)), cwd=place, expect=3)
    assert "did not train on the same samples" in refused.stderr
    assert "measured step 1" in refused.stderr
    assert len(json.loads(path.read_text())["runs"]) == len(begun["runs"])

    done = run_command(None, argv(place, "--resume", "--at-most", "1"), cwd=place, timeout_s=300, expect=0)
    found = document(place)
    assert found["runs"][: len(begun["runs"])] == begun["runs"]
    assert found["time"] == begun["time"]
    assert len(found["runs"]) - len(begun["runs"]) in (1, 2)
    assert f"run {len(found['runs'])}/{len(found['runs'])}" in done.stderr
    assert_nothing_left(place)


@pytest.mark.thorough  # tests/cluster/test_scaling.py
def test_a_whole_sweep_is_compared_and_exported(place: Path) -> None:
    done = run_command(None, argv(place), cwd=place, timeout_s=300, expect=0)
    found = document(place)
    assert found["complete"]
    assert {(run["round"], run["ranks"]) for run in found["runs"]} == {
        (r, n) for r in range(5) for n in (1, 2)
    }
    for run in found["runs"]:
        assert (len(run["step_s"]), run["samples"], run["global_batch"]) == (4, 128, 32)
        assert [rank["samples"] for rank in run["by_rank"]] == [128 // run["ranks"]] * run["ranks"]
        for rank in run["by_rank"]:
            parts = sum(rank["seconds"][name] for name in ("input", "compute", "exposed_sync", "checkpoint"))
            assert 0 < parts <= 1.01 * rank["seconds"]["step"]
    # The same samples, step by step, on one rank and on two, in all ten runs; not the same in every step.
    sums = {tuple(run["sample_sums"]) for run in found["runs"]}
    assert len(sums) == 1
    assert len(set(sums.pop())) == 4
    assert found["samples"]["runs"] == 10
    assert [run["environment"] is not None for run in found["runs"]].count(True) == 2
    one, two = found["sizes"]
    assert one["efficiency"]["value"] == 1
    assert two["efficiency"]["low"] < two["efficiency"]["value"] < two["efficiency"]["high"]
    assert two["efficiency"]["count"] == 5
    assert two["seconds"]["exposed_sync"] > 0
    assert {law["law"] for law in found["fits"]["laws"]} == {"linear", "Amdahl"}
    assert "run 10/10" in done.stderr
    assert "relative to 1 rank" in done.stdout
    assert "every run had the same samples in each step" in done.stdout
    assert_nothing_left(place)

    words = [*HPCTRAIN, "bench"]
    measured = str(place / "scaling.json")
    compared = run_command(None, [*words, "compare", measured, measured], cwd=place, expect=0)
    assert "nothing fell by more than its noise" in compared.stdout
    exported = run_command(None, [*words, "export", "extrap", measured], cwd=place, expect=0)
    assert {json.loads(line)["params"]["p"] for line in exported.stdout.splitlines()} == {1, 2}


def test_rounds_are_measured_in_turns_and_a_failing_run_keeps_what_there_is(place: Path) -> None:
    options = ["--weak", "--at-most", "1"]
    run_command(None, argv(place, *options), cwd=place, timeout_s=300, expect=0)
    first = document(place)
    assert [run["round"] for run in first["runs"]] == [0, 0]
    assert {(run["ranks"], run["global_batch"], run["samples"]) for run in first["runs"]} == {
        (1, 32, 128), (2, 64, 256),
    }  # fmt: skip
    assert not first["complete"]
    failed = run_command(None, argv(place, *options, "--resume"), cwd=place, env={"MINE": "fail"}, expect=2)
    assert "the model is out of order" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert document(place) == first
    run_command(None, argv(place, *options, "--resume"), cwd=place, timeout_s=300, expect=0)
    assert [run["round"] for run in document(place)["runs"]] == [0, 0, 1, 1]
    assert_nothing_left(place)


@pytest.mark.skipif(shutil.which("taskset") is None, reason="no taskset")
@pytest.mark.skipif(core_share([read_cores()], 0) < 2, reason="one core cannot be split")
def test_splits_of_the_cores_run_with_the_threads_that_launch_gives(place: Path) -> None:
    """One round on two cores, whatever the caller's OMP_NUM_THREADS; then a round in which a split fails."""
    words = ["taskset", "-c", f"{CORES[0]},{CORES[1]}"]
    words += argv(place, "--split-cores", "--at-most", "1", "--resume", "--report", "report.html")
    done = run_command(None, words, cwd=place, timeout_s=300, expect=0)
    found = document(place)
    assert found["settings"]["cores"] == 2
    threads = {
        run["ranks"]: [rank["threads"] for rank in run["environment"]["ranks"]] for run in found["runs"]
    }
    assert threads == {1: [2], 2: [1, 1]}
    given = {run["ranks"]: run["environment"]["variables"]["OMP_NUM_THREADS"] for run in found["runs"]}
    assert given == {1: "2", 2: "1"}
    assert {(run["global_batch"], tuple(run["sample_sums"])) for run in found["runs"]} == {
        (32, tuple(found["runs"][0]["sample_sums"])),
    }  # fmt: skip
    assert found["splits"]["text"] in done.stdout.replace("\n", " ")
    assert "1 rank x 2 threads or 2 ranks x 1 thread trains this model faster" in found["splits"]["text"]
    assert "digits: ranks or threads on 2 cores</h1>" in (place / "report.html").read_text()

    failed = run_command(None, words, cwd=place, env={"MINE": "fail with 1 thread"}, timeout_s=300, expect=2)
    assert "2 ranks x 1 thread is not measured further" in failed.stderr
    assert "the model is out of order" in failed.stderr
    assert "2 ranks x 1 thread failed with exit code 2 and was not compared." in failed.stdout
    assert [run["ranks"] for run in document(place)["runs"][2:]] == [1]
    assert_nothing_left(place)


@pytest.mark.thorough  # by given times: tests/unit/bench/test_compare.py
def test_two_real_measurements_in_turns_tell_a_slower_task(place: Path) -> None:
    """The slower one sleeps in every step. Five rounds in turns can just show it: p = 1/32."""
    paths = {name: place / f"{name}.json" for name in ("fast", "slow")}
    for _ in range(5):
        for name, path in paths.items():
            options = ["--ranks", "1", "--steps", "2", "--at-most", "1", "--resume", "--json", str(path)]
            run_command(None, argv(place, *options), cwd=place, env={"MINE": name}, timeout_s=300, expect=0)
    words = [*HPCTRAIN, "bench", "compare"]
    fell = run_command(None, [*words, *map(str, paths.values()), "--json"], cwd=place, expect=1)
    found = json.loads(fell.stdout)
    assert found["paired"]
    assert found["fell"] == ["1 rank, batch 32, strong"]
    assert found["figures"][0]["p_fell"] == 1 / 32
    back = run_command(None, [*words, *map(str, reversed(paths.values()))], cwd=place, expect=0)
    assert "rose" in back.stdout


@pytest.mark.thorough  # what is exported: tests/unit/bench/test_export.py
@pytest.mark.skipif(shutil.which("reframe") is None, reason="no reframe here")
def test_reframe_runs_the_exported_check(place: Path) -> None:
    words = [*HPCTRAIN, "bench", "export", "reframe", "recipe.toml", "--ranks", "2"]
    words += ["--steps", "2", "--warmup-steps", "1", "-o", "check.py"]
    run_command(None, words, cwd=place, expect=0)
    # ReFrame keeps what it is told of; its own files stay in this folder.
    reframe = ["reframe", "--prefix", str(place / "reframe"), "-c", "check.py", "-r", "--performance-report"]
    done = run_command(None, reframe, cwd=place, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ran 1/1 test case(s)" in done.stdout
    (measured,) = (place / "reframe" / "output").rglob("scaling.json")
    rate = json.loads(measured.read_text())["sizes"][0]["samples_per_s"]["median"]
    assert f"{rate:.4f}"[:6] in done.stdout


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("jube") is None, reason="no jube here")
def test_jube_runs_the_exported_file(place: Path) -> None:
    words = [*HPCTRAIN, "bench", "export", "jube", "recipe.toml", "--ranks", "2"]
    words += ["--steps", "2", "--warmup-steps", "1", "-o", "scaling.xml"]
    run_command(None, words, cwd=place, expect=0)
    done = run_command(None, ["jube", "run", "-r", "scaling.xml"], cwd=place, timeout_s=300, expect=0)
    assert "samples/s" in done.stdout
    (measured,) = place.glob("hpctrain-scaling/*/*_measure/work/scaling.json")
    rate = json.loads(measured.read_text())["sizes"][0]["samples_per_s"]["median"]
    assert f"{rate:.6g}"[:6] in done.stdout
