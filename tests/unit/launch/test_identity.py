"""Who am I: from the variables of each launcher, as recorded or composed in tests/fixtures/launchers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.comm import SerialWorld, open_world
from hpctrain.errors import LaunchError, TopologyError
from hpctrain.launch import RankIdentity, cross_check, identify
from hpctrain.launch.rank_identity.identity import LAUNCHERS, expand_counts

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "launchers"


def recorded(name: str) -> dict[str, str]:
    """The variables in tests/fixtures/launchers/NAME.env."""
    lines = (FIXTURES / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


OPEN_MPI = recorded("open-mpi-4")
SLURM_STEP = recorded("slurm-step")
ALONE = ("none", 0, 1, 0, 1, 0, "host")
# File -> launcher, rank, number of ranks, local rank, local size, node's number, node's name.
EXPECTED: dict[str, tuple[object, ...]] = {
    "cray-alps": ("Cray ALPS", 5, 8, None, None, None, "host"),
    "cray-pals": ("Cray PALS", 5, 8, 1, 4, 1, "host"),
    "flux-batch-shell": ALONE,
    "flux-run": ("Flux", 5, 8, 1, None, None, "host"),
    "flux-run-spectrum": ("Flux", 5, 8, 1, None, None, "host"),
    "intel-mpi": ("Intel MPI", 1, 4, 1, 4, None, "host"),
    "login-node": ALONE,
    "lsf-batch-shell": ALONE,
    "lsf-jsrun": ("jsrun", 5, 8, 1, 4, None, "host"),
    "mpich": ("MPICH", 1, 4, 1, 4, None, "host"),
    "mpich-pmi-port": ("PMI port", 1, 4, 1, 4, None, "host"),
    "mpijob-launcher-pod": ALONE,
    "mpijob-mpich-rank": ("MPICH", 5, 8, 1, 4, None, "host"),
    "mpijob-open-mpi-rank": ("Open MPI", 1, 4, 1, 4, None, "host"),
    "mvapich2": ("MVAPICH2", 5, 8, 1, 4, None, "host"),
    "open-mpi-4": ("Open MPI", 1, 4, 1, 4, None, "host"),
    "open-mpi-5": ("Open MPI", 1, 4, 2, 4, None, "host"),
    "pbs-batch-shell": ALONE,
    "pbs-mpirun": ("Open MPI", 1, 4, 1, 4, None, "host"),
    "pmix-prun": ("PMIx", 1, 4, None, None, None, "host"),
    "slurm-batch-shell": ALONE,
    "slurm-interactive-step": ALONE,
    "slurm-mpirun-second-node": ("Open MPI", 3, 4, 1, 2, None, "host"),
    "slurm-one-task-step": ("Slurm", 0, 1, 0, 1, 0, "hpct0"),
    "slurm-srun-inside-mpirun": ("Slurm", 1, 2, 1, 2, 0, "hpct0"),
    "slurm-step": ("Slurm", 2, 3, 0, 1, 1, "hpct1"),
}
# Launchers that set a rank's number, and the number of ranks in no variable.
WITHOUT_A_NUMBER = {
    "cray-pals-pmix": ["Cray PALS", "as rank 5", "mpiexec -n N --env HPCTRAIN_NUM_RANKS=N"],
    "cray-alps": ["Cray ALPS", "as rank 5", "aprun -n N -e HPCTRAIN_NUM_RANKS=N"],
    "mpich-pmi-port": ["PMI port", "as rank 1", "mpiexec -genv HPCTRAIN_NUM_RANKS N"],
    "pmix-prun": ["PMIx", "as rank 1", "HPCTRAIN_NUM_RANKS=N"],
}


def fields_of(identity: RankIdentity) -> tuple[object, ...]:
    return (
        identity.launcher,
        identity.rank,
        identity.num_ranks,
        identity.local_rank,
        identity.local_size,
        identity.node_rank,
        identity.node_name,
    )


def test_every_recorded_environment_is_judged_and_names_its_source() -> None:
    files = {path.stem: path.read_text() for path in FIXTURES.glob("*.env")}
    assert files.keys() == EXPECTED.keys() | WITHOUT_A_NUMBER.keys()
    for name, text in files.items():
        assert "\n# Recorded from " in text or "\n# Composed" in text, name
    assert {row.name for row in LAUNCHERS} - {"PMI"} == {fields[0] for fields in EXPECTED.values()} - {"none"}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_launchers_variables_are_read(name: str) -> None:
    assert fields_of(identify(recorded(name), "host")) == EXPECTED[name]


def test_a_launcher_with_plain_pmi_variables_is_understood() -> None:
    assert fields_of(identify({"PMI_RANK": "3", "PMI_SIZE": "8"}, "host")) == (
        "PMI",
        3,
        8,
        None,
        None,
        None,
        "host",
    )


@pytest.mark.parametrize("name", WITHOUT_A_NUMBER)
def test_a_launcher_that_does_not_tell_the_number_of_ranks_is_refused_with_what_to_pass(name: str) -> None:
    environ = {key: text for key, text in recorded(name).items() if key != "HPCTRAIN_NUM_RANKS"}
    with pytest.raises(LaunchError) as caught:
        identify(environ, "host")
    for word in WITHOUT_A_NUMBER[name]:
        assert word in str(caught.value)
    assert identify({**environ, "HPCTRAIN_NUM_RANKS": "8"}, "host").num_ranks == 8


@pytest.mark.parametrize("inner", ["open-mpi-4", "open-mpi-5", "mpich", "intel-mpi", "mvapich2"])
@pytest.mark.parametrize("outer", ["slurm-one-task-step", "flux-run", "cray-pals"])
def test_mpirun_inside_a_step_of_a_resource_manager_is_what_counts(inner: str, outer: str) -> None:
    # For example in the shell of `srun --pty bash`: the step's variables are inherited.
    identity = identify({**recorded(outer), **recorded(inner)}, "host")
    assert (identity.launcher, identity.rank, identity.num_ranks) == EXPECTED[inner][:3]


def test_mpirun_inside_a_step_of_jsrun_is_what_counts() -> None:
    identity = identify({**recorded("lsf-jsrun"), **OPEN_MPI}, "host")
    assert (identity.launcher, identity.rank, identity.num_ranks) == ("Open MPI", 1, 4)


def test_srun_with_one_task_is_no_mpi_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "SLURM"))]:
        monkeypatch.delenv(name)
    for name, text in recorded("slurm-one-task-step").items():
        monkeypatch.setenv(name, text)
    opened = open_world()
    assert isinstance(opened.world, SerialWorld)
    assert opened.reason == "one rank"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        pytest.param(
            {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, ["OMPI_COMM_WORLD_RANK=4", "4 ranks"], id="rank"
        ),
        pytest.param({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "7"}, ["local rank 7 of 4"], id="local rank"),
        pytest.param(
            {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": ""}, ["OMPI_COMM_WORLD_SIZE is not set"], id="no size"
        ),
        pytest.param(
            {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "four"}, ["'four' is not a number"], id="no number"
        ),
        pytest.param({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "-1"}, ["'-1' is not a number"], id="negative"),
        pytest.param(
            {**SLURM_STEP, "SLURM_STEP_NUM_TASKS": "2"}, ["SLURM_PROCID=2", "2 ranks"], id="stale step"
        ),
        pytest.param(
            {**SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": "4"},
            ["SLURM_STEP_TASKS_PER_NODE=4", "two launches"],
            id="tasks",
        ),
        pytest.param({**SLURM_STEP, "SLURM_LOCALID": "1"}, ["local rank 1 of 1"], id="local id"),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a"},
            ["torchrun", "hpctrain launch -n 4"],
            id="torchrun",
        ),
        pytest.param(
            {**OPEN_MPI, "HPCTRAIN_RANKS_PER_NODE": "0"}, ["HPCTRAIN_RANKS_PER_NODE"], id="emulating 0"
        ),
        pytest.param(
            {**recorded("slurm-mpirun-second-node"), "HPCTRAIN_RANKS_PER_NODE": "2"},
            ["only 2 of the 4 ranks"],
            id="emulating on real nodes",
        ),
    ],
)
def test_variables_that_contradict_each_other_are_refused(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        identify(environ, "host")
    for word in words:
        assert word in str(caught.value)


def test_torchruns_variables_do_not_matter_under_mpirun() -> None:
    environ = {**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a"}
    assert identify(environ, "host").rank == 1


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, (0, 2, 0, "host/0")), (2, (0, 2, 1, "host/1")), (4, (0, 1, 2, "host/2"))]
)
def test_emulated_nodes_hold_ranks_in_blocks(rank: int, expected: tuple[object, ...]) -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "5",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "5",
        "HPCTRAIN_RANKS_PER_NODE": "2",
    }
    identity = identify(environ, "host")
    found = (identity.local_rank, identity.local_size, identity.node_rank, identity.node_name)
    assert found == expected
    assert identity.emulated
    assert (identity.host_rank, identity.host_size) == (rank, 5)  # of the real machine


def test_mpi_that_agrees_passes_the_cross_check() -> None:
    cross_check(identify(OPEN_MPI, "host"), mpi_rank=1, mpi_size=4)
    cross_check(identify({}, "host"), mpi_rank=0, mpi_size=1)


@pytest.mark.parametrize(
    ("environ", "mpi", "words"),
    [
        (OPEN_MPI, (0, 1), ["rank 1 of 4", "MPI reports rank 0 of 1", "do not belong together", "mpirun"]),
        (SLURM_STEP, (0, 1), ["rank 2 of 3", "srun --mpi=TYPE"]),
        (recorded("flux-run"), (0, 1), ["rank 5 of 8", "flux run", "-o pmi="]),
        (OPEN_MPI, (1, 8), ["MPI reports rank 1 of 8", "another launch"]),
        (OPEN_MPI, (2, 4), ["MPI reports rank 2 of 4", "number the ranks differently"]),
        ({}, (0, 4), ["no launcher's variables", "MPI reports rank 0 of 4"]),
    ],
)
def test_mpi_that_disagrees_is_told_in_plain_words(
    environ: dict[str, str], mpi: tuple[int, int], words: list[str]
) -> None:
    with pytest.raises(TopologyError) as caught:
        cross_check(identify(environ, "host"), mpi_rank=mpi[0], mpi_size=mpi[1])
    for word in words:
        assert word in str(caught.value)


def test_a_container_whose_mpi_sees_a_world_of_one_is_told_in_plain_words() -> None:
    with pytest.raises(TopologyError) as caught:
        cross_check(identify(SLURM_STEP, "host"), mpi_rank=0, mpi_size=1, container="the container /a.sif")
    for words in (
        "The MPI library in the container /a.sif does not understand the launcher",
        "each of the 3 ranks sees a world of one",
        "bind the site's MPI into the container",
    ):
        assert words in str(caught.value)


def test_slurms_short_counts_are_expanded() -> None:
    assert expand_counts("2(x3),1", variable="X") == [2, 2, 2, 1]
    assert expand_counts("4", variable="X") == [4]
    with pytest.raises(LaunchError, match="X='2x3'"):
        expand_counts("2x3", variable="X")
