"""Formulas of the reductions, overlap, stragglers and prediction."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from hpctrain.errors import UsageError
from hpctrain.scaling import (
    ALGORITHMS,
    Layout,
    Link,
    Machine,
    MeasuredStep,
    Node,
    ReadyBucket,
    Scenario,
    Setup,
    Storage,
    Timed,
    Workload,
    advice,
    binding,
    cost_of,
    fit_machine,
    overlap_slowdown,
    parse_nodes,
    parse_rate,
    predicted_efficiency,
    rebucketed,
    slowest_factor,
    spread_of_times,
    step_seconds,
)
from hpctrain.scaling.model.calibrate import USUAL, machine_of

MACHINE = Machine(
    network=Link(latency_s=20e-6, bytes_per_s=1.25e9, per_message_s=2e-6),
    local=Link(latency_s=2e-6, bytes_per_s=10e9, per_message_s=1e-6),
    node=Node(cores=64, sum_bytes_per_s=10e9, code_bytes_per_s=5e9, wire_bytes_per_s=10e9),
)
WORKLOAD = Workload(
    forward_s=0.05,
    backward_s=0.1,
    update_s=0.01,
    samples=32,
    buckets=rebucketed([ReadyBucket(100e6, 1.0)], bucket_bytes=4e6),
)
SCENARIO = Scenario(machine=MACHINE, workload=WORKLOAD, setup=Setup(algorithm="hierarchical"))


def sent(algorithm: str, layout: Layout, wire: str = "fp32") -> float:
    return cost_of(algorithm, 64e6, wire=wire, layout=layout, machine=MACHINE).sent_bytes


def test_bytes_out_of_a_node_are_those_of_the_guide() -> None:
    """docs/guides/reduction.md, the table of the algorithms."""
    layout, n = Layout(4, 2), 64e6
    assert sent("ring", layout) == pytest.approx(2 * 7 / 8 * n)
    assert sent("direct", layout) == pytest.approx(2 * 2 * 6 / 8 * n)
    for algorithm in ("hierarchical", "hierarchical-ring", "hierarchical-flat"):
        assert sent(algorithm, layout) == pytest.approx(2 * 3 / 4 * n, rel=0.01), algorithm
    assert sent("hierarchical", layout, "fp16") == pytest.approx(3 / 4 * n)
    assert sent("hierarchical", Layout(1, 4)) == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_algorithm_is_quicker_than_its_bytes_or_cheaper_with_more_of_them(algorithm: str) -> None:
    for layout in (Layout(1, 4), Layout(2, 1), Layout(3, 2), Layout(64, 8)):
        before = 0.0
        for num_bytes in (1e3, 1e5, 1e7, 1e9):
            cost = cost_of(algorithm, num_bytes, wire="fp32", layout=layout, machine=MACHINE)
            assert cost.total_s > before
            assert cost.total_s >= 0.999 * cost.sent_bytes / MACHINE.network.bytes_per_s
            before = cost.total_s
    assert cost_of(algorithm, 1e6, wire="fp32", layout=Layout(1, 1), machine=MACHINE).total_s == 0


def test_of_several_exchanges_at_once_the_busier_direction_counts() -> None:
    link = replace(MACHINE.network, turns=1.0)
    assert (link.exchange_factor(0), link.exchange_factor(1), link.exchange_factor(2)) == (1.0, 2.0, 1.5)
    generator = np.random.default_rng(7)
    for pairs in (3, 12, 100):
        out = generator.binomial(pairs, 0.5, size=200_000)
        assert link.exchange_factor(pairs) == pytest.approx(
            (2 * np.maximum(out, pairs - out) / pairs).mean(), rel=0.01
        )
    assert MACHINE.network.exchange_factor(1) == 1.0
    with pytest.raises(UsageError, match="a fraction of the exchanges"):
        replace(MACHINE.network, turns=1.5)


def _in_turns(num_bytes: float, algorithm: str, layout: Layout) -> float:
    """Returns how much longer a link is occupied where all exchanges take turns."""
    alone = MACHINE.with_rate(1e7)
    turning = replace(
        alone, network=replace(alone.network, turns=1.0), node=replace(alone.node, engine_turns=1.0)
    )
    with_turns, without = (
        cost_of(algorithm, num_bytes, wire="fp32", layout=layout, machine=machine).link_s
        for machine in (turning, alone)
    )
    return with_turns / without


def test_exchanges_that_take_turns_are_those_between_the_same_two_ranks() -> None:
    assert _in_turns(1e6, "flat", Layout(4, 1)) == pytest.approx(2)
    assert _in_turns(1e6, "flat", Layout(4, 2)) == pytest.approx(1.5)
    assert _in_turns(1e6, "flat", Layout(2, 1)) == 1  # nobody else for whom one of them could be late
    # A ring of more than two sends to one rank and receives from another.
    for algorithm in ("ring", "hierarchical-ring"):
        assert _in_turns(1e6, algorithm, Layout(4, 1)) == 1
        assert _in_turns(1e6, algorithm, Layout(2, 1)) == pytest.approx(2)
    assert _in_turns(1e6, "hierarchical-ring", Layout(2, 2)) == pytest.approx(1.5)
    assert _in_turns(1e6, "hierarchical", Layout(4, 1)) == pytest.approx(1.5)  # three partners
    assert 1 < _in_turns(64e6, "hierarchical", Layout(4, 1)) < 1.25  # of each of four chunks


def test_backward_is_longer_by_the_work_of_what_is_reduced_meanwhile() -> None:
    """On one core for each rank; with cores to spare the same reduction lengthens nothing."""
    none_left = replace(SCENARIO, machine=replace(MACHINE, node=replace(MACHINE.node, cores=1)))
    layout = Layout(8, 1)
    work_s = cost_of("hierarchical", 100e6, wire="fp32", layout=layout, machine=MACHINE).cpu_s
    longer_s = step_seconds(none_left, layout).step_s - step_seconds(SCENARIO, layout).step_s
    assert 0.5 * work_s < longer_s <= 1.01 * work_s


def test_a_rank_that_waits_in_the_library_keeps_its_core_from_backward() -> None:
    one_core = replace(MACHINE.with_rate(1e8), node=replace(MACHINE.node, cores=1))
    scenario = replace(SCENARIO, machine=one_core, setup=Setup(algorithm="flat"))
    layout = Layout(4, 1)
    sums_s = sum(
        cost_of("flat", bucket.num_bytes, wire="fp32", layout=layout, machine=one_core).total_s
        for bucket in WORKLOAD.buckets
    )
    assert step_seconds(scenario, layout).step_s == pytest.approx(WORKLOAD.compute_s + sums_s, rel=0.01)


def test_a_wire_whose_bytes_depend_on_the_gradients_is_refused() -> None:
    with pytest.raises(UsageError, match="top-k cannot be predicted"):
        cost_of("direct", 1e6, wire="top-k", layout=Layout(2, 1), machine=MACHINE)


def test_the_slowest_of_many_is_the_mean_of_simulated_maxima() -> None:
    generator = np.random.default_rng(3)
    for sigma, count in ((0.05, 2), (0.05, 16), (0.2, 512)):
        times = np.exp(sigma * generator.standard_normal((4000, count)))
        assert slowest_factor(sigma, count) == pytest.approx(
            times.max(axis=1).mean() / times.mean(), rel=0.01
        )
    assert slowest_factor(0.0, 1000) == slowest_factor(0.1, 1) == 1.0


def test_spread_is_found_again_and_one_pause_does_not_count() -> None:
    generator = random.Random(5)
    times = [0.1 * generator.lognormvariate(0, 0.08) for _ in range(2000)] + [60.0]
    assert spread_of_times(times) == pytest.approx(0.08, rel=0.1)


def test_buckets_are_cut_anew_without_losing_bytes_or_order() -> None:
    cut = rebucketed((ReadyBucket(6e6, 0.3), ReadyBucket(2e6, 1.0)), bucket_bytes=3e6)
    assert [bucket.num_bytes for bucket in cut] == pytest.approx([3e6, 3e6, 2e6])
    assert [bucket.ready for bucket in cut] == pytest.approx([0.15, 0.3, 1.0])


def test_a_step_is_never_shorter_than_computation_or_communication() -> None:
    for nodes in (1, 2, 16, 1024):
        layout = Layout(nodes, 2)
        step = step_seconds(SCENARIO, layout)
        link_s = cost_of("hierarchical", 100e6, wire="fp32", layout=layout, machine=MACHINE).link_s
        assert step.step_s >= max(WORKLOAD.compute_s, link_s)
        assert 0 < predicted_efficiency(SCENARIO, layout, step) <= 1


def test_without_overlap_a_step_is_longer() -> None:
    after = replace(SCENARIO, setup=replace(SCENARIO.setup, overlap=False))
    assert step_seconds(after, Layout(8, 1)).step_s > 1.2 * step_seconds(SCENARIO, Layout(8, 1)).step_s


def test_slower_computation_is_found_again_from_steps_whose_reductions_overlap() -> None:
    slower = replace(SCENARIO, workload=replace(WORKLOAD, overlap_slowdown=1.4))
    measured = [
        MeasuredStep(scenario=SCENARIO, layout=layout, seconds=step_seconds(slower, layout).step_s)
        for layout in (Layout(2, 1), Layout(2, 2))
    ]
    assert overlap_slowdown(measured) == pytest.approx(1.4, rel=1e-3)
    quicker = [replace(one, seconds=0.5 * one.seconds) for one in measured]
    assert overlap_slowdown(quicker) == overlap_slowdown([]) == 1.0
    # One rank reduces nothing, and where all cores of one node are taken reductions begin after backward.
    full = replace(slower, machine=replace(MACHINE, node=replace(MACHINE.node, cores=2)))
    assert step_seconds(slower, Layout(1, 1)).step_s == WORKLOAD.compute_s
    assert step_seconds(full, Layout(1, 2)) == step_seconds(replace(full, workload=WORKLOAD), Layout(1, 2))


def _changed(name: str) -> Scenario:
    """The scenario with one resource made scarce."""
    machine, workload = MACHINE, WORKLOAD
    match name:
        case "network bandwidth":
            return replace(SCENARIO, machine=machine.with_rate(1e8))
        case "network latency":
            return replace(SCENARIO, machine=replace(machine, network=Link(latency_s=0.2, bytes_per_s=1e12)))
        case "processor cores":
            return replace(
                SCENARIO, machine=replace(machine, node=replace(machine.node, cores=2, cores_shared_by=4))
            )
        case "stragglers":
            return replace(SCENARIO, workload=replace(workload, sigma=0.3))
        case "reading":
            slow = Storage(bytes_per_s=1e9)
            return replace(SCENARIO, workload=replace(workload, input_bytes=1e9), storage=slow)
        case "checkpoints":
            return replace(SCENARIO, workload=replace(workload, checkpoint_s=1.0))
    return replace(SCENARIO, machine=machine.with_rate(1e12))


@pytest.mark.parametrize(
    "binds",
    [
        "network bandwidth",
        "network latency",
        "processor cores",
        "stragglers",
        "reading",
        "checkpoints",
        "computation",
    ],
)
def test_what_binds_is_named(binds: str) -> None:
    assert binding(_changed(binds), Layout(4, 2))[0] == binds


def test_advice_is_what_the_model_gives_with_the_change() -> None:
    slow = replace(SCENARIO, machine=MACHINE.with_rate(2e8), setup=Setup(algorithm="direct"))
    found = {one.change: one.gain for one in advice(slow, Layout(8, 4))}
    fp16 = replace(slow, setup=replace(slow.setup, wire="fp16"))
    before, after = step_seconds(slow, Layout(8, 4)).step_s, step_seconds(fp16, Layout(8, 4)).step_s
    assert found["wire = fp16"] == pytest.approx(before / after - 1)
    assert found["algorithm = hierarchical"] > 1
    assert found["twice the network bandwidth"] > 0.5
    assert list(found.values()) == sorted(found.values(), reverse=True)
    # One rank alone sends nothing: only a larger batch helps, as it shares the optimizer's time.
    assert [one.change for one in advice(SCENARIO, Layout(1, 1))] == ["twice the batch per rank"]


def test_constants_are_found_again_from_noisy_times() -> None:
    true = {
        **USUAL,
        "latency_s": 150e-6,
        "message_s": 12e-6,
        "engine_message_s": 90e-6,
        "wire_bytes_per_s": 1.2e9,
    }
    node = Node(cores=8)
    generator = random.Random(1)
    measured = [
        Timed(
            algorithm=algorithm, wire=wire, num_bytes=num_bytes, layout=layout, link_bytes_per_s=rate,
            seconds=cost_of(
                algorithm, num_bytes, wire=wire, layout=layout,
                machine=machine_of(true, node=node, link_bytes_per_s=rate),
            ).total_s * generator.lognormvariate(0, 0.03),
        )
        for algorithm in ("flat", "ring", "direct", "hierarchical")
        for wire in ("fp32", "fp16")
        for num_bytes in (4_000, 64_000, 1_000_000, 16_000_000)
        for layout in (Layout(2, 1), Layout(2, 2), Layout(1, 2))
        for rate in (125e6, 12.5e6)
    ]  # fmt: skip
    fit = fit_machine(measured, node=node)
    known = fit_machine(measured[::4], node=node, known={"wire_bytes_per_s": 1e9})
    assert known.values["wire_bytes_per_s"] == pytest.approx(1e9, rel=0.1)
    assert known.standard_errors()["wire_bytes_per_s"] <= 0.05
    errors = []
    for layout in (Layout(4, 2), Layout(16, 2)):
        for one in measured[::5]:
            machines = [
                machine_of(v, node=node, link_bytes_per_s=one.link_bytes_per_s) for v in (true, fit.values)
            ]
            a, b = (cost_of(one.algorithm, one.num_bytes, wire=one.wire, layout=layout, machine=m).total_s
                    for m in machines)  # fmt: skip
            errors.append(abs(b / a - 1))
    assert fmean(errors) < 0.03
    assert max(errors) < 0.12
    assert fit.standard_errors()["link_share"] < 0.05


def test_texts_of_nodes_and_rates() -> None:
    assert parse_nodes("1..16,6") == (1, 2, 4, 6, 8, 16)
    assert parse_nodes("3..10") == (3, 4, 8, 10)
    assert parse_rate("100gbit") == 12.5e9
    assert parse_rate("300 Mbit/s") == 37.5e6
    for text in ("0..4", "4..2", "x"):
        with pytest.raises(UsageError, match="--nodes"):
            parse_nodes(text)
    with pytest.raises(UsageError, match="not a link rate"):
        parse_rate("100")
