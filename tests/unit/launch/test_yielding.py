"""Which ranks run their command once more with the library, and what the others are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.launch.cores import RankCores
from hpctrain.launch.yielding import (
    describe_oversubscription,
    find_yield_library,
    in_effect,
    lacks_yield_library,
    restart_environment,
)

LIBRARY = "/site/_yield_by_sleep.so"
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "8",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "8"}


@pytest.mark.parametrize("environ", [MPIRUN, SRUN, HYDRA], ids=["mpirun", "srun", "mpiexec of MPICH"])
def test_a_rank_among_more_ranks_than_cores_runs_once_more_with_the_library(environ: dict[str, str]) -> None:
    added = restart_environment({**environ, "LD_PRELOAD": "/mine.so"}, num_cpus=2, library=LIBRARY)
    assert added is not None
    assert added["LD_PRELOAD"] == f"/mine.so:{LIBRARY}"
    assert added.get("OMPI_MCA_mpi_yield_when_idle") == (None if environ is HYDRA else "1")
    assert restart_environment({**environ, **added}, num_cpus=2, library=LIBRARY) is None
    dropped = {name: value for name, value in added.items() if name != "LD_PRELOAD"}
    assert restart_environment({**environ, **dropped}, num_cpus=2, library=LIBRARY) is None


@pytest.mark.parametrize(
    ("environ", "num_cpus", "library"),
    [
        pytest.param(MPIRUN, 8, LIBRARY, id="a core each"),
        pytest.param(MPIRUN, None, LIBRARY, id="cores unknown"),
        pytest.param(MPIRUN, 2, None, id="not compiled"),
        pytest.param(
            {**MPIRUN, "OMPI_MCA_mpi_yield_when_idle": "0"}, 2, LIBRARY, id="the user wants polling"
        ),
        pytest.param({**MPIRUN, "LD_PRELOAD": LIBRARY}, 2, LIBRARY, id="preloaded by hpctrain launch"),
        pytest.param({**MPIRUN, "OMPI_COMM_WORLD_RANK": "9"}, 2, LIBRARY, id="contradictory"),
        pytest.param({"ALPS_APP_PE": "3", "HPCTRAIN_NUM_RANKS": "8"}, 2, LIBRARY, id="another MPI"),
        pytest.param({}, 2, LIBRARY, id="no rank"),
    ],
)
def test_any_other_rank_runs_as_it_is(
    environ: dict[str, str], num_cpus: int | None, library: str | None
) -> None:
    assert restart_environment(environ, num_cpus=num_cpus, library=library) is None


def test_ranks_that_may_starve_are_told_the_cure() -> None:
    crowd = [RankCores(host="a", cpus=frozenset({0, 1}), cores=frozenset({0, 1}))] * 3
    alone = [RankCores(host="b", cpus=frozenset({0}), cores=frozenset({0}))]
    text = describe_oversubscription(crowd + alone, lacks_library=[True] * 4)
    assert text is not None
    assert "3 ranks share 2 cores of a" in text
    assert "hpctrain launch" in text
    assert "LD_PRELOAD=" in text
    assert describe_oversubscription(crowd + alone, lacks_library=[False] * 4) is None
    assert describe_oversubscription(crowd[:2] + alone, lacks_library=[True] * 3) is None


def test_a_library_counts_once_it_is_mapped() -> None:
    assert lacks_yield_library("7f libopen-pal.so.40\n")
    assert not lacks_yield_library("7f libopen-pal.so.40\n7e /site/_yield_by_sleep.so\n")
    assert not lacks_yield_library("7f libmpich.so.12\n")
    assert in_effect("7e /site/_yield_by_sleep.so\n")
    assert not in_effect()


def test_a_path_that_ld_preload_cannot_hold_is_no_library(tmp_path: Path) -> None:
    assert find_yield_library(tmp_path) is None
    for name in ("good", "of a user"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "_yield_by_sleep.so").touch()
    assert find_yield_library(tmp_path / "good") == str(tmp_path / "good" / "_yield_by_sleep.so")
    assert find_yield_library(tmp_path / "of a user") is None
