"""Numbers are right: N ranks equal one, resumed equals never stopped, every sample exactly once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from hpctrain.data import pack_arrays
from tests.ranks import training_cases
from tests.ranks_launcher import RanksResult, run_ranks

pytestmark = pytest.mark.launches

BACKENDS = ["mpi", "horovod"]
RANK_COUNTS = [1, 2, 3, 4]
NUM_SAMPLES = 1438
# Each launch finishes what the one before it began, on another number of ranks.
RESUMES_FROM = {1: 0, 2: 1, 3: 2, 4: 3}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("training")
    images, labels = load_digits(return_X_y=True)
    pack_arrays(
        where / "data",
        {
            "image": images[:NUM_SAMPLES].reshape(-1, 1, 8, 8).astype(np.float32),
            "label": labels[:NUM_SAMPLES].astype(np.int64),
            "id": np.arange(NUM_SAMPLES),
        },
    )
    return where


@pytest.fixture(scope="module")
def launches(directory: Path) -> dict[tuple[str, int], RanksResult]:
    """Every backend at every number of ranks, one launch each."""
    return {
        (backend, n): run_ranks(
            n, training_cases.everything, str(directory), RESUMES_FROM[n], backend=backend, timeout_s=150
        )
        for backend in BACKENDS
        for n in RANK_COUNTS
    }


def furthest(a: list[float], b: list[float]) -> float:
    """Largest relative difference between two loss curves of the whole length."""
    assert len(a) == len(b) == training_cases.STEPS
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def curve(launch: RanksResult, which: str, rank: int = 0) -> list[float]:
    return launch.outputs[rank]["numbers"][which]["losses"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_ranks", RANK_COUNTS)
@pytest.mark.parametrize("algorithm", training_cases.ALGORITHMS)  # 1 and 2 ranks have no second level
@pytest.mark.parametrize(("precision", "bound"), [("fp64", 1e-10), ("fp32", 1e-4)])
def test_the_loss_curve_is_that_of_one_rank(
    launches: dict[tuple[str, int], RanksResult],
    backend: str, num_ranks: int, algorithm: str, precision: str, bound: float,
) -> None:  # fmt: skip
    alone = curve(launches["mpi", 1], f"{precision} flat")
    found = curve(launches[backend, num_ranks], f"{precision} {algorithm}")
    assert furthest(found, alone) < bound
    assert alone[-1] < 0.6 * alone[0]  # it did learn


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_ranks", RANK_COUNTS)
def test_all_ranks_hold_the_same_bits(
    launches: dict[tuple[str, int], RanksResult], backend: str, num_ranks: int
) -> None:
    for which in ("fp64 flat", "fp64 hierarchical", "fp32 flat", "fp32 hierarchical"):
        outputs = [output["numbers"][which] for output in launches[backend, num_ranks].outputs]
        assert len({output["fingerprint"] for output in outputs}) == 1
        assert len({tuple(output["losses"]) for output in outputs}) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_two_levels_were_used_where_asked_for(
    launches: dict[tuple[str, int], RanksResult], backend: str, num_ranks: int
) -> None:
    found = launches[backend, num_ranks].outputs[0]["numbers"]
    assert found["fp64 hierarchical"]["summary"]["algorithm"] == "hierarchical"
    assert found["fp64 flat"]["summary"]["algorithm"] == "flat"
    assert found["fp64 flat"]["summary"]["backend"] == backend


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_ranks", RANK_COUNTS)
@pytest.mark.parametrize("step", [1, 29, 44])
def test_resumed_is_bit_identical_to_never_stopped(
    launches: dict[tuple[str, int], RanksResult], backend: str, num_ranks: int, step: int
) -> None:
    for output in launches[backend, num_ranks].outputs:
        whole, resumed = output["interruptions"]["whole"], output["interruptions"][f"{step}"]
        assert resumed["stopped"]
        # One an epoch: the loss scale has moved, and came back. One rank sends nothing, so nothing overflows.
        assert whole["summary"]["skipped_steps"] == (2 if num_ranks > 1 else 0)
        assert resumed["losses"] == whole["losses"]  # the records of both stretches, to the last bit
        assert resumed["fingerprint"] == whole["fingerprint"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_ranks", RANK_COUNTS)
def test_what_int8_has_lost_is_resumed_to_the_bit(
    launches: dict[tuple[str, int], RanksResult], backend: str, num_ranks: int
) -> None:
    for output in launches[backend, num_ranks].outputs:
        found = output["interruptions"]["int8"]
        assert found["resumed"] == found["whole"]
        assert found["same"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 4)])
def test_resumed_on_another_number_of_ranks_sees_exactly_the_remaining_samples(
    launches: dict[tuple[str, int], RanksResult], backend: str, before: int, after: int
) -> None:
    begun: list[list[int]] = launches[backend, before].outputs[0]["begun"]
    ended: list[list[int]] = launches[backend, after].outputs[0]["ended"]
    assert len(begun) == before
    assert len(ended) == after
    counts = Counter(sample for seen in (*begun, *ended) for sample in seen)
    assert counts == dict.fromkeys(range(NUM_SAMPLES), 2)  # two epochs


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ranks_shares_of_an_epoch_are_balanced(
    launches: dict[tuple[str, int], RanksResult], backend: str
) -> None:
    samples: list[Any] = [o["numbers"]["fp64 flat"]["samples"] for o in launches[backend, 4].outputs]
    assert max(samples) - min(samples) <= training_cases.STEPS
