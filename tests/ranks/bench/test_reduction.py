"""How the reduction benchmark starts its ranks, and that plain MPI is timed with no more work than it needs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.places import OneNode, RanksFailed
from benchmarks.starting import REPOSITORY, without_places
from hpctrain.launch import plan_launch, survey_machine
from tests.ranks.bench import reduction_cases
from tests.ranks_launcher import OUTER_LAUNCHER, run_ranks

pytestmark = pytest.mark.launches


def test_all_sides_get_what_hpctrain_launch_gives_and_nothing_else() -> None:
    """All methods run in the same processes, so what a rank finds is what every one of them has."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(OUTER_LAUNCHER)}
    command = [sys.executable, "-m", "benchmarks.ranks", "benchmarks.reduction.ranks", "nothing"]
    command += ["DIRECTORY/settings.json", "DIRECTORY/result.json"]
    plan = plan_launch(command, num_ranks=2, environ=mine, machine=survey_machine())
    place = OneNode("benchmarks.reduction.ranks")
    place.run("nothing", {}, timeout_s=300)
    (start,) = place.starts
    assert start.launched == without_places(plan.shell_line(), directory=Path("/nowhere"))
    assert start.command == without_places(
        f"GLOO_SOCKET_IFNAME=lo hpctrain launch -n 2 -- {' '.join(command)}", directory=Path("/nowhere")
    )
    (ranks,) = start.ranks  # the two are alike
    assert ranks["ranks"] == [0, 1]
    assert ranks["cores"] == sorted(os.sched_getaffinity(0))
    given = {
        **mine,
        **plan.env_updates,
        "GLOO_SOCKET_IFNAME": "lo",
    }  # the last is all that the benchmark adds
    preload = given.get("LD_PRELOAD", "").replace(":", " ").split()
    assert ranks["preload"] == [Path(name).name for name in preload]
    del ranks["variables"]["HPCTRAIN_STOP_SIGNAL"]  # from `hpctrain launch`, whatever it starts
    of_mpirun = {name for name, value in ranks["variables"].items() if given.get(name) != value}
    assert all(
        name.startswith(("OMPI_MCA_hwloc", "OMPI_MCA_rmaps", "OMPI_MCA_mpi_over")) for name in of_mpirun
    )
    assert str(REPOSITORY) not in str(start.as_json())


def test_a_launch_that_fails_says_why() -> None:
    with pytest.raises(RanksFailed, match="KeyError: 'no such case'"):
        OneNode("benchmarks.reduction.ranks").run("no such case", {}, timeout_s=300)


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_plain_mpi_takes_the_mean_in_the_loss_as_ours_does(num_ranks: int) -> None:
    outputs = run_ranks(num_ranks, reduction_cases.plain_mpi_and_ours).outputs
    for found in outputs:
        assert found["sent off its part of the mean"] < 1e-6 * found["largest gradient"] + 1e-7
        assert found["parameters apart"] < 1e-6
