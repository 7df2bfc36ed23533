"""Advice on the number of nodes: predictions by hand, conclusions, and what is said when too little is known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hpctrain.errors import UsageError
from hpctrain.scaling import (
    FixedShare,
    MeasuredJob,
    MeasuredLink,
    NodesModel,
    ReadyBucket,
    ScalingGoal,
    advise_nodes,
)
from hpctrain.scaling.nodes_advice.advise import candidate_nodes
from hpctrain.scaling.nodes_advice.predict_nodes import OVERLAP

PARTS = {
    "input": 0.02, "compute": 0.7, "hidden_reduction": 0.1, "bubble": 0.0, "exposed_reduction": 0.06, "waiting": 0.0,
    "checkpoint": 0.01, "evaluation": 0.008, "other": 0.002,
}  # fmt: skip
LINK = MeasuredLink(bytes_per_s=1.25e9, latency_s=20e-6, source="probe.json")


def job(*, parts: dict[str, float] | None = None, **changes: Any) -> MeasuredJob:
    values: dict[str, Any] = {
        "nodes": 2, "ranks_per_node": 1, "global_batch": 64, "steps_left": 1000, "parts": PARTS | (parts or {}),
        "steps": 500, "noise": 0.0, "sigma": 0.0, "fixed": FixedShare(value=0.25, error=0.0, source="a test"),
        "backward_share": 0.6, "update_share": 0.05, "buckets": (ReadyBucket(4e7, 0.5), ReadyBucket(4e7, 1.0)),
        "algorithm": "direct", "wire": "fp32", "cores": 8, "threads": 4, "link": LINK,
    }  # fmt: skip
    return MeasuredJob(**(values | changes))


def bound_by_reductions(**changes: Any) -> MeasuredJob:
    """Most of the step is waiting for a slow link: everything is ready at the end of backward."""
    parts = {"compute": 0.2, "hidden_reduction": 0.0, "exposed_reduction": 12.0, "input": 0.0}
    link = MeasuredLink(bytes_per_s=1e8, latency_s=20e-6, source="probe.json")
    return job(**{"parts": parts, "buckets": (ReadyBucket(6e8, 1.0),), "link": link} | changes)


def test_the_present_number_of_nodes_is_predicted_as_measured() -> None:
    found = NodesModel(job(noise=0.02)).predict(2)
    assert found.parts == PARTS
    assert found.step_s == pytest.approx(0.9)
    assert (found.low_s, found.high_s) == pytest.approx((0.9 * (1 - 1.645 * 0.02), 0.9 * (1 + 1.645 * 0.02)))
    assert found.time_s == pytest.approx(900.0)
    assert found.node_hours == pytest.approx(0.5)
    assert found.energy_j is None


def test_each_part_of_a_step_on_one_node_instead_of_two_follows_its_rule() -> None:
    found = NodesModel(job(move_s=30.0, watts=300.0)).predict(1)
    # 0.8 s of computing: a quarter stays, the rest is for twice the samples. One rank reduces nothing beside it.
    computing_s = 0.8 * (0.25 + 0.75 * 2) / OVERLAP
    assert found.parts["compute"] == pytest.approx(computing_s)
    assert found.parts["hidden_reduction"] == found.parts["exposed_reduction"] == 0.0
    assert found.parts["evaluation"] == pytest.approx(0.016)
    assert found.parts["checkpoint"] == pytest.approx(0.01)
    assert found.parts["other"] == pytest.approx(0.002)
    assert found.parts["input"] == pytest.approx(0.03)  # between 0.02 and 0.04
    step_s = computing_s + 0.016 + 0.01 + 0.002 + 0.03
    assert found.step_s == pytest.approx(step_s)
    assert found.time_s == pytest.approx(30 + 1000 * step_s)
    assert found.node_hours == pytest.approx((30 + 1000 * step_s) / 3600)
    assert found.energy_j == pytest.approx(300 * (30 + 1000 * step_s))
    # Of computing (0.02 and 0.15), input (half of the range is 1.645 standard errors), evaluation, the constant parts.
    error_s = math.hypot(computing_s * math.hypot(0.02, 0.15), 0.01 / 1.645, 0.2 * 0.016, 0.3 * 0.012)
    assert found.high_s - found.step_s == pytest.approx(1.645 * error_s)
    assert found.step_s - found.low_s == pytest.approx(1.645 * error_s)
    half_s = 1.645 * math.hypot(1000 * error_s, 0.3 * 30)
    assert found.time_high_s == pytest.approx(found.time_s + half_s)
    assert found.time_low_s == pytest.approx(found.time_s - half_s)


def test_a_rank_of_an_uneven_split_has_the_larger_number_of_samples() -> None:
    assert [job().samples(NodesModel(job()).job.layout)] == [32]
    found = NodesModel(job(global_batch=10, buckets=(ReadyBucket(4.0, 1.0),))).predict(4)
    # 3 of 10 samples instead of 5.
    assert found.parts["compute"] + found.parts["hidden_reduction"] == pytest.approx(
        0.8 * (0.25 + 0.75 * 3 / 5)
    )


def test_the_model_is_anchored_at_the_measured_reductions() -> None:
    here = job()
    model = NodesModel(here)
    step = model._reductions.step(here.layout, computing_s=here.computing_s)
    assert step.exposed_s == pytest.approx(0.06, rel=1e-6)
    hidden = job(parts={"exposed_reduction": 0.0, "hidden_reduction": 0.2})
    step = NodesModel(hidden)._reductions.step(hidden.layout, computing_s=hidden.computing_s)
    assert step.exposed_s + step.overlapped_s == pytest.approx(0.2, rel=1e-6)


def test_a_reduction_that_a_link_limits_takes_as_long_as_its_bytes() -> None:
    # A ring sends 2 (C-1)/C of the bytes through each link: 1 on two nodes, 3/2 on four, 7/4 on eight.
    model = NodesModel(bound_by_reductions(algorithm="ring", nodes=4))
    on_four = model.predict(4).parts["exposed_reduction"]
    assert on_four == pytest.approx(12.0)
    assert model.predict(8).parts["exposed_reduction"] == pytest.approx(12.0 * 7 / 6, rel=0.02)
    assert model.predict(1).parts["exposed_reduction"] == 0.0
    low, high = model.predict(8).low_s, model.predict(8).high_s
    assert low < model.predict(8).step_s < high


def test_without_a_measured_link_the_reductions_of_the_run_tell_its_rate() -> None:
    with_link, without = (
        NodesModel(bound_by_reductions(algorithm="ring", nodes=4, link=link)).predict(8)
        for link in (MeasuredLink(bytes_per_s=1e8, latency_s=20e-6, source=""), None)
    )
    assert with_link.step_s == pytest.approx(without.step_s, rel=0.02)


def test_waiting_grows_with_the_expected_slowest_rank() -> None:
    model = NodesModel(job(parts={"waiting": 0.03}, sigma=0.05, nodes=2))
    assert model.predict(1).parts["waiting"] == 0.0
    on_four = model.predict(4)
    computing_s = on_four.parts["compute"] + on_four.parts["hidden_reduction"]
    # Blom: z of 2 and of 4 ranks, 0.589 and 1.049; the largest of N lognormal times is exp(sigma z - sigma^2 / 2).
    largest = [math.exp(0.05 * z - 0.00125) - 1 for z in (0.5895, 1.0491)]
    assert on_four.parts["waiting"] == pytest.approx(
        0.03 * largest[1] / largest[0] * computing_s / 0.8, rel=1e-3
    )


def test_candidates_are_halves_doubles_divisors_and_limits() -> None:
    assert candidate_nodes(job(nodes=4)) == [1, 2, 4, 8, 16]
    assert candidate_nodes(job(nodes=4, global_batch=60)) == [1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 16]
    assert candidate_nodes(job(nodes=4, ranks_per_node=4)) == [1, 2, 4, 8, 16]
    assert candidate_nodes(job(nodes=4, ranks_per_node=8)) == [1, 2, 4, 8]  # 64 samples, 8 ranks on each node
    assert candidate_nodes(job(nodes=4, least_nodes=3, most_nodes=7)) == [3, 4, 7]
    many = candidate_nodes(job(nodes=8, global_batch=5040, most_nodes=5040))
    assert len(many) == 16
    assert {4, 8, 16} <= set(many)


def test_more_nodes_are_advised_where_they_pay() -> None:
    quick = job(
        parts={"exposed_reduction": 0.0, "hidden_reduction": 0.01},
        fixed=FixedShare(value=0.02, error=0.01, source="a test"),
    )
    found = advise_nodes(quick)
    assert (found.nodes, found.advised, found.moves) == (2, 8, True)
    now, then = found.on(2), found.on(8)
    assert now is not None
    assert then is not None
    assert found.text.startswith("8 nodes instead of 2 would finish in ")
    assert f"for {then.node_hours:.3g} instead of {now.node_hours:.3g} node-hours (90% interval" in found.text
    assert 8 * then.time_high_s**2 < 2 * now.time_s**2
    assert found.basis == (
        "2% of computing does not depend on the samples (a test); rate of a node's link 1,250 MB/s (probe.json)"
    )


def test_fewer_nodes_are_advised_where_reductions_take_the_time() -> None:
    found = advise_nodes(bound_by_reductions(nodes=4, watts=250.0))
    assert found.advised == 1
    now, then = found.on(4), found.on(1)
    assert now is not None
    assert then is not None
    saved = 1 - then.node_hours / now.node_hours
    assert found.text.startswith("fewer nodes: 1 instead of 4 would take ")
    assert f"less time and save {saved:.0%} of the node-hours, " in found.text
    assert then.energy_j == pytest.approx(250 * then.time_s)
    assert "kWh" in found.text


@pytest.mark.parametrize(
    ("goal", "advised"),
    [(ScalingGoal.TIME, 8), (ScalingGoal.NODE_HOURS, 2), (ScalingGoal.ENERGY, 2), (ScalingGoal.BALANCE, 8)],
)
def test_the_goal_decides(goal: ScalingGoal, advised: int) -> None:
    linear = job(
        parts={"exposed_reduction": 0.0, "hidden_reduction": 0.01, "input": 0.0}, watts=300.0,
        fixed=FixedShare(value=0.1, error=0.01, source=""), least_nodes=2,
    )  # fmt: skip
    assert advise_nodes(linear, goal=goal).advised == advised


def test_of_numbers_that_are_nearly_as_good_the_smallest_is_advised() -> None:
    # All that is left is constant: the gain from eight nodes over four is small.
    mostly_constant = job(
        parts={"exposed_reduction": 0.0, "hidden_reduction": 0.0, "compute": 1.0, "input": 0.0},
        buckets=(ReadyBucket(4.0, 0.0),), fixed=FixedShare(value=0.6, error=0.01, source=""),
    )  # fmt: skip
    assert advise_nodes(mostly_constant, goal=ScalingGoal.TIME).advised == 8
    assert advise_nodes(mostly_constant, goal=ScalingGoal.TIME, least_gain=0.15).advised == 4


def test_nothing_is_advised_when_the_interval_leaves_the_sign_open() -> None:
    uncertain = job(fixed=FixedShare(value=0.4, error=0.4, source=""), most_nodes=4, least_nodes=2)
    found = advise_nodes(uncertain, goal=ScalingGoal.TIME)
    assert not found.moves
    (then,) = (one for one in found.predictions if one.nodes == 4)
    assert then.time_s < 900 < then.time_high_s
    assert found.text.startswith("stays on 2 nodes: 4 might lower the time by ")
    assert "which the model's error leaves open" in found.text
    certain = job(fixed=FixedShare(value=0.4, error=0.01, source=""), most_nodes=4, least_nodes=2)
    assert advise_nodes(certain, goal=ScalingGoal.TIME).advised == 4


def test_a_move_that_costs_more_than_it_gains_is_not_advised() -> None:
    linear = {
        "parts": {"exposed_reduction": 0.0, "hidden_reduction": 0.0},
        "fixed": FixedShare(value=0.0, error=0.0, source=""), "buckets": (ReadyBucket(4.0, 0.0),), "steps_left": 100,
    }  # fmt: skip
    assert advise_nodes(job(**linear)).moves
    stays = advise_nodes(job(**linear, move_s=300.0))
    assert not stays.moves
    assert stays.text == "stays on 2 nodes: no other number from 1 to 8 lowers the time times the node-hours"


def test_a_run_on_one_node_without_a_link_is_told_what_is_missing() -> None:
    alone = job(nodes=1, link=None, parts={"exposed_reduction": 0.0, "hidden_reduction": 0.0})
    found = advise_nodes(alone)
    assert not found.moves
    assert "give its rate by scaling.link" in found.text
    assert found.missing
    assert found.text.startswith(
        "no advice on the number of nodes: a run on one node does not measure the link"
    )
    with pytest.raises(UsageError, match=r"scaling\.link"):
        NodesModel(alone).predict(2)
    measured, given = (
        NodesModel(
            job(nodes=1, link=MeasuredLink(bytes_per_s=1e8, latency_s=1e-4, source="", measured=measured))
        )
        for measured in (True, False)
    )
    # A given rate is further from what a run reaches than a measured one.
    assert given.predict(2).high_s > measured.predict(2).high_s


def test_limits_that_leave_no_choice_are_said() -> None:
    found = advise_nodes(job(least_nodes=2, most_nodes=2))
    assert found.text == "no advice on the number of nodes: the limits leave no other number of nodes"


def test_what_the_model_cannot_predict_is_refused() -> None:
    with pytest.raises(UsageError, match="no formula for reductions by fsdp2"):
        job(algorithm="fsdp2")
    with pytest.raises(UsageError, match="no formula for reductions by direct with top-k"):
        job(wire="top-k")
    with pytest.raises(UsageError, match="no energy was measured"):
        advise_nodes(job(), goal=ScalingGoal.ENERGY)
    with pytest.raises(UsageError, match="no steps left"):
        advise_nodes(job(steps_left=0))
    with pytest.raises(UsageError, match="the global batch has 64 samples"):
        NodesModel(job()).predict(65)
