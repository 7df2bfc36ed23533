"""On real ranks, over every way to sum gradients: ranks that drift are found, and a dropped step leaves no NaN."""

from __future__ import annotations

import importlib.util

import pytest

from tests.ranks.train import drift_cases
from tests.ranks_launcher import run_ranks

pytestmark = pytest.mark.launches
MPI = [
    ["flat", "fp32"],
    ["hierarchical", "fp16"],
    ["ring", "int8"],
    ["direct", "fp32"],
    ["hierarchical", "fp32"],
]


@pytest.mark.parametrize(
    ("backend", "num_ranks", "per_node", "algorithms"),
    [
        ("mpi", 4, 2, MPI),
        pytest.param(
            "horovod", 2, 2, [["flat", "fp32"], ["flat", "fp16"]],
            marks=pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"),
        ),
    ],
)  # fmt: skip
def test_drift_is_found_and_dropped_steps_leave_nothing(
    backend: str, num_ranks: int, per_node: int, algorithms: list[list[str]]
) -> None:
    result = run_ranks(num_ranks, drift_cases.drift, algorithms, backend=backend, ranks_per_node=per_node)
    cases = result.outputs[0]
    splits = drift_cases.SPLITS[num_ranks]
    assert len(cases) == 3 * len(algorithms) + 2 * len(splits) + 2 * len(
        splits.keys() & {"by node", "tensor"}
    )
    last = num_ranks - 1
    for name, (step, text, finite, applied) in cases.items():
        assert all(output[name][:2] == [step, text] for output in result.outputs), name
        assert all(finite), name
        assert [number for number, ok in enumerate(applied, start=1) if not ok] == [3], name
        if name.endswith(" nothing"):
            assert (step, len(applied)) == (0, drift_cases.STEPS), name
        elif name.endswith(" lr"):
            assert step == 8, name
            rest = "rank 0" if num_ranks == 2 else f"ranks 0-{last - 1}"
            assert f"lr of parameter group 0 is 0.1 on {rest}, 0.05 on rank {last}." in text, name
        else:
            assert step == 8, name
            if name.endswith(" part"):
                assert "parameters: '1.weight' between ranks 1, 3 (ranks 1, 3 hold the same part)" in text, (
                    name
                )
            elif name.startswith("by node"):
                assert "parameters: '3.bias' between ranks 1, 3 (ranks 1, 3 hold the same part)" in text, name
            else:
                where = "between ranks 0-1" if num_ranks == 2 else f"on rank {last}"
                assert f"parameters: '3.bias' {where} by up to 0.5" in text, name
