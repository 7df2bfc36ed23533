"""Who am I: from variables recorded from Open MPI 4.1.4, MPICH 4.0.2 and Slurm 22.05 (two nodes)."""

from __future__ import annotations

import pytest

from hpctrain.errors import LaunchError, TopologyError
from hpctrain.launch import RankIdentity, cross_check, identify
from hpctrain.launch.slurm_counts import expand_counts

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "4",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "1299382273",
}
MPICH = {
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "8",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "HYDI_CONTROL_FD": "7",
}
BATCH_SHELL = {
    "ENVIRONMENT": "BATCH",
    "SLURMD_NODENAME": "n1",
    "SLURM_CPUS_ON_NODE": "2",
    "SLURM_GTIDS": "0",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
SLURM_STEP = {
    "PMIX_NAMESPACE": "slurm.pmix.1.0",
    "PMIX_RANK": "2",
    "SLURMD_NODENAME": "n2",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1",
}
ONE_TASK_STEP = {
    **BATCH_SHELL,
    "PMI_FD": "11",
    "PMI_JOBID": "2.0",
    "PMI_RANK": "0",
    "PMI_SIZE": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
# mpirun in a batch script of two nodes, on the second node: Open MPI started its daemon there with srun.
MPIRUN_IN_BATCH_REMOTE = {
    **BATCH_SHELL,
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "SLURMD_NODENAME": "n2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}


def told(identity: RankIdentity) -> tuple[object, ...]:
    return (
        identity.launcher,
        identity.rank,
        identity.num_ranks,
        identity.local_rank,
        identity.local_size,
        identity.node_rank,
        identity.node_name,
    )


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, ("none", 0, 1, 0, 1, 0, "host"), id="no launcher"),
        pytest.param(OPEN_MPI, ("Open MPI", 1, 4, 1, 4, None, "host"), id="mpirun of Open MPI"),
        pytest.param(MPICH, ("MPICH", 1, 2, 1, 2, None, "host"), id="mpiexec of MPICH"),
        pytest.param(
            {**MPICH, "I_MPI_HYDRA_HOST_FILE": "x"},
            ("Intel MPI", 1, 2, 1, 2, None, "host"),
            id="mpiexec of Intel MPI",
        ),
        pytest.param(
            {
                "MV2_COMM_WORLD_RANK": "5",
                "MV2_COMM_WORLD_SIZE": "8",
                "MV2_COMM_WORLD_LOCAL_RANK": "1",
                "MV2_COMM_WORLD_LOCAL_SIZE": "4",
            },
            ("MVAPICH2", 5, 8, 1, 4, None, "host"),
            id="MVAPICH2",
        ),
        pytest.param(SLURM_STEP, ("Slurm", 2, 3, 0, 1, 1, "n2"), id="srun over two nodes, unequal"),
        pytest.param(BATCH_SHELL, ("none", 0, 1, 0, 1, 0, "host"), id="plain python in a batch script"),
        pytest.param(ONE_TASK_STEP, ("Slurm", 0, 1, 0, 1, 0, "n1"), id="srun of one task in a job of four"),
        pytest.param(
            MPIRUN_IN_BATCH_REMOTE,
            ("Open MPI", 3, 4, 1, 2, None, "host"),
            id="mpirun in a batch script, second node",
        ),
        pytest.param(
            {"PMI_RANK": "3", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PALS_NODEID": "1"},
            ("PMI", 3, 8, 1, None, 1, "host"),
            id="Cray PALS",
        ),
        pytest.param(
            {"PMIX_RANK": "3", "PMIX_NAMESPACE": "x", "PMIX_SIZE": "8"},
            ("PMIx", 3, 8, None, None, None, "host"),
            id="PMIx alone",
        ),
    ],
)
def test_each_launchers_variables_are_read(environ: dict[str, str], expected: tuple[object, ...]) -> None:
    assert told(identify(environ, "host")) == expected


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
        pytest.param({"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"}, ["PMIX_SIZE"], id="PMIx without a size"),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a"},
            ["torchrun", "hpctrain launch -n 4"],
            id="torchrun",
        ),
        pytest.param(
            {**OPEN_MPI, "HPCTRAIN_RANKS_PER_NODE": "0"}, ["HPCTRAIN_RANKS_PER_NODE"], id="emulating 0"
        ),
        pytest.param(
            {**MPIRUN_IN_BATCH_REMOTE, "HPCTRAIN_RANKS_PER_NODE": "2"},
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
    assert (identity.host_rank, identity.host_size) == (rank, 5)  # devices are the real machine's


def test_mpi_that_agrees_passes_the_cross_check() -> None:
    cross_check(identify(OPEN_MPI, "host"), mpi_rank=1, mpi_size=4)
    cross_check(identify({}, "host"), mpi_rank=0, mpi_size=1)


@pytest.mark.parametrize(
    ("environ", "mpi", "words"),
    [
        (OPEN_MPI, (0, 1), ["rank 1 of 4", "MPI reports rank 0 of 1", "do not belong together", "mpirun"]),
        (SLURM_STEP, (0, 1), ["rank 2 of 3", "srun --mpi=TYPE"]),
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


def test_slurms_short_counts_are_expanded() -> None:
    assert expand_counts("2(x3),1", variable="X") == [2, 2, 2, 1]
    assert expand_counts("4", variable="X") == [4]
    with pytest.raises(LaunchError, match="X='2x3'"):
        expand_counts("2x3", variable="X")
