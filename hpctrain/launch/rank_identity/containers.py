"""Detects containers that hide the ranks of a run from each other.

A launcher starts N processes, each of which enters a container. Two things may then go wrong. The MPI library in the
container may not understand the launcher outside; `identity.cross_check` detects that. Or the launcher's variables do
not reach the container; this module detects that, as far as the container lets this process see what is outside. In
both cases N runs of one rank each would write to one directory.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hpctrain.launch.rank_identity.identity import find_launcher
from hpctrain.launch.rank_identity.launcher_process import STARTERS

# The path in a Slurm step's control groups, of both versions.
_SLURM_TASK = re.compile(r"/job_(\d+)/step_(\d+)/(?:user/)?task_(\d+)")
# Programs that launchers start in addition to the ranks.
_HELPERS = {"ssh", "rsh", "srun", "orted", "prted", "hydra_pmi_proxy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestor:
    """A process above this one.

    name: name of the ancestor.
    environ: environment variables of the ancestor; empty if this process may not read them.
    in_container: True if the ancestor sees the same mounts as this process.
    num_tasks: number of processes, except helpers such as ssh, that the ancestor has started, if the ancestor is a
    launcher's program on this node; otherwise 0.
    """

    name: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    in_container: bool = False
    num_tasks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What this process can see of its surroundings.

    container: for example `the container /images/train.sif`; empty outside of containers.
    ancestors: processes above this one, from the parent upwards.
    cgroups: content of /proc/self/cgroup.
    """

    container: str = ""
    ancestors: tuple[Ancestor, ...] = ()
    cgroups: str = ""


def why_not_alone(environ: Mapping[str, str], surroundings: Surroundings) -> str | None:
    """Returns why a process without launcher variables is not the only rank; None if no other rank is known. Pure.

    If the variables were removed inside the container, or without any container (`env -i`), this returns None: the
    variables were removed on purpose.
    """
    if find_launcher(environ) is not None:
        return None
    place = surroundings.container or "this container"
    for ancestor in surroundings.ancestors:
        row = find_launcher(ancestor.environ)
        if row is None:
            continue
        rank = ancestor.environ.get(row.rank, "unknown")
        num_ranks = next(filter(None, map(ancestor.environ.get, row.num_ranks)), "several")
        if ancestor.in_container or num_ranks == "1":
            return None
        return _explain(place, f"outside of it {row.name} started this process as rank {rank} of {num_ranks}")
    if not surroundings.container:
        return None
    for ancestor in surroundings.ancestors:
        if ancestor.num_tasks > 1 and not ancestor.in_container:
            found = f"outside of it {ancestor.name} started {ancestor.num_tasks} processes on this node"
            return _explain(place, found)
    task = _SLURM_TASK.search(surroundings.cgroups)
    if task is not None and int(task[3]) > 0:
        job, step, number = task.groups()
        found = f"by its control group this process is task {number} of Slurm's step {job}.{step}"
        return _explain(place, found)
    return None


def _explain(place: str, found: str) -> str:
    return (
        f"no launcher's variables are set in {place}, but {found}: each rank would take itself for the only one, and "
        "do the whole run. Let the variables in (Apptainer: without --cleanenv and --containall; Docker and Podman: "
        "pass them with --env), or set run.backend to serial if each process is meant to be a run of one rank"
    )


def read_surroundings(environ: Mapping[str, str], *, root: Path = Path("/")) -> Surroundings:
    """Returns the surroundings of this process. root: directory that contains the marks of containers."""
    try:
        cgroups = Path("/proc/self/cgroup").read_text()
    except OSError:
        cgroups = ""
    return Surroundings(container=_container(environ, root), ancestors=tuple(_ancestors()), cgroups=cgroups)


def _container(environ: Mapping[str, str], root: Path) -> str:
    # Apptainer sets its variable also with --cleanenv.
    image = environ.get("APPTAINER_CONTAINER") or environ.get("SINGULARITY_CONTAINER")
    if image:
        return f"the container {image}"
    marks = (("Docker", ".dockerenv"), ("Podman", "run/.containerenv"), ("Singularity", ".singularity.d"))
    return next((f"the {name} container" for name, mark in marks if (root / mark).exists()), "")


def _ancestors() -> list[Ancestor]:
    found: list[Ancestor] = []
    mounts = _mounts("self")
    with contextlib.suppress(psutil.Error):  # one of them has ended
        for process in psutil.Process().parents():
            name, environ = process.name(), {}
            with contextlib.suppress(psutil.AccessDenied):  # a process of another user
                environ = process.environ()
            tasks = process.children() if name in STARTERS else []
            found.append(
                Ancestor(
                    name=name,
                    environ=environ,
                    in_container=_mounts(str(process.pid)) == mounts,
                    num_tasks=sum(child.name() not in _HELPERS for child in tasks),
                )
            )
    return found


def _mounts(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return ""
