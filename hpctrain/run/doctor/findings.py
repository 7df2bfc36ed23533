"""Findings of `hpctrain doctor` about one rank.

`facts` is the result of `hpctrain.run.doctor.probes.inspect_rank` on that rank: JSON values by topic.
"""

from __future__ import annotations

from hpctrain.launch import cure_for
from hpctrain.run.doctor.finding import Facts, Finding, ok, problem, size_text, warning
from hpctrain.run.doctor.limits import judge_limits
from hpctrain.run.doctor.network import judge_network
from hpctrain.run.doctor.run_directory import judge_run_directory

_SMALL_SHM_BYTES = 64 * 2**20


def judge_rank(facts: Facts) -> list[Finding]:
    """Returns the findings about one rank, regardless of other ranks."""
    return [
        _python(facts),
        _torch(facts),
        *_sums(facts),
        _launcher(facts),
        *_yielding(facts),
        _mpi(facts),
        *judge_network(facts),
        _horovod(facts),
        *_communication(facts),
        _hdf5(facts),
        *judge_run_directory(facts),
        _scratch(facts),
        *judge_limits(facts),
    ]


def _python(facts: Facts) -> Finding:
    python = facts["python"]
    return ok("python", f"{python['version']}, hpctrain {python['hpctrain']}")


def _torch(facts: Facts) -> Finding:
    torch = facts["torch"]
    if "error" in torch:
        return problem("torch", torch["error"], "install the project's requirements: make setup")
    devices = torch["devices"]
    if devices:
        kinds = ", ".join(f"{devices.count(kind)} x {kind}" for kind in dict.fromkeys(devices))
        nccl = f", NCCL {torch['nccl']}" if torch.get("nccl") else ""
        return ok("torch", f"{torch['version']}, {kinds}{nccl}")
    if torch.get("cuda"):
        return warning(
            "torch",
            f"{torch['version']} is built for CUDA {torch['cuda']}, but no device is visible: CPU only",
            "check the driver and CUDA_VISIBLE_DEVICES, or ask Slurm for devices (--gpus-per-node)",
        )
    return ok("torch", f"{torch['version']}, CPU only")


def _sums(facts: Facts) -> list[Finding]:
    # Missing in the facts of an older hpctrain, which some rank may have.
    if facts.get("sums", {}).get("compiled", True):
        return []
    return [
        warning(
            "sums on a node",
            "numpy computes them, since hpctrain's C code was not compiled when it was installed",
            "install a C compiler and Python's headers, then hpctrain again (make setup), for sums in half the time",
        )
    ]


def _launcher(facts: Facts) -> Finding:
    launcher = facts["launcher"]
    if "error" in launcher:
        return problem(
            "launcher", launcher["error"], "start the ranks again, from a shell without these variables"
        )
    if launcher["launcher"] == "none":
        return ok("launcher", "none: one rank")
    ranks = f"{launcher['num_ranks']} rank{'s' if launcher['num_ranks'] != 1 else ''}"
    return ok("launcher", f"{launcher['launcher']}, {ranks}")


def _yielding(facts: Facts) -> list[Finding]:
    # Missing in the facts of an older hpctrain, which some rank may have.
    yielding = facts.get("yielding")
    topic = "waiting ranks"
    if yielding is None:
        return []
    if yielding["in_effect"]:
        return [ok(topic, "sleep instead of yielding: the library for more ranks than cores is preloaded")]
    if yielding["library"] is None:
        return [
            warning(
                topic,
                "the library for more ranks than cores was not compiled, or is in a folder with a space or a colon",
                "on Linux 6.18 and newer such ranks may wait for seconds: install a C compiler, then hpctrain again "
                "(make setup)",
            )
        ]
    return [ok(topic, "the library for more ranks than cores is installed, but not preloaded here")]


def _several_ranks(facts: Facts) -> bool:
    return int(facts["launcher"].get("num_ranks", 1)) > 1


def _mpi(facts: Facts) -> Finding:
    mpi = facts["mpi"]
    if "error" in mpi:
        remedy = mpi.get(
            "remedy",
            "make setup installs mpi4py; on a cluster load the MPI module that it was built with first",
        )
        if "cannot start" in mpi["error"] or "did not start" in mpi["error"]:
            return problem("MPI", mpi["error"], cure_for(facts["launcher"].get("launcher", "none")))
        if _several_ranks(facts) and "error" in facts["horovod"]:
            return problem("MPI", f"{mpi['error']}, and there is no Horovod either", remedy)
        return warning("MPI", mpi["error"], remedy)
    if "library" not in mpi:
        return ok("MPI", f"mpi4py {mpi['version']} (MPI was not started)")
    text = f"{mpi['library']} (MPI {mpi['standard']}), mpi4py {mpi['version']}"
    level = mpi.get("thread_level")
    if level is not None and level != "multiple":
        return problem(
            "MPI",
            f"{text}, threads: {level}",
            "hpctrain communicates from two threads: use an MPI built with MPI_THREAD_MULTIPLE",
        )
    return ok("MPI", text + (f", threads: {level}" if level else ""))


def _horovod(facts: Facts) -> Finding:
    horovod = facts["horovod"]
    if "error" in horovod:
        return warning("Horovod", horovod["error"], "MPI is used; make setup builds Horovod")
    built = horovod["built"]
    text = f"{horovod['version']}, built with {', '.join(part.upper() for part in built) or 'nothing'}"
    if "mpi" not in built:
        return warning(
            "Horovod",
            f"{text}, not MPI",
            "ranks from mpirun or srun need Horovod built with HOROVOD_WITH_MPI=1: make setup does this",
        )
    if facts["torch"].get("devices") and "nccl" not in built:
        return warning(
            "Horovod",
            f"{text}: gradients on devices are copied through host memory",
            "build it on a machine with NCCL: make setup",
        )
    return ok("Horovod", f"{text}; started only if a reduction uses it")


def _communication(facts: Facts) -> list[Finding]:
    communication = facts.get("communication")
    if communication is None:
        return []
    if "error" in communication:
        return [problem("communication", communication["error"], "")]  # the message contains the remedy
    reason = f" ({communication['reason']})" if communication["reason"] else ""
    text = f"{communication['backend']}{reason}, {communication['num_ranks']} ranks connected"
    if communication["notes"]:
        return [warning("communication", f"{text}; {'; '.join(communication['notes'])}", "make setup")]
    return [ok("communication", text)]


def _hdf5(facts: Facts) -> Finding:
    hdf5 = facts["hdf5"]
    if "error" in hdf5:
        return problem(
            "HDF5", f"h5py: {hdf5['error']}", "data and checkpoints are HDF5: make setup installs h5py"
        )
    text = f"{hdf5['hdf5']}, h5py {hdf5['h5py']}"
    if not hdf5["parallel"]:
        return ok("HDF5", f"{text}, not parallel (hpctrain does not need parallel HDF5)")
    return ok("HDF5", f"{text}, parallel")


def _scratch(facts: Facts) -> Finding:
    scratch = facts["scratch"]
    tmp, shm = scratch["tmp_free_bytes"], scratch["shm_free_bytes"]
    if shm is not None and shm < _SMALL_SHM_BYTES:
        return warning(
            "scratch",
            f"/dev/shm has {size_text(shm)} free",
            "ranks of one node exchange data there: start the container with a larger --shm-size",
        )
    shown = "no /dev/shm" if shm is None else f"/dev/shm {size_text(shm)} free"
    return ok("scratch", f"temporary directory {size_text(tmp)} free, {shown}")
