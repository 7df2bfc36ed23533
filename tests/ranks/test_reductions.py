"""Every algorithm with every wire on real ranks: right to a stated bound, the same bits on every rank and each time."""

from __future__ import annotations

import importlib.util

import pytest

from tests.ranks import reduction_cases
from tests.ranks_launcher import run_ranks

pytestmark = pytest.mark.launches
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: hpctrain runs without it"
)
LAYOUTS = {1: [[0]], 2: [[0], [1]], 3: [[0, 1], [2]], 4: [[0, 1], [2, 3]]}
# Of one encoding, over the largest magnitude.
ROUNDING = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 253}


def bound(name: str, *, num_ranks: int, backend: str) -> float:
    """Encodings of sums that are at most so many times the largest magnitude, over that.

    By slices every summand is rounded once and the sum once. Round a ring each of N - 1 partial sums is; so are
    Horovod's, which adds float16 in float16; two levels over half buffers are rounded once more.
    """
    algorithm, wire, dtype = name.split()
    if wire == "fp32":
        return num_ranks * (2.0**-52 if dtype == "float64" else ROUNDING["fp32"])
    by_steps = "ring" in algorithm or backend == "horovod"
    return ROUNDING[wire] * (num_ranks if by_steps else 3) * 1.1


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", ["mpi", pytest.param("horovod", marks=needs_horovod)])
def test_sums_are_within_their_bound(backend: str, num_ranks: int) -> None:
    found = run_ranks(
        num_ranks, reduction_cases.sums, LAYOUTS[num_ranks], backend=backend, timeout_s=200
    ).outputs[0]
    assert len(found) == 6 * 4 * 2
    for name, result in found.items():
        assert result["error"] <= bound(name, num_ranks=num_ranks, backend=backend), (name, result)
        assert result["marks"][0] == result["marks"][1], name
    if num_ranks == 4:
        for algorithm in ("flat", "ring", "direct", "hierarchical", "hierarchical-ring", "hierarchical-flat"):
            assert found[f"{algorithm} fp32 float32"]["ran"] == algorithm
