"""The command lines that are planned, word by word, for mpirun of three families and for srun."""

from __future__ import annotations

import dataclasses

import pytest

from hpctrain.errors import LaunchError
from hpctrain.launch import Launcher, LaunchPlan, LocalMachine, plan_launch
from hpctrain.launch.command import read_hosts
from hpctrain.launch.placement import (
    Mpirun,
    MpirunFamily,
    Srun,
    read_mpi_types,
    read_mpirun_version,
    read_srun,
)

OPEN_MPI_4 = Mpirun(path="/usr/bin/mpirun", family=MpirunFamily.OPEN_MPI_4, version="mpirun (Open MPI) 4.1.4")
OPEN_MPI_5 = Mpirun(path="/usr/bin/mpirun", family=MpirunFamily.OPEN_MPI_5, version="mpirun (Open MPI) 5.0.3")
HYDRA = Mpirun(path="/usr/bin/mpiexec", family=MpirunFamily.HYDRA, version="Hydra 4.0.2")
SRUN = Srun(path="/usr/bin/srun", mpi_types=("pmix", "none", "cray_shasta", "pmi2", "pmix_v4"))
LIBRARY = "/site/hpctrain/launch/_yield_by_sleep.so"
MACHINE = LocalMachine(
    num_cores=8, num_cpus=8, yield_library=LIBRARY, is_root=False, mpirun=OPEN_MPI_4, srun=None
)
CLUSTER = dataclasses.replace(MACHINE, srun=SRUN)
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "8(x2)"}


def plan(num_ranks: int = 4, machine: LocalMachine = MACHINE, **options: object) -> LaunchPlan:
    options.setdefault("environ", {})
    return plan_launch(["python", "train.py"], num_ranks=num_ranks, machine=machine, **options)  # type: ignore[arg-type]


def test_open_mpi_on_one_machine_needs_no_ssh_and_binds_nothing() -> None:
    planned = plan()
    assert " ".join(planned.argv) == (
        "/usr/bin/mpirun -n 4 --map-by slot:OVERSUBSCRIBE --bind-to none --mca plm isolated python train.py"
    )
    assert planned.env_updates == {"OMP_NUM_THREADS": "2"}
    assert not planned.emulated
    assert not planned.notes


def test_ranks_per_node_on_one_machine_emulates_nodes() -> None:
    planned = plan(ranks_per_node=2)
    assert planned.emulated
    assert planned.env_updates["HPCTRAIN_RANKS_PER_NODE"] == "2"
    assert "ppr" not in " ".join(planned.argv)
    assert "emulates 2 nodes" in planned.notes[0]


def test_one_node_that_holds_all_ranks_is_not_emulated() -> None:
    planned = plan(ranks_per_node=4, environ={"HPCTRAIN_RANKS_PER_NODE": "2"})
    assert not planned.emulated
    assert planned.env_removed == ("HPCTRAIN_RANKS_PER_NODE",)


def test_ranks_that_outnumber_cores_give_way_while_they_wait() -> None:
    planned = plan(16)
    assert planned.env_updates == {
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "LD_PRELOAD": LIBRARY,
    }
    assert "16 ranks share 8 cores" in planned.notes[0]


def test_the_library_is_preloaded_exactly_where_ranks_outnumber_cores_and_mpi_yields() -> None:
    many = {"hosts": ["a", "b"], "ranks_per_node": 9}
    hydra = dataclasses.replace(MACHINE, mpirun=HYDRA)
    polls = {"OMPI_MCA_mpi_yield_when_idle": "0"}
    assert "LD_PRELOAD" not in plan(8).env_updates
    assert "LD_PRELOAD" not in plan(8, machine=hydra).env_updates
    assert plan(16, machine=hydra).env_updates == {"OMP_NUM_THREADS": "1", "LD_PRELOAD": LIBRARY}
    assert "LD_PRELOAD" not in plan(16, environ=polls).env_updates
    assert "LD_PRELOAD" not in plan(16, hosts=["a", "b"], ranks_per_node=8).env_updates
    assert (
        plan(16, environ={"LD_PRELOAD": "/a.so:/b.so"}).env_updates["LD_PRELOAD"] == f"/a.so:/b.so:{LIBRARY}"
    )
    assert plan(16, environ={"LD_PRELOAD": LIBRARY}).env_updates["LD_PRELOAD"] == LIBRARY
    over_nodes = plan(18, **many)
    assert over_nodes.env_updates["LD_PRELOAD"] == LIBRARY
    assert "-x LD_PRELOAD" in " ".join(over_nodes.argv)
    slurm = plan(32, machine=CLUSTER, environ={**JOB, "LD_PRELOAD": "/a.so"})
    assert slurm.env_updates["LD_PRELOAD"] == f"/a.so:{LIBRARY}"
    assert "LD_PRELOAD" not in plan(16, machine=CLUSTER, environ=JOB).env_updates


def test_a_library_that_was_not_compiled_is_missed_where_it_is_needed() -> None:
    without = dataclasses.replace(MACHINE, yield_library=None)
    assert not plan(8, machine=without).notes
    planned = plan(16, machine=without)
    assert "LD_PRELOAD" not in planned.env_updates
    assert "not compiled" in planned.notes[-1]


def test_two_hardware_threads_of_a_core_hold_two_ranks_and_compute_as_one() -> None:
    machine = dataclasses.replace(MACHINE, num_cpus=16)
    assert plan(4, machine=machine).env_updates == {"OMP_NUM_THREADS": "2"}
    assert plan(16, machine=machine).env_updates == {"OMP_NUM_THREADS": "1"}


def test_what_the_user_has_set_stays() -> None:
    planned = plan(environ={"OMP_NUM_THREADS": "3", "OMPI_MCA_hwloc_base_binding_policy": "core"})
    assert planned.env_updates == {}
    assert "--bind-to" not in planned.argv


def test_root_is_allowed_through_the_environment() -> None:
    planned = plan(machine=dataclasses.replace(MACHINE, is_root=True))
    assert planned.env_updates["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    assert planned.env_updates["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


def test_open_mpi_5_has_no_isolated_start() -> None:
    words = " ".join(plan(machine=dataclasses.replace(MACHINE, mpirun=OPEN_MPI_5)).argv)
    assert "--map-by slot:OVERSUBSCRIBE" in words
    assert "plm isolated" not in words


def test_open_mpi_5_warns_of_no_addresses_on_one_machine_unless_the_user_has_chosen_a_module() -> None:
    newer = dataclasses.replace(MACHINE, mpirun=OPEN_MPI_5)
    name = "OMPI_MCA_reachable"
    assert plan(machine=newer).env_updates[name] == "^netlink"
    assert name not in plan(machine=newer, environ={name: "weighted"}).env_updates
    assert name not in plan(machine=newer, hosts=["a", "b"], ranks_per_node=2).env_updates
    assert name not in plan().env_updates


def test_hosts_are_real_nodes_filled_in_blocks_and_get_the_environment() -> None:
    environ = {"PATH": "/bin", "HPCTRAIN_RANKS_PER_NODE": "1", "HOROVOD_CYCLE_TIME": "1", "HOME": "/root"}
    planned = plan(6, hosts=["a", "b"], ranks_per_node=4, environ=environ)
    assert " ".join(planned.argv) == (
        "/usr/bin/mpirun -n 6 --map-by ppr:4:node:OVERSUBSCRIBE --bind-to none "
        "--host a:4,b:4 -x HOROVOD_CYCLE_TIME "
        "-x OMP_NUM_THREADS -x PATH python train.py"
    )
    assert planned.env_removed == ("HPCTRAIN_RANKS_PER_NODE",)
    assert not planned.emulated


def test_a_hostfile_is_named_and_not_listed() -> None:
    words = " ".join(plan(4, hosts=["a", "b"], hostfile="nodes.txt").argv)
    assert "--hostfile nodes.txt" in words
    assert "--host " not in words


def test_hydra_forks_on_one_machine_and_places_on_many() -> None:
    machine = dataclasses.replace(MACHINE, mpirun=HYDRA)
    assert " ".join(plan(machine=machine).argv) == "/usr/bin/mpiexec -n 4 -launcher fork python train.py"
    planned = plan(machine=machine, hosts=["a", "b"], ranks_per_node=2)
    assert " ".join(planned.argv) == "/usr/bin/mpiexec -n 4 -ppn 2 -hosts a,b python train.py"


def test_an_unknown_mpirun_gets_the_number_of_ranks_only() -> None:
    unknown = Mpirun(path="/opt/mpirun", family=MpirunFamily.UNKNOWN, version="fast MPI 1")
    planned = plan(machine=dataclasses.replace(MACHINE, mpirun=unknown))
    assert planned.argv[:3] == ("/opt/mpirun", "-n", "4")
    assert "fast MPI 1" in planned.notes[-1]


def test_srun_is_used_inside_an_allocation() -> None:
    planned = plan(8, machine=CLUSTER, ranks_per_node=4, environ={**JOB, "HPCTRAIN_RANKS_PER_NODE": "1"})
    assert planned.launcher is Launcher.SRUN
    assert " ".join(planned.argv) == (
        "/usr/bin/srun --mpi=pmix --nodes=2 --ntasks=8 --ntasks-per-node=4 --distribution=block "
        "--kill-on-bad-exit=1 --cpus-per-task=2 python train.py"
    )
    assert planned.env_updates == {"OMP_NUM_THREADS": "2", "SLURM_PMIX_FENCE": "ring"}
    assert planned.env_removed == ("HPCTRAIN_RANKS_PER_NODE",)


def test_the_sites_own_pmix_fence_stays() -> None:
    planned = plan(8, machine=CLUSTER, environ={**JOB, "SLURM_PMIX_FENCE": "tree"})
    assert "SLURM_PMIX_FENCE" not in planned.env_updates


def test_srun_fills_a_shorter_last_node_by_planes() -> None:
    planned = plan(3, machine=CLUSTER, ranks_per_node=2, environ={**JOB, "SLURM_NTASKS_PER_NODE": "2"})
    words = " ".join(planned.argv)
    assert "--nodes=2 --ntasks=3 --distribution=plane=2" in words
    assert "SLURM_NTASKS_PER_NODE" in planned.env_removed


def test_srun_overcommits_when_ranks_outnumber_cores() -> None:
    planned = plan(32, machine=CLUSTER, environ={**JOB, "SLURM_CPUS_PER_TASK": "4"})
    assert "--overcommit" in planned.argv
    assert planned.env_updates["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert "SLURM_CPUS_PER_TASK" in planned.env_removed


def test_srun_from_an_interactive_step_shares_its_cores() -> None:
    step = {**JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert "--overlap" in plan(4, machine=CLUSTER, environ=step).argv


def test_in_a_heterogeneous_job_it_is_said_where_the_ranks_are() -> None:
    planned = plan(4, machine=CLUSTER, environ={**JOB, "SLURM_HET_SIZE": "2"})
    assert "in its first component only" in planned.notes[0]
    assert not plan(4, machine=CLUSTER, environ=JOB).notes


def test_srun_takes_the_type_that_the_mpi_library_knows() -> None:
    hydra = dataclasses.replace(CLUSTER, mpirun=HYDRA)
    assert "--mpi=pmi2" in plan(machine=hydra, environ=JOB).argv
    old = dataclasses.replace(CLUSTER, srun=Srun(path="/usr/bin/srun", mpi_types=("none", "pmix_v3")))
    assert "--mpi=pmix_v3" in plan(machine=old, environ=JOB).argv


def test_mpirun_is_used_where_srun_cannot_start_ranks_of_this_mpi() -> None:
    machine = dataclasses.replace(CLUSTER, srun=Srun(path="/usr/bin/srun", mpi_types=("none",)))
    planned = plan(machine=machine, environ=JOB, ranks_per_node=2)
    assert planned.launcher is Launcher.MPIRUN
    assert "ppr:2:node" in " ".join(planned.argv)
    assert "isolated" not in planned.argv
    assert "srun cannot start" in planned.notes[0]


@pytest.mark.parametrize(
    "types", [("none", "pmi2"), ("cray_shasta", "none", "pmi2")]
)  # Debian testing: the second
def test_srun_without_pmix_is_refused_for_open_mpi_if_it_is_asked_for(types: tuple[str, ...]) -> None:
    machine = dataclasses.replace(CLUSTER, srun=Srun(path="/usr/bin/srun", mpi_types=types))
    assert plan(machine=machine, environ=JOB).launcher is Launcher.MPIRUN
    with pytest.raises(
        LaunchError,
        match=rf"srun cannot start ranks of .*it lists {', '.join(types)}.*PMIx \(Open MPI\) or PMI2 \(MPICH\)$",
    ):
        plan(machine=machine, environ=JOB, launcher=Launcher.SRUN)
    # Another mpirun may work with the cluster's default.
    unknown = Mpirun(path="/usr/bin/mpirun", family=MpirunFamily.UNKNOWN, version="some mpirun")
    other = dataclasses.replace(machine, mpirun=unknown)
    assert plan(machine=other, environ=JOB, launcher=Launcher.SRUN).launcher is Launcher.SRUN
    # Without an answer of srun nothing is known.
    silent = dataclasses.replace(
        CLUSTER, srun=Srun(path="/usr/bin/srun", mpi_types=(), failure="did not answer")
    )
    assert plan(machine=silent, environ=JOB, launcher=Launcher.SRUN).launcher is Launcher.SRUN


def test_an_allocation_of_one_node_emulates_and_says_so() -> None:
    planned = plan(4, machine=CLUSTER, ranks_per_node=2, environ={**JOB, "SLURM_JOB_NUM_NODES": "1"})
    assert planned.emulated
    assert "--nodes=1" in planned.argv
    assert planned.notes


def test_another_scheduler_leaves_the_nodes_to_mpirun() -> None:
    words = " ".join(plan(8, ranks_per_node=2, environ={"PBS_JOBID": "1"}).argv)
    assert "ppr:2:node" in words
    assert "isolated" not in words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"num_ranks": 0}, ["-n 0"], id="no ranks"),
        pytest.param({"ranks_per_node": 0}, ["--ranks-per-node 0"], id="no ranks on a node"),
        pytest.param(
            {"num_ranks": 8, "ranks_per_node": 2, "machine": CLUSTER, "environ": JOB},
            ["need 4 nodes", "allocation 7 has 2", "--ranks-per-node 4", "-n 4"],
            id="more nodes than the allocation has",
        ),
        pytest.param(
            {"hosts": ["a", "b"], "ranks_per_node": 1}, ["4 nodes", "2 hosts"], id="more than hosts"
        ),
        pytest.param(
            {"machine": dataclasses.replace(MACHINE, mpirun=None)}, ["mpirun", "openmpi-bin"], id="no mpirun"
        ),
        pytest.param({"launcher": Launcher.SRUN}, ["no srun"], id="no srun"),
        pytest.param(
            {"launcher": Launcher.SRUN, "machine": CLUSTER}, ["not in a Slurm allocation"], id="no allocation"
        ),
        pytest.param(
            {"launcher": Launcher.SRUN, "machine": CLUSTER, "environ": JOB, "hosts": ["a"]},
            ["--host"],
            id="hosts",
        ),
        pytest.param(
            {"environ": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}},
            ["rank 1 of 4 by Open MPI", "outside it"],
            id="launched by a rank",
        ),
        pytest.param(
            {"environ": {**JOB, "SLURM_JOB_NUM_NODES": "two"}}, ["SLURM_JOB_NUM_NODES='two'"], id="no number"
        ),
    ],
)
def test_a_launch_that_cannot_be_is_refused_with_a_remedy(
    options: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(LaunchError) as caught:
        plan(**options)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_the_shell_line_quotes_what_a_shell_would_take_apart() -> None:
    planned = LaunchPlan(
        argv=("mpirun", "-n", "1", "echo", "a b"),
        launcher=Launcher.MPIRUN,
        num_ranks=1,
        emulated=False,
        env_updates={"A": "x y"},
        env_removed=("B",),
    )
    assert planned.shell_line() == "env -u B A='x y' mpirun -n 1 echo 'a b'"


@pytest.mark.parametrize(
    ("text", "family"),
    [
        (
            "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/",
            MpirunFamily.OPEN_MPI_4,
        ),
        ("mpirun (Open MPI) 5.0.3\n", MpirunFamily.OPEN_MPI_5),
        ("HYDRA build details:\n    Version:                                 4.0.2\n", MpirunFamily.HYDRA),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307", MpirunFamily.HYDRA),
        ("something else", MpirunFamily.UNKNOWN),
        ("", MpirunFamily.UNKNOWN),
    ],
)
def test_an_mpirun_is_known_by_its_version(text: str, family: MpirunFamily) -> None:
    assert read_mpirun_version(text, path="mpirun").family is family


def test_sruns_list_of_mpi_types_is_read_in_both_layouts() -> None:
    new = (
        "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions available: pmix_v4\n"
    )
    assert read_mpi_types(new) == ("pmix", "none", "pmi2")
    old = "srun: MPI types are...\nsrun: pmi2\nsrun: none\nsrun: pmix_v3\n"
    assert read_mpi_types(old) == ("pmi2", "none", "pmix_v3")


def test_words_of_an_srun_that_fails_are_no_mpi_types() -> None:
    said = "srun: error: unable to resolve controller host\nsrun: fatal: no plugin is usable\n"
    failed = read_srun(1, said, path="srun")
    assert failed.mpi_types == ()
    assert "exit code 1: srun: error: unable to resolve controller host srun: fatal" in failed.failure
    assert read_srun(None, "", path="srun").failure == "srun --mpi=list did not answer"
    warned = "srun: warning: can not read gres.conf\nMPI plugin types are...\n\tpmix\n"
    assert read_srun(0, warned, path="srun") == Srun(path="srun", mpi_types=("pmix",))
    plan = plan_launch(
        ["python", "train.py"], num_ranks=2, environ={"SLURM_JOB_ID": "1"},
        machine=dataclasses.replace(CLUSTER, srun=failed),
    )  # fmt: skip
    assert plan.launcher is Launcher.MPIRUN
    assert any("unable to resolve controller host" in note for note in plan.notes)


def test_a_hostfile_names_each_machine_once() -> None:
    assert read_hosts("a slots=2\n# comment\n\nb:4\na slots=2\n") == ["a", "b"]


def test_named_nodes_of_a_job_are_passed_to_srun_and_shared_with_a_step_that_slurm_has_not_given_up() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_CPUS_PER_NODE": "8(x4)"}
    planned = plan(4, machine=CLUSTER, environ=job, ranks_per_node=2, nodes=["n1", "n3"])
    assert {"--nodes=2", "--ntasks=4", "--nodelist=n1,n3", "--overlap"} <= {*planned.argv}
    assert "--overlap" not in plan(4, machine=CLUSTER, environ=job, ranks_per_node=2).argv
    one = plan(2, machine=CLUSTER, environ=job, ranks_per_node=2, nodes=["n3"])
    assert {"--nodes=1", "--ntasks=2", "--nodelist=n3"} <= {*one.argv}
    assert not one.emulated
    with pytest.raises(LaunchError, match="need 3 nodes"):
        plan(6, machine=CLUSTER, environ=job, ranks_per_node=2, nodes=["n1", "n3"])


def test_named_nodes_are_mpiruns_hosts_where_srun_cannot_start_its_ranks() -> None:
    old = dataclasses.replace(CLUSTER, srun=Srun(path="/usr/bin/srun", mpi_types=("none", "pmi2")))
    planned = plan(4, machine=old, environ=JOB, ranks_per_node=2, nodes=["n1", "n3"])
    assert planned.launcher is Launcher.MPIRUN
    assert "--host n1:2,n3:2" in " ".join(planned.argv)
