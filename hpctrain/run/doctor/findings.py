"""Findings of `hpctrain doctor` about one rank.

`facts` is the result of `hpctrain.run.doctor.probes.inspect_rank` on that rank: JSON values by topic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hpctrain.launch import cure_for

Facts = Mapping[str, Any]

_LOW_SPACE_BYTES = 5 * 10**9
_SMALL_SHM_BYTES = 64 * 2**20
_IN_MEMORY = ("tmpfs", "ramfs")


class Severity(str, Enum):
    """Level of a finding of the doctor."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor's report. `remedy` is empty if there is nothing to do."""

    topic: str
    level: Severity
    text: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        return {"topic": self.topic, "level": self.level.value, "text": self.text, "remedy": self.remedy}


def judge_rank(facts: Facts) -> list[Finding]:
    """Returns the findings about one rank, regardless of other ranks."""
    return [
        _python(facts),
        _torch(facts),
        *_sums(facts),
        _launcher(facts),
        *_yielding(facts),
        _mpi(facts),
        _horovod(facts),
        *_communication(facts),
        _hdf5(facts),
        *_run_directory(facts),
        _scratch(facts),
    ]


def worst_severity(findings: list[Finding]) -> Severity:
    """Returns the worst_severity level among the findings; OK if there are none."""
    order = (Severity.OK, Severity.WARNING, Severity.PROBLEM)
    return max((finding.level for finding in findings), key=order.index, default=Severity.OK)


def _ok(topic: str, text: str) -> Finding:
    return Finding(topic=topic, level=Severity.OK, text=text)


def _warning(topic: str, text: str, remedy: str) -> Finding:
    return Finding(topic=topic, level=Severity.WARNING, text=text, remedy=remedy)


def _problem(topic: str, text: str, remedy: str) -> Finding:
    return Finding(topic=topic, level=Severity.PROBLEM, text=text, remedy=remedy)


def _python(facts: Facts) -> Finding:
    python = facts["python"]
    return _ok("python", f"{python['version']}, hpctrain {python['hpctrain']}")


def _torch(facts: Facts) -> Finding:
    torch = facts["torch"]
    if "error" in torch:
        return _problem("torch", torch["error"], "install the project's requirements: make setup")
    devices = torch["devices"]
    if devices:
        kinds = ", ".join(f"{devices.count(kind)} x {kind}" for kind in dict.fromkeys(devices))
        nccl = f", NCCL {torch['nccl']}" if torch.get("nccl") else ""
        return _ok("torch", f"{torch['version']}, {kinds}{nccl}")
    if torch.get("cuda"):
        return _warning(
            "torch",
            f"{torch['version']} is built for CUDA {torch['cuda']}, but no device is visible: CPU only",
            "check the driver and CUDA_VISIBLE_DEVICES, or ask Slurm for devices (--gpus-per-node)",
        )
    return _ok("torch", f"{torch['version']}, CPU only")


def _sums(facts: Facts) -> list[Finding]:
    # Missing in the facts of an older hpctrain, which some rank may have.
    if facts.get("sums", {}).get("compiled", True):
        return []
    return [
        _warning(
            "sums on a node",
            "numpy computes them, since hpctrain's C code was not compiled when it was installed",
            "install a C compiler and Python's headers, then hpctrain again (make setup), for sums in half the time",
        )
    ]


def _launcher(facts: Facts) -> Finding:
    launcher = facts["launcher"]
    if "error" in launcher:
        return _problem(
            "launcher", launcher["error"], "start the ranks again, from a shell without these variables"
        )
    if launcher["launcher"] == "none":
        return _ok("launcher", "none: one rank")
    ranks = f"{launcher['num_ranks']} rank{'s' if launcher['num_ranks'] != 1 else ''}"
    return _ok("launcher", f"{launcher['launcher']}, {ranks}")


def _yielding(facts: Facts) -> list[Finding]:
    # Missing in the facts of an older hpctrain, which some rank may have.
    yielding = facts.get("yielding")
    topic = "waiting ranks"
    if yielding is None:
        return []
    if yielding["in_effect"]:
        return [_ok(topic, "sleep instead of yielding: the library for more ranks than cores is preloaded")]
    if yielding["library"] is None:
        return [
            _warning(
                topic,
                "the library for more ranks than cores was not compiled, or is in a folder with a space or a colon",
                "on Linux 6.18 and newer such ranks may wait for seconds: install a C compiler, then hpctrain again "
                "(make setup)",
            )
        ]
    return [_ok(topic, "the library for more ranks than cores is installed, but not preloaded here")]


def _several_ranks(facts: Facts) -> bool:
    return int(facts["launcher"].get("num_ranks", 1)) > 1


def _mpi(facts: Facts) -> Finding:
    mpi = facts["mpi"]
    if "error" in mpi:
        remedy = "make setup installs mpi4py; on a cluster load the MPI module that it was built with first"
        if "cannot start" in mpi["error"] or "did not start" in mpi["error"]:
            return _problem("MPI", mpi["error"], cure_for(facts["launcher"].get("launcher", "none")))
        if _several_ranks(facts) and "error" in facts["horovod"]:
            return _problem("MPI", f"mpi4py: {mpi['error']}, and there is no Horovod either", remedy)
        return _warning("MPI", f"mpi4py: {mpi['error']}", remedy)
    if "library" not in mpi:
        return _ok("MPI", f"mpi4py {mpi['version']} (MPI was not started)")
    text = f"{mpi['library']} (MPI {mpi['standard']}), mpi4py {mpi['version']}"
    level = mpi.get("thread_level")
    if level is not None and level != "multiple":
        return _problem(
            "MPI",
            f"{text}, threads: {level}",
            "hpctrain communicates from two threads: use an MPI built with MPI_THREAD_MULTIPLE",
        )
    return _ok("MPI", text + (f", threads: {level}" if level else ""))


def _horovod(facts: Facts) -> Finding:
    horovod = facts["horovod"]
    if "error" in horovod:
        return _warning("Horovod", horovod["error"], "MPI is used; make setup builds Horovod")
    built = horovod["built"]
    text = f"{horovod['version']}, built with {', '.join(part.upper() for part in built) or 'nothing'}"
    if "mpi" not in built:
        return _warning(
            "Horovod",
            f"{text}, not MPI",
            "ranks from mpirun or srun need Horovod built with HOROVOD_WITH_MPI=1: make setup does this",
        )
    if facts["torch"].get("devices") and "nccl" not in built:
        return _warning(
            "Horovod",
            f"{text}: gradients on devices are copied through host memory",
            "build it on a machine with NCCL: make setup",
        )
    return _ok("Horovod", f"{text}; started only if a reduction uses it")


def _communication(facts: Facts) -> list[Finding]:
    communication = facts.get("communication")
    if communication is None:
        return []
    if "error" in communication:
        return [_problem("communication", communication["error"], "")]  # the message contains the remedy
    reason = f" ({communication['reason']})" if communication["reason"] else ""
    text = f"{communication['backend']}{reason}, {communication['num_ranks']} ranks connected"
    if communication["notes"]:
        return [_warning("communication", f"{text}; {'; '.join(communication['notes'])}", "make setup")]
    return [_ok("communication", text)]


def _hdf5(facts: Facts) -> Finding:
    hdf5 = facts["hdf5"]
    if "error" in hdf5:
        return _problem(
            "HDF5", f"h5py: {hdf5['error']}", "data and checkpoints are HDF5: make setup installs h5py"
        )
    text = f"{hdf5['hdf5']}, h5py {hdf5['h5py']}"
    if not hdf5["parallel"]:
        return _ok("HDF5", f"{text}, not parallel (hpctrain does not need parallel HDF5)")
    return _ok("HDF5", f"{text}, parallel")


def _run_directory(facts: Facts) -> list[Finding]:
    disk = facts["run_directory"]
    topic = "run directory"
    if "error" in disk:
        return [
            _problem(
                topic,
                f"{disk['path']}: {disk['error']}",
                "give another with --run-directory, or make it writable",
            )
        ]
    text = f"{disk['path']}: {disk['kind']}, {_bytes(disk['free_bytes'])} free"
    if disk["kind"] in _IN_MEMORY:
        return [
            _warning(topic, text, "this is memory: runs and checkpoints are lost at a restart of the machine")
        ]
    if disk["free_bytes"] < _LOW_SPACE_BYTES:
        return [_warning(topic, text, "checkpoints may not fit: free space, or give another directory")]
    return [_ok(topic, text)]


def _scratch(facts: Facts) -> Finding:
    scratch = facts["scratch"]
    tmp, shm = scratch["tmp_free_bytes"], scratch["shm_free_bytes"]
    if shm is not None and shm < _SMALL_SHM_BYTES:
        return _warning(
            "scratch",
            f"/dev/shm has {_bytes(shm)} free",
            "ranks of one node exchange data there: start the container with a larger --shm-size",
        )
    shown = "no /dev/shm" if shm is None else f"/dev/shm {_bytes(shm)} free"
    return _ok("scratch", f"temporary directory {_bytes(tmp)} free, {shown}")


def _bytes(count: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
