"""Sharded gradients summed in two levels and encoded; edges of sharded training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.ranks.parallel.layouts import Found, pack_rows
from tests.ranks.parallel.sharded_reduction_cases import ENCODED, EXACT, FAMILY, STEPS

__all__ = ["FAMILY"]
pytestmark = [pytest.mark.launches, pytest.mark.timeout(2400)]  # a fixture makes all launches

# Of losses, after steps with gradients that are rounded to this many bits.
WITHIN = {"direct": 1e-6, "hierarchical": 1e-6, "fp16": 2e-3, "bf16": 2e-2, "int8": 5e-2}


def pack(where: Path) -> None:
    pack_rows(where)
    pack_rows(where, name="few", samples=2)


@pytest.mark.parametrize(("ranks", "name"), [(n, name) for n in EXACT for name in EXACT[n]])
def test_other_sums_train_as_one_rank(launches: dict[int, list[Found]], ranks: int, name: str) -> None:
    expected = launches[1][0]["fp64 none"]
    for found in launches[ranks]:
        assert len(found[f"fp64 {name}"]["steps"]) == STEPS
        np.testing.assert_allclose(found[f"fp64 {name}"]["steps"], expected["steps"], rtol=1e-10)
        assert found[f"fp64 {name}"]["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-10)


@pytest.mark.parametrize(("ranks", "name"), [(n, name) for n in ENCODED for name in ENCODED[n]])
def test_encoded_gradients_train_nearly_as_fsdps_own_sums(
    launches: dict[int, list[Found]], ranks: int, name: str
) -> None:
    expected = np.array(launches[ranks][0]["fp32 own"]["steps"])
    first = launches[ranks][0][f"fp32 {name}"]["steps"]
    np.testing.assert_allclose(np.array(first)[:, 0], expected[:, 0], rtol=WITHIN.get(name.split()[-1], 1e-6))
    for found in launches[ranks]:
        assert found[f"fp32 {name}"]["steps"] == first
        assert all(applied for _, _, applied in found[f"fp32 {name}"]["steps"])


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_wires_halve_and_quarter_the_gradients_bytes(launches: dict[int, list[Found]], ranks: int) -> None:
    for found in (launch["sent"] for launch in launches[ranks]):
        gradients = found["gradients"]
        total, numbers = found["fp32"]
        # Parameters are gathered for forward, and two of three blocks again for backward.
        gathered = 5 / 3 * gradients
        assert total == pytest.approx(gathered + gradients)
        assert found["direct"] == [total, pytest.approx(numbers, rel=1e-6)]
        for wire, share in (("fp16", 1 / 2), ("bf16", 1 / 2), ("int8", 1 / 4)):
            assert found[wire][0] - gathered == pytest.approx(share * gradients, rel=0.03)
            assert found[wire][1] == pytest.approx(numbers, rel=WITHIN[wire])


def test_shards_within_nodes_are_encoded_between_them(launches: dict[int, list[Found]]) -> None:
    for found in launches[4]:
        (exact, expected), (encoded, numbers) = found["between nodes"]
        assert encoded == pytest.approx(exact / 4, rel=0.03)
        assert numbers == pytest.approx(expected, rel=WITHIN["int8"])
        assert numbers[0] != expected[0]


def test_what_a_wire_makes_infinite_is_skipped_on_all_ranks(
    launches: dict[int, list[Found]],
) -> None:
    skipped = [[not applied for _, _, applied in found["overflow fp16"]["steps"]] for found in launches[2]]
    assert skipped[0] == skipped[1]
    assert any(skipped[0])
    assert not all(skipped[0])
    assert all(applied for _, _, applied in launches[2][0]["overflow fp32"]["steps"])


def test_what_cannot_be_done_is_refused_on_all_ranks(launches: dict[int, list[Found]]) -> None:
    for ranks in (2, 3, 4):
        for found in launches[ranks]:
            unknown, direct, encoded, own = found["sent"]["refused"]
            assert "algorithm 'ring' with the wire format 'fp32': choose one of auto, direct" in unknown
            assert "summed there first" in direct
            assert "no shards within a node: choose shard = 'none'" in encoded
            assert "FSDP or DTensor has split this model" in own


def test_backward_ends_with_its_sums(launches: dict[int, list[Found]]) -> None:
    for found in (launch["slow sums"] for launch in launches[3]):
        assert found["begun"] == list(range(6))  # one at a time, three in each backward
        for once, twice, alone in zip(found["once"], found["twice"], found["alone"], strict=True):
            np.testing.assert_allclose(once, alone, rtol=1e-4, atol=1e-7)
            np.testing.assert_allclose(twice, 2 * np.array(alone), rtol=1e-4, atol=1e-7)


def test_what_was_gathered_ahead_and_not_used_is_dropped(launches: dict[int, list[Found]]) -> None:
    for found in launches[3]:
        sharded, alone = found["changed"]
        np.testing.assert_allclose(sharded, alone, rtol=1e-5, atol=1e-6)


def test_nothing_of_a_step_is_left_for_the_next(launches: dict[int, list[Found]]) -> None:
    for found in (launch["passes"] for launch in launches[3]):
        assert found["differences"] == {name: pytest.approx(0.0, abs=1e-12) for name in found["differences"]}
        assert "register_hook), which FSDP2 does not call" in found["hook"]
        assert found["dropped on one rank"].startswith(
            "agreed: some parameters have a gradient on some ranks"
        )


def test_an_evaluation_gathers_once_what_stays_whole(launches: dict[int, list[Found]]) -> None:
    sent = np.sum([launch["passes"]["evaluation"] for launch in launches[3]], axis=0)
    alone, first, second, third, later = sent.tolist()
    assert alone == first == later
    assert 0 < second == third < first


def test_training_goes_on_after_a_backward_that_failed_on_all_ranks(
    launches: dict[int, list[Found]],
) -> None:
    for found in (launch["passes"]["failed"] for launch in launches[3]):
        backward, step = found.pop("refused")
        assert "a backward before this one has failed" in backward
        assert step.startswith("agreed: a backward has failed")
        assert found == {
            name: pytest.approx(0.0, abs=1e-12) for name in ("step", "zero_grad", "not accepted")
        }


def test_close_ends_the_thread_that_sums(launches: dict[int, list[Found]]) -> None:
    for found in (launch["passes"]["closed"] for launch in launches[3]):
        before, after = found["threads"]
        assert after == before - 1
        assert found["later"] == pytest.approx(0.0, abs=1e-12)


def test_a_state_is_loaded_after_an_evaluation(launches: dict[int, list[Found]]) -> None:
    for found in launches[3]:
        losses = found["after evaluation"]
        assert losses[3:] == pytest.approx(losses[:3], rel=1e-6)
        assert losses[1] < losses[0]


def test_weights_of_another_run_begin_a_sharded_one(launches: dict[int, list[Found]]) -> None:
    expected = launches[1][0]["from weights"]["steps"]
    assert len(expected) == 3
    assert expected[0][0] != launches[1][0]["fp64 none"]["steps"][0][0]
    for found in launches[3]:
        np.testing.assert_allclose(found["from weights"]["steps"], expected, rtol=1e-10)


def test_an_evaluation_with_fewer_samples_than_ranks_is_refused(
    launches: dict[int, list[Found]],
) -> None:
    assert launches[1][0]["few"] == ""
    for found in launches[3]:
        assert "evaluate on at least 3 samples" in found["few"]
