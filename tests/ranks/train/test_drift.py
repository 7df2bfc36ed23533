"""On real ranks, over every way to sum gradients: ranks that drift are found, and a dropped step leaves no NaN."""

from __future__ import annotations

import pytest

from tests.ranks.train import drift_cases
from tests.ranks_launcher import run_ranks

pytestmark = pytest.mark.launches
ALGORITHMS = [
    ["flat", "fp32"],
    ["hierarchical", "fp16"],
    ["ring", "int8"],
    ["direct", "fp32"],
    ["hierarchical", "fp32"],
]


def test_drift_is_found_and_dropped_steps_leave_nothing() -> None:
    result = run_ranks(4, drift_cases.drift, ALGORITHMS, ranks_per_node=2)
    cases = result.outputs[0]
    assert len(cases) == 3 * len(ALGORITHMS) + 2 * len(drift_cases.SPLITS) + 2 * 2
    for name, (step, text, finite, applied) in cases.items():
        assert all(output[name][:2] == [step, text] for output in result.outputs), name
        assert all(finite), name
        assert [number for number, ok in enumerate(applied, start=1) if not ok] == [3], name
        if name.endswith(" nothing"):
            assert (step, len(applied)) == (0, drift_cases.STEPS), name
        elif name.endswith(" lr"):
            assert step == 8, name
            assert "lr of parameter group 0 is 0.1 on ranks 0-2, 0.05 on rank 3." in text, name
        else:
            assert step == 8, name
            if name.endswith(" part"):
                assert "parameters: '1.weight' between ranks 1, 3 (ranks 1, 3 hold the same part)" in text, (
                    name
                )
            elif name.startswith("by node"):
                assert "parameters: '3.bias' between ranks 1, 3 (ranks 1, 3 hold the same part)" in text, name
            else:
                assert "parameters: '3.bias' on rank 3 by up to 0.5" in text, name
