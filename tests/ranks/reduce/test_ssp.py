"""Bounded staleness on real ranks: the bound, each sample once, equality without staleness, resume, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.reduce import ssp_cases
from tests.ranks_launcher import run_ranks

pytestmark = pytest.mark.launches


@pytest.mark.parametrize(
    ("staleness", "servers", "num_ranks", "ranks_per_node", "num_parts"),
    [
        (3, [], 4, None, 1000),
        pytest.param(3, [], 4, None, 10_000, marks=pytest.mark.thorough),
        (0, [], 3, None, 300),
        (2, [1], 3, 2, 300),
        ("any", [], 2, 1, 300),
    ],
)
def test_no_read_is_older_than_the_bound_and_none_is_torn(
    staleness: int | str, servers: list[int], num_ranks: int, ranks_per_node: int | None, num_parts: int
) -> None:
    result = run_ranks(
        num_ranks, ssp_cases.stamped_reads, staleness, servers, num_parts, ranks_per_node=ranks_per_node
    )
    outputs = result.outputs
    assert sum(output["wrong"] for output in outputs) == 0
    assert all(output["final"] for output in outputs)
    reads = sum(output["reads"] for output in outputs)
    workers = num_ranks - len(servers)
    assert reads == num_parts // workers * workers
    assert sorted(part for output in outputs for part in output["taken"]) == list(range(reads))
    if staleness != "any":
        assert max(output["largest"] for output in outputs) <= int(staleness)
    if staleness == 3:  # the bound was reached, so that the test could have failed
        assert max(output["largest"] for output in outputs) == 3
        assert all(output["reads"] for output in outputs)


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """The outputs of all cases of sessions, by number of ranks."""
    scratch = tmp_path_factory.mktemp("ssp")
    return {
        num_ranks: run_ranks(num_ranks, ssp_cases.everything, str(scratch)).outputs
        for num_ranks in (1, 2, 3, 4)
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_without_staleness_a_training_equals_synchronous_training_and_its_resume(
    sessions: dict[int, list[Any]], num_ranks: int
) -> None:
    """To the bit: also the synchronous one, which adds up the ranks' gradients in the same order."""
    first = sessions[num_ranks][0]
    for output in sessions[num_ranks]:
        assert output["uninterrupted"] == first["synchronous"]
        assert output["resumed"] == first["synchronous"]
        assert output["position"] == output["position of synchronous"]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_that_only_serve_change_nothing(sessions: dict[int, list[Any]], num_ranks: int) -> None:
    """With one rank that serves, the others train as that many ranks would."""
    for output in sessions[num_ranks]:
        assert output["listed"] == sessions[num_ranks - 1][0]["synchronous"]
        assert output["listed, resumed"] == output["listed"]
    assert sessions[num_ranks][-1]["used by listed"] == []


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_a_slow_rank_takes_fewer_samples_and_each_sample_is_used_once_per_epoch(
    sessions: dict[int, list[Any]], num_ranks: int
) -> None:
    """11 steps of 8 of 37 samples: epochs 0 and 1, and 8 samples of epoch 2."""
    outputs = sessions[num_ranks]
    used = [(epoch, n) for output in outputs for epoch, *numbers in output["used"] for n in numbers]
    assert len(used) == len(set(used)) == outputs[0]["samples"] == 2 * 37 + 8
    assert sorted(n for epoch, n in used if epoch == 0) == list(range(37))
    assert sorted(n for epoch, n in used if epoch == 1) == list(range(37))
    if num_ranks > 1:
        assert len(outputs[-1]["used"]) < len(outputs[0]["used"])
    for output in outputs:
        assert output["stale"] == outputs[0]["stale"]
        assert output["stale, loaded"] == outputs[0]["stale"]


def test_what_does_not_compose_is_refused_on_all_ranks(tmp_path: Path) -> None:
    outputs = run_ranks(2, ssp_cases.refusals).outputs
    assert outputs[0] == outputs[1]
    expected = [
        "wire='fp16'", "algorithm='ring'", "clip_norm", "servers has rank 9", "wire='int8'",
        "schedule={'method': 'ssp', 'staleness': 3}",
    ]  # fmt: skip
    for text, part in zip(outputs[0], expected, strict=True):
        assert part in text
