"""Saves on storage that fails under them: dead mounts, killed ranks, errors, power failures. A filesystem of our
own (FUSE) stands between the ranks and the storage, one for each of two nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint import load_newest_good
from hpctrain.comm.backends.serial_world import SerialWorld
from tests.faults.checkpoint import cases as cases
from tests.faults.checkpoint.mounts import why_not
from tests.ranks_launcher import run_ranks

REPOSITORY = Path(__file__).parents[3]
# Of each long trial, so many; `HPCTRAIN_TRIALS=300` for a thorough run.
TRIALS = int(os.environ.get("HPCTRAIN_TRIALS", "12"))
THOROUGH = TRIALS >= 100
# .ci/run sets it to `required` where filesystems can be mounted: then a skipped test is an error.
VARIABLE = "HPCTRAIN_CLUSTER"

pytestmark = pytest.mark.timeout(1800 if THOROUGH else 900)

COUNTS = {
    "killed-at-random": TRIALS,
    "killed-at-each-operation": 10_000 if TRIALS >= 300 else TRIALS * 2 // 3,  # all of them, or so many
    "failing-operations": 1000 if THOROUGH else 3,
    "vanishing-directory": 1000 if THOROUGH else 2,
    "failing-reads": 1000 if THOROUGH else 1,
    "short-writes": 0,
    "power-loss": 20 if THOROUGH else 1,
}


@pytest.fixture(scope="module")
def can_mount() -> None:
    reason = why_not()
    if reason is not None and os.environ.get(VARIABLE) == "required":
        pytest.fail(f"{VARIABLE}=required, and no filesystem can be mounted: {reason}")
    if reason is not None:
        pytest.skip(f"no faulty filesystem: {reason}")


@pytest.fixture(scope="module")
def results(can_mount: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All trials are run by one process: a start of torch for each would take longer than they do."""
    directory = str(tmp_path_factory.mktemp("trials"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.checkpoint.mount_trials", directory, json.dumps(COUNTS)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1700 if THOROUGH else 800,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout)
    for result in found.values():
        result["stderr"] = done.stderr
    return found


def result_of(results: dict[str, Any], name: str) -> dict[str, Any]:
    result: dict[str, Any] = results[name]
    assert "failed" not in result, f"{result['failed']}\n{result['stderr'][-4000:]}"
    if "left" in result:  # after one more save
        assert result["left"] == []
        assert result["kept"] <= 2
    return result


def test_ranks_and_mounts_killed_at_random_moments_lose_nothing_that_was_reported(
    results: dict[str, Any],
) -> None:
    result = result_of(results, "killed-at-random")
    assert result["trials"] == TRIALS
    assert result["half_way"] > 0  # some did hit a save


def test_ranks_and_mounts_killed_at_an_operation_leave_the_checkpoint_whole_or_absent(
    results: dict[str, Any],
) -> None:
    result = result_of(results, "killed-at-each-operation")
    assert result["tried"] >= TRIALS // 2
    assert {outcome[-1] for outcome in result["outcomes"]} == {"0", "1"}


def test_an_operation_that_fails_is_an_error_on_all_ranks_and_the_older_checkpoint_stays(
    results: dict[str, Any],
) -> None:
    assert result_of(results, "failing-operations")["errors"] >= 40


def test_a_directory_that_disappears_is_an_error_on_all_ranks_and_is_not_made_anew(
    results: dict[str, Any],
) -> None:
    assert result_of(results, "vanishing-directory")["errors"] >= 4


def test_a_read_that_fails_makes_all_ranks_fall_back_and_a_mount_that_dies_is_an_error_on_all(
    results: dict[str, Any],
) -> None:
    outcomes = result_of(results, "failing-reads")["outcomes"]
    assert outcomes["fell back"] >= 2
    assert outcomes["mount died"] >= 2


def test_short_writes_are_gone_on_with_or_an_error_on_all(results: dict[str, Any]) -> None:
    result = result_of(results, "short-writes")
    assert result["saved"] >= 2
    assert result["saved"] + result["errors"] == 4


def test_a_power_failure_after_any_operation_leaves_what_was_reported(results: dict[str, Any]) -> None:
    result = result_of(results, "power-loss")
    assert result["events"] > 60
    assert set(result["outcomes"]) == {"0", "1"}


@pytest.mark.launches
def test_storage_that_hangs_ends_the_run_with_what_it_was_about_and_the_rank_that_did_not_come(
    can_mount: None, tmp_path: Path
) -> None:
    for name in ("storage", "shared"):
        (tmp_path / name).mkdir()
    result = run_ranks(2, cases.storage_of_rank_1_hangs, str(tmp_path), expect=6)
    assert "saving checkpoint step 2: writing" in result.stderr
    assert "did not come: rank 1\n" in result.stderr
    restored = load_newest_good(tmp_path / "storage", comm=SerialWorld())
    assert restored is not None
    assert restored.checkpoint.step == 1
    assert not restored.rejected
