"""Every algorithm with every wire on real ranks: right to a stated bound, the same bits on every rank and each time."""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any

import pytest

from tests.ranks.reduce import reduction_cases
from tests.ranks_launcher import run_command, run_ranks

pytestmark = pytest.mark.launches
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: hpctrain runs without it"
)
# Ranks by node. The first of each number of ranks is summed with every combination of algorithm, wire and dtype.
LAYOUTS: dict[int, dict[str, list[list[int]]]] = {
    1: {"one rank": [[0]]},
    2: {"one rank per node": [[0], [1]], "one node": [[0, 1]]},
    3: {"uneven": [[0, 1], [2]], "one node": [[0, 1, 2]], "one rank per node": [[0], [1], [2]]},
    4: {
        "two by two": [[0, 1], [2, 3]],
        "round robin": [[0, 2], [1, 3]],
        "uneven": [[0, 1, 2], [3]],
    },
}
# Over Horovod only `flat` and `hierarchical-flat` are Horovod's own: the others send the same messages as over MPI.
LAUNCHES = [
    *(("mpi", num_ranks) for num_ranks in LAYOUTS),
    *(
        pytest.param(
            "horovod",
            num_ranks,
            marks=[needs_horovod, *([] if num_ranks in (2, 3) else [pytest.mark.thorough])],
        )
        for num_ranks in LAYOUTS
    ),
]
# Of one encoding, over the largest magnitude.
ROUNDING = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 253}


def what_runs(algorithm: str, *, wire: str, ranks_by_node: list[list[int]]) -> str:
    """The same over MPI and over Horovod beside MPI."""
    num_ranks, num_nodes = sum(map(len, ranks_by_node)), len(ranks_by_node)
    backend_sums = wire in ("fp32", "fp16")
    if num_ranks == 1:
        return "flat"
    if num_ranks == num_nodes:
        algorithm = {
            "hierarchical": "direct", "hierarchical-ring": "ring", "hierarchical-flat": "direct",
        }.get(algorithm, algorithm)  # fmt: skip
    elif algorithm == "hierarchical-flat" and not backend_sums:
        return "hierarchical"
    elif num_nodes == 1:
        algorithm = {"hierarchical-ring": "hierarchical", "hierarchical-flat": "flat"}.get(
            algorithm, algorithm
        )
    return "direct" if algorithm == "flat" and not backend_sums else algorithm


def bound(name: str, *, ran: str, ranks_by_node: list[list[int]], backend: str) -> float:
    """Encodings of sums that are at most so many times the largest magnitude, over that.

    By slices every summand is rounded once and the sum once. Round a ring each of N - 1 partial sums is; so are
    Horovod's, which adds float16 in float16; two levels over half buffers are rounded once more. Ranks of one node that
    share memory encode nothing, nor does one rank.
    """
    algorithm, wire, dtype = name.split()
    num_ranks = sum(map(len, ranks_by_node))
    if wire == "fp32" or num_ranks == 1 or (ran == "hierarchical" and len(ranks_by_node) == 1):
        return num_ranks * (2.0**-52 if dtype == "float64" else ROUNDING["fp32"])
    by_steps = "ring" in algorithm or backend == "horovod"
    return ROUNDING[wire] * (num_ranks if by_steps else 3) * 1.1


@functools.cache
def sums_of(backend: str, num_ranks: int) -> dict[str, dict[str, dict[str, Any]]]:
    layouts = LAYOUTS[num_ranks]
    launch = run_ranks(
        num_ranks, reduction_cases.sums, layouts, next(iter(layouts)), backend=backend, timeout_s=800
    )
    return launch.outputs[0]


@pytest.mark.parametrize(("backend", "num_ranks"), LAUNCHES)
def test_sums_are_within_their_bound_on_every_layout(backend: str, num_ranks: int) -> None:
    for number, (layout, found) in enumerate(sums_of(backend, num_ranks).items()):
        assert len(found) == (6 * 4 * 2 if number == 0 else 5 * (4 + 1))
        ranks_by_node = LAYOUTS[num_ranks][layout]
        for name, result in found.items():
            most = bound(name, ran=result["ran"], ranks_by_node=ranks_by_node, backend=backend)
            assert result["error"] <= most, (layout, name, result)
            assert result["marks"][0] == result["marks"][1], (layout, name)


@pytest.mark.parametrize(("backend", "num_ranks"), LAUNCHES)
def test_what_was_asked_for_runs_wherever_it_can(backend: str, num_ranks: int) -> None:
    for layout, found in sums_of(backend, num_ranks).items():
        for name, result in found.items():
            algorithm, wire, _ = name.split()
            expected = what_runs(algorithm, wire=wire, ranks_by_node=LAYOUTS[num_ranks][layout])
            assert result["ran"] == expected, (layout, name)


def test_another_run_sums_to_the_same_bits_whichever_rank_comes_late() -> None:
    again = {layout: LAYOUTS[3][layout] for layout in ("one node", "uneven")}
    found = run_ranks(3, reduction_cases.sums, again, None, 0.002, backend="mpi", timeout_s=800).outputs[0]
    for layout, results in found.items():
        assert len(results) == 5 * (4 + 1)
        for name, result in results.items():
            assert result["marks"] == sums_of("mpi", 3)[layout][name]["marks"], (layout, name)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.thorough), 4])
def test_ranks_of_a_node_sum_what_the_others_have_filled_so_far(num_ranks: int) -> None:
    found = run_ranks(num_ranks, reduction_cases.uneven, backend="mpi")
    assert found.outputs == [0] * num_ranks


SESSION = """
import sys
if {without_mpi4py}: sys.modules["mpi4py"] = None
import torch, hpctrain
with hpctrain.init(backend={backend!r}, timeout_s=800) as session:
    model = torch.nn.Sequential(*(torch.nn.Linear(500, 500) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    updater = session.distributed_optimizer(model, optimizer, algorithm={algorithm!r}, bucket_bytes=500_000)
    updater.backward(model(torch.randn(4, 500)).square().mean(), weight=1 / session.world_size)
    {then}
"""


def session_script(**parts: object) -> list[str]:
    return [sys.executable, "-c", SESSION.format(**parts)]


@needs_horovod
def test_horovod_without_mpi4py_trains_with_its_own_operations() -> None:
    then = "updater.step(); print(updater.step.__self__._reducer.algorithm)"
    command = session_script(without_mpi4py=True, backend="horovod", algorithm="hierarchical-ring", then=then)
    done = run_command(2, command, env={"HPCTRAIN_RANKS_PER_NODE": "2"}, expect=0)
    assert "the backend horovod has no point-to-point messages here" in done.stdout + done.stderr


def test_an_error_between_backward_and_step_ends_with_its_own_code() -> None:
    """Reductions are under way in memory that the session gives back."""
    then = 'session.all_reduce({"a" if session.rank else "b": 1.0})'
    command = session_script(without_mpi4py=False, backend="mpi", algorithm="hierarchical", then=then)
    done = run_command(4, command, env={"HPCTRAIN_RANKS_PER_NODE": "2"}, expect=6)
    assert "must be the same on every rank" in done.stderr


WIDTHS = """
import torch, hpctrain
with hpctrain.init(backend="mpi", timeout_s=800) as session:
    for width in (1, 2, 3, 10, 11, 12, 13, 40, 41):
        model = torch.nn.Linear(width, width).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        updater = session.distributed_optimizer(model, optimizer, algorithm="hierarchical")
        updater.backward(model(torch.ones(2, width).double()).sum(), weight=1 / session.world_size)
        assert abs(updater.step().grad_norm - 2 * (width * (width + 1)) ** 0.5) < 1e-9, width
        updater.close()
    if session.rank == 0:
        print("all widths")
"""


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_ranks_memory_lies_where_float64_can_be_summed(num_ranks: int) -> None:
    """MPI lays the memory of one rank of a node right behind that of another, of whatever size it is."""
    done = run_command(num_ranks, [sys.executable, "-c", WIDTHS], expect=0)
    assert "all widths" in done.stdout
