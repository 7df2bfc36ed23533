"""Backends among real processes: how they end, fall back, and stand beside each other."""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any

import pytest

from tests.ranks.comm import comm_cases
from tests.ranks_launcher import run_command, run_ranks, variables_of_another_mpi

pytestmark = pytest.mark.launches
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: hpctrain runs without it"
)
HOROVOD = pytest.param("horovod", marks=needs_horovod)


@pytest.mark.parametrize("backend", ["mpi", HOROVOD])
def test_abort_ends_every_rank_with_its_exit_code(backend: str) -> None:
    result = run_ranks(2, comm_cases.one_rank_aborts, 7, backend=backend, expect=7)
    assert "this line must not be lost" in result.stdout
    assert result.wall_s < 200


def test_an_error_of_one_rank_does_not_leave_the_others_waiting() -> None:
    result = run_ranks(2, comm_cases.one_rank_raises_alone, expect=3)
    assert "only rank 0 knows" in result.stderr


@functools.cache
def in_one_launch(backend: str) -> list[dict[str, Any]]:
    return run_ranks(3, comm_cases.contract_and_totals, backend=backend).outputs


@functools.cache
def opened_over_mpi() -> list[dict[str, Any]]:
    return run_ranks(4, comm_cases.all_that_opens_worlds).outputs


@pytest.mark.parametrize("backend", ["mpi", HOROVOD])
def test_small_pieces_keep_the_contract(backend: str) -> None:
    assert [output["contract"] for output in in_one_launch(backend)] == [[], [], []]


@pytest.mark.parametrize("backend", ["mpi", HOROVOD])
def test_a_sessions_totals_are_right_to_the_bit_on_every_rank(backend: str) -> None:
    tenths = [0.1 * (1 + rank) for rank in range(3)]
    samples = 2.0**52
    for output in in_one_launch(backend):
        found = output["totals"]
        # Added in rank order: the 1 is lost in 1e16.
        assert found["sum"] == {"loss": sum(tenths), "samples": 3 * samples, "hidden": 0.0}
        assert found["mean"] == {"loss": sum(tenths) / 3, "samples": samples, "hidden": 0.0}
        assert found["max"] == {"loss": max(tenths), "samples": samples, "hidden": 1e16}
        for name in ("float16", "bfloat16", "float32", "float64", "int64"):
            unit = 2**55 + 1 if name == "int64" else 2.0**10  # times 1, 2 and 3
            assert found[f"sum {name}"] == [[6 * unit, 18 * unit], [-12 * unit, 0]], name
            assert found[f"max {name}"] == [[3 * unit, 9 * unit], [-2 * unit, 0]], name
            mean = None if name == "int64" else [[2 * unit, 6 * unit], [-4 * unit, 0]]
            assert found.get(f"mean {name}") == mean, name
        assert found["mean of large"] == pytest.approx(60000, abs=32)
        assert found["nan"]


@needs_horovod
def test_horovod_and_mpi_live_in_one_process() -> None:
    found = [output["beside MPI"] for output in opened_over_mpi()]
    assert found == [{"sums": [10.0] * 4, "after": 4.0, "rank": rank} for rank in range(4)]


@needs_horovod
def test_a_rank_that_is_done_early_does_not_take_mpi_from_the_others() -> None:
    run_ranks(2, comm_cases.one_rank_is_late_at_the_end, backend="horovod")


@needs_horovod
def test_horovod_tells_every_rank_of_buffers_that_differ() -> None:
    for rank, output in enumerate(in_one_launch("horovod")):
        assert output["buffers that differ"].startswith(f"BufferMismatch: all_reduce on rank {rank} of 3")


def test_auto_on_cpus_is_mpi_and_does_not_even_load_horovod() -> None:
    for output in opened_over_mpi():
        assert output["auto"] == {
            "backend": "mpi", "reductions": "mpi", "reason": "the fastest on CPUs", "notes": [],
            "ranks": [0, 1, 2, 3], "horovod loaded": False,
        }  # fmt: skip


@needs_horovod
def test_an_algorithm_of_horovods_makes_auto_horovod_beside_mpi() -> None:
    for found in (output["an algorithm of Horovod's"] for output in opened_over_mpi()):
        assert (found["backend"], found["reductions"]) == ("mpi", "horovod")
        assert found["reason"] == "nccl-torus was asked for"


@needs_horovod
def test_auto_falls_back_to_mpi_on_all_ranks_and_says_where_horovod_is_missing() -> None:
    for found in (output["missing on ranks 1 and 2"] for output in opened_over_mpi()):
        assert found["backend"] == found["reductions"] == "mpi"
        assert found["ranks"] == [0, 1, 2, 3]
        assert len(found["notes"]) == 1
        assert "backend mpi instead of horovod on ranks 1-2: Horovod cannot be loaded" in found["notes"][0]


@needs_horovod
def test_horovod_that_is_asked_for_and_missing_on_a_rank_is_an_error_on_all() -> None:
    for found in (output["asked for and missing on rank 1"] for output in opened_over_mpi()):
        assert found["error"] == "LaunchError"
        assert found["text"].startswith("rank 1 (")
        assert "Horovod cannot be loaded" in found["text"]


@needs_horovod
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_horovod_runs_only_while_a_reduction_of_its_own_does(num_ranks: int) -> None:
    """The rest goes over MPI; it starts and stops as often as it is needed, with groups of ranks too."""
    if num_ranks == 4:
        outputs = [output["when needed"] for output in opened_over_mpi()]
    else:
        outputs = run_ranks(num_ranks, comm_cases.horovod_when_needed).outputs
    for found in outputs:
        assert found["contract"] == []
        total = num_ranks * (num_ranks + 1) / 2
        assert found["sums"] == [total] * 6
        assert found["running"] == [False, *[True, True, False] * 3]
        # Groups cost something in every cycle, so Horovod starts anew with them when the first is made.
        assert found["groups"] == ["0", *["1" if num_ranks > 2 else "0"] * 5]


@needs_horovod
def test_a_sessions_own_reductions_do_not_start_horovod_and_its_own_do() -> None:
    for output in opened_over_mpi():
        assert output["in a session"] == {
            "hierarchical": ["hierarchical", False], "auto": ["auto", False], "flat": ["flat", True],
            "closed": False,
        }  # fmt: skip


@needs_horovod
def test_horovod_runs_where_mpi4py_is_missing() -> None:
    argv = ["-c", "import sys, runpy; sys.modules['mpi4py'] = None; sys.argv = ['x', *sys.argv[1:]]; "]
    argv[1] += "runpy.run_module('tests.ranks.comm.comm_cases', run_name='__main__')"
    result = run_command(2, [sys.executable, *argv, "auto"], expect=0)
    for rank in range(2):  # lines of two ranks may come as one
        assert f"rank {rank} of 2 over horovod, mpi4py False" in result.stdout
    result = run_command(2, [sys.executable, *argv, "horovod", "abort"], expect=6)
    assert result.wall_s < 200


def test_without_any_library_the_message_says_what_to_install() -> None:
    code = "import sys; sys.modules['mpi4py'] = sys.modules['horovod'] = None; "
    code += "from hpctrain.comm import open_world; open_world()"
    result = run_command(2, [sys.executable, "-c", code])
    assert result.returncode != 0
    assert "neither Horovod nor mpi4py can be loaded on rank" in result.stderr
    assert "make setup" in result.stderr


def test_variables_of_another_launch_are_found_out() -> None:
    """Started alone, with variables that say rank 1 of 4: MPI counts one rank."""
    env = variables_of_another_mpi(rank=1, num_ranks=4)
    code = "from hpctrain.comm import open_world; open_world('mpi')"
    result = run_command(None, [sys.executable, "-c", code], env=env)
    assert result.returncode != 0
    assert "rank 1 of 4" in result.stderr
    assert "rank 0 of 1" in result.stderr
