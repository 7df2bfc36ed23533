"""What a run's records say of the run, for advice on its number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hpctrain.errors import UsageError
from hpctrain.scaling import RunEvidence

PARTS = {
    "input": 0.01, "compute": 0.5, "hidden_reduction": 0.1, "bubble": 0.0, "exposed_reduction": 0.05, "waiting": 0.02,
    "checkpoint": 0.01, "evaluation": 0.005, "other": 0.005,
}  # fmt: skip


def start(*, nodes: int = 2, per_node: int = 2, time: float = 100.0, **changes: Any) -> dict[str, Any]:
    by_node = [list(range(per_node * node, per_node * (node + 1))) for node in range(nodes)]
    recipe: dict[str, Any] = {
        "task": {"target": "m:T", "options": {}}, "run": {"precision": "fp32"}, "data": {"global_batch": 64},
        "parallel": {"shard": "none", "pipeline": 1, "tensor": 1}, "scaling": {"min_nodes": 1, "max_nodes": 6},
    }  # fmt: skip
    environment = {
        "ranks_by_node": by_node, "node_names": [f"n{node}" for node in range(nodes)], "start": {"seconds": 4.0},
        "algorithm": "hierarchical", "wire": "fp32", "reduction": {"overlap": True},
        "ranks": [
            {"rank": rank, "node": f"n{node}", "threads": 3, "device": "cpu", "cores": [3 * rank + k for k in range(3)]}
            for node, ranks in enumerate(by_node)
            for rank in ranks
        ],
    }  # fmt: skip
    recipe |= changes.pop("recipe", {})
    return {
        "time": time,
        "step": 0,
        "total_steps": 1000,
        "recipe": recipe,
        "environment": environment | changes,
    }


def step(number: int, *, time: float, samples: int = 16, compute: float = 0.6) -> dict[str, Any]:
    seconds = dict.fromkeys(("input", "bubble", "checkpoint", "evaluation", "other", "hidden_sync"), 0.0)
    seconds |= {"compute": compute, "exposed_sync": 0.1, "step": compute + 0.1, "after_sync": 0.0}
    return {"kind": "step", "time": time, "step": number, "samples": samples, "seconds": seconds}


def window(*, steps: int, time: float = 110.0, **parts: float) -> dict[str, Any]:
    return {
        "kind": "efficiency", "time": time, "step": steps, "steps": steps, "ranks": 4, "samples": 64 * steps,
        "step_s": 0.7, "parts": PARTS | parts, "own_s": {"mean": 0.6, "largest": 0.6, "ideal": 0.6},
    }  # fmt: skip


BUCKETS = {
    "kind": "buckets", "time": 111.0, "step": 100, "steps": 100, "backward_s": 0.3, "update_s": 0.06,
    "bytes": [4e6, 2e6], "ready_s": [0.15, 0.3],
}  # fmt: skip


def collected(
    records: Sequence[dict[str, Any]], *, starts: Sequence[dict[str, Any]] = (), **options: Any
) -> RunEvidence:
    evidence = RunEvidence(starts or [start()], **options)
    for record in records:
        evidence.add(record)
    return evidence


def usual() -> list[dict[str, Any]]:
    steps = [step(number, time=101.0 + number) for number in range(1, 21)]
    return [*steps, window(steps=30), window(steps=10, compute=0.9), BUCKETS]


def test_a_job_is_read_from_the_records_of_all_ranks() -> None:
    evidence = collected(usual())
    evidence.add({"kind": "energy", "time": 105.0, "seconds": 10.0, "total_j": 3000.0, "joules": {}}, rank=0)
    evidence.add({"kind": "energy", "time": 105.0, "seconds": 10.0, "total_j": 5000.0, "joules": {}}, rank=2)
    evidence.add(
        {"kind": "energy", "time": 50.0, "seconds": 10.0, "total_j": 1.0, "joules": {}}, rank=2
    )  # earlier start
    evidence.add({"kind": "checkpoint", "time": 120.0, "step": 20, "write_seconds": 7.0})
    assert evidence.enough
    found = evidence.job()
    assert (found.nodes, found.ranks_per_node, found.global_batch, found.steps_left) == (2, 2, 64, 980)
    assert found.parts["compute"] == pytest.approx((30 * 0.5 + 10 * 0.9) / 40)
    assert found.parts["waiting"] == pytest.approx(0.02)
    assert found.steps == 40
    computing_s = 0.6 + 0.1
    assert found.computing_s == pytest.approx(computing_s)
    assert found.backward_share == pytest.approx(0.3 / computing_s)
    assert found.update_share == pytest.approx(0.06 / computing_s)
    assert [(bucket.num_bytes, bucket.ready) for bucket in found.buckets] == [(4e6, 0.5), (2e6, 1.0)]
    assert (found.cores, found.threads, found.offloaded) == (6, 3, False)
    assert found.watts == pytest.approx(400.0)
    assert (found.least_nodes, found.most_nodes) == (1, 6)
    # 4 s until training began, 2 s to the first step, and a save.
    assert found.move_s == pytest.approx(4 + 2 + 7)
    again = evidence.job(finished=True)
    assert (again.steps_left, again.move_s) == (1000, 0.0)


def test_the_fixed_share_is_a_line_through_batches_of_several_sizes() -> None:
    # 0.2 s and 25 ms for each sample: of 0.6 s for 16 samples, a third is fixed.
    short = [step(number, time=130.0 + number, samples=4, compute=0.3) for number in range(30, 36)]
    found = collected([*usual(), *short]).job().fixed
    assert found.value == pytest.approx(1 / 3, abs=0.01)
    assert 0.05 <= found.error < 0.07
    assert found.source == "steps with 4, 16 samples on rank 0"


def test_an_earlier_start_on_other_nodes_shows_the_fixed_share_but_one_with_another_model_does_not() -> None:
    earlier = [step(number, time=10.0 + number, samples=32, compute=1.0) for number in range(5)]
    alike = [start(time=5.0, nodes=1), start()]
    found = collected([*earlier, *usual()], starts=alike).job()
    assert found.fixed.value == pytest.approx(1 / 3, abs=0.01)
    assert found.steps_left == 980
    for other in (
        {"recipe": {"task": {"target": "m:Other", "options": {}}}}, {"recipe": {"run": {"precision": "bf16"}}},
        {"per_node": 1},
    ):  # fmt: skip
        starts = [start(**({"time": 5.0, "nodes": 1} | other)), start()]
        found = collected([*earlier, *usual()], starts=starts).job()
        assert found.fixed.source.startswith("assumed")
        update = 0.06 / 0.7
        assert found.fixed.value == pytest.approx(update + (1 - update) * 0.2)


def test_one_rank_is_its_own_evidence() -> None:
    records = [*(step(number, time=101.0 + number) for number in range(1, 14)), BUCKETS]
    evidence = collected(records, starts=[start(nodes=1, per_node=1)])
    assert evidence.enough
    found = evidence.job()
    assert (found.nodes, found.ranks_per_node, found.steps) == (1, 1, 12)
    assert found.parts["compute"] == pytest.approx(0.6)
    assert found.parts["exposed_reduction"] == pytest.approx(0.1)
    assert found.parts["waiting"] == 0.0
    assert found.link is None


def test_the_link_is_the_best_that_is_known() -> None:
    probe = {"nodes": [{"bytes_per_s": 9e8, "latency_s": 3e-5}, {"bytes_per_s": 7e8, "latency_s": 5e-5}]}
    levels = [{"axis": "node", "num_members": 4, "latency_s": 8e-5, "bytes_per_s": 5e8}]
    calibrations = [{"found": {"levels": levels}}]
    during = {"kind": "probe", "time": 112.0, "step": 50, "bytes_per_s": [6e8, 8e8]}
    given = {"recipe": {"scaling": {"link": "10gbit"}}}

    def link(*more: dict[str, Any], **options: Any) -> tuple[float, bool]:
        found = collected([*usual(), *more], starts=[start(**given)], **options).job().link
        assert found is not None
        return found.bytes_per_s, found.measured

    assert link(probe=probe, calibrations=calibrations) == (7e8, True)
    assert link(during, calibrations=calibrations) == (5e8, True)
    assert link(during) == (6e8, True)
    assert link() == (pytest.approx(0.94 * 1.25e9), False)
    assert link(link_bytes_per_s=1e9) == (pytest.approx(0.94e9), False)
    assert collected(usual()).job().link is None
    found = collected(usual(), calibrations=calibrations).job().link
    assert found is not None
    assert found.latency_s == pytest.approx(2e-5)  # 2 log2 4 messages


def test_too_little_is_refused_with_what_is_missing() -> None:
    evidence = collected([])
    assert not evidence.enough
    with pytest.raises(UsageError, match="fewer than 10 steps have been measured on all ranks"):
        evidence.job()
    with pytest.raises(UsageError, match="buckets of gradients are not recorded yet"):
        collected(usual()[:-1]).job()
    uneven = start()
    uneven["environment"]["ranks_by_node"] = [[0, 1, 2], [3]]
    with pytest.raises(UsageError, match="the nodes have different numbers of ranks: 3, 1"):
        collected(usual(), starts=[uneven]).job()
    for key, value in (("pipeline", 2), ("tensor", 2), ("shard", "parameters")):
        with pytest.raises(UsageError, match=rf"parallel\.{key} = "):
            collected(usual(), starts=[start(recipe={"parallel": {key: value}})]).job()
    local = start(recipe={"reduction": {"schedule": {"method": "local-sgd", "every": 5}}})
    with pytest.raises(UsageError, match=r"no formula for reduction\.schedule with method = 'local-sgd'"):
        collected(usual(), starts=[local]).job()


def test_memory_does_not_grow_with_the_run() -> None:
    evidence = collected(usual())
    for number in range(3000):
        evidence.add(step(21 + number, time=200.0 + number, samples=1 + number % 40))
        evidence.add(window(steps=10, time=200.0 + number))
    assert len(evidence._by_samples) == 8
    assert max(map(len, evidence._by_samples.values())) <= 200
    assert len(evidence._windows) == 60
    assert len(evidence._own) == 200
