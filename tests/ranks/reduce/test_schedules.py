"""Schedules on real ranks: the numbers of a reference with all workers in one process, and the bits when resumed."""

from __future__ import annotations

import pytest
import torch

from tests.ranks.reduce import schedule_cases
from tests.ranks_launcher import RanksResult, run_ranks

pytestmark = pytest.mark.launches

# The node of each rank; each launch loads what the one before it has saved, on another number of ranks.
NODES = {1: "a", 2: "ab", 3: "aab", 4: "aabb"}
STEPS = schedule_cases.STEPS
# Steps that end a round (e), only vote (v), or are local (l); a vote is due in the first step of rounds, and by time.
ENDS = {
    "local-sgd": (3, 6, 9),
    "post-local": (1, 2, 3, 4, 6, 8, 10),
    "diloco": (3, 6, 9),
    "diloco, plain outer": (4, 8),
    "daso": (6, 10),
    "daso, waits": (1, 2, 3, 5, 7, 9, 11),
    "diloco int8": (3, 6, 9),
    "daso int8": (6, 10),
    "local-sgd fp16": (3, 6, 9),
}


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[int, RanksResult]:
    directory = tmp_path_factory.mktemp("schedules")
    found: dict[int, RanksResult] = {}
    for num_ranks, nodes in NODES.items():
        before = num_ranks - 1 if num_ranks > 1 else None
        found[num_ranks] = run_ranks(
            num_ranks, schedule_cases.everything, nodes, str(directory), before, timeout_s=400
        )
    return found


@pytest.mark.parametrize("num_ranks", NODES)
def test_with_rounds_of_one_step_sgd_is_synchronous_training(
    launches: dict[int, RanksResult], num_ranks: int
) -> None:
    for output in launches[num_ranks].outputs:
        assert set(output["every step"]) == {"local-sgd", "diloco", "daso"}
        assert all(difference < 1e-12 for difference in output["every step"].values())


@pytest.mark.parametrize("num_ranks", NODES)
@pytest.mark.parametrize("case", schedule_cases.CASES)
def test_parameters_are_those_of_the_reference_after_each_step(
    launches: dict[int, RanksResult], num_ranks: int, case: str
) -> None:
    for output in launches[num_ranks].outputs:
        found = output["reference"][case]
        assert len(found["differences"]) == STEPS
        assert max(found["differences"]) < 1e-12


@pytest.mark.parametrize("num_ranks", NODES)
@pytest.mark.parametrize("case", schedule_cases.INT8)
def test_with_a_lossy_wire_parameters_differ_by_rounding(
    launches: dict[int, RanksResult], num_ranks: int, case: str
) -> None:
    for output in launches[num_ranks].outputs:
        furthest = max(output["int8"][case]["differences"])
        assert furthest < 2e-3
        assert (furthest > 1e-12) == (num_ranks > 1)  # one rank sends nothing


@pytest.mark.parametrize("num_ranks", NODES)
@pytest.mark.parametrize("case", ENDS)
def test_rounds_end_where_the_schedule_says_and_then_all_ranks_hold_the_same_bits(
    launches: dict[int, RanksResult], num_ranks: int, case: str
) -> None:
    for output in launches[num_ranks].outputs:
        found = output["reference" if case in schedule_cases.CASES else "int8"][case]
        assert tuple(step for step, kind in enumerate(found["kinds"], start=1) if kind == "e") == ENDS[case]
        assert found["same"]
    assert len({output["reference"]["daso"]["kinds"] for output in launches[num_ranks].outputs}) == 1


@pytest.mark.parametrize("num_ranks", NODES)
def test_a_training_that_resumes_within_a_round_or_at_its_end_gives_the_same_bits(
    launches: dict[int, RanksResult], num_ranks: int
) -> None:
    for output in launches[num_ranks].outputs:
        assert set(output["resumed"]) == {*schedule_cases.CASES, *schedule_cases.INT8}
        assert all(steps == [] for steps in output["resumed"].values())


@pytest.mark.parametrize("num_ranks", [n for n in NODES if n > 1])
@pytest.mark.parametrize("case", ["local-sgd", "diloco", "daso"])
def test_another_number_of_workers_begins_with_the_mean_of_what_the_workers_held(
    launches: dict[int, RanksResult], num_ranks: int, case: str
) -> None:
    before = num_ranks - 1
    outputs = [output["elsewhere"] for output in launches[before].outputs]
    rank_of_worker = range(before)
    if case == "daso":
        nodes = NODES[before]
        rank_of_worker = [nodes.index(node) for node in dict.fromkeys(nodes)]
        if len(rank_of_worker) == len(set(NODES[num_ranks])):
            pytest.skip("as many nodes as before: each continues as it was")
    of_workers = [
        [torch.tensor(v, dtype=torch.float64) for v in outputs[rank][f"{case} saved"]]
        for rank in rank_of_worker
    ]
    for output in launches[num_ranks].outputs:
        loaded = [
            torch.tensor(values, dtype=torch.float64) for values in output["elsewhere"][f"{case} loaded"]
        ]
        for number, values in enumerate(loaded):
            mean = torch.stack([of_worker[number] for of_worker in of_workers]).mean(0)
            assert (
                float((values - mean).abs().max()) < 1e-6
            )  # moments are float32 in the checkpoint of an AdamW


@pytest.mark.parametrize("num_ranks", NODES)
def test_running_statistics_are_averaged_when_a_round_ends(
    launches: dict[int, RanksResult], num_ranks: int
) -> None:
    assert all(output["statistics"] < 1e-15 for output in launches[num_ranks].outputs)


@pytest.mark.parametrize("num_ranks", [n for n in NODES if len(set(NODES[n])) > 1])
def test_rounds_of_five_steps_send_a_fifth_of_the_bytes(
    launches: dict[int, RanksResult], num_ranks: int
) -> None:
    synchronous, in_rounds = launches[num_ranks].outputs[0]["bytes"]
    assert synchronous > 0
    assert abs(synchronous / in_rounds / 5 - 1) < 0.01
