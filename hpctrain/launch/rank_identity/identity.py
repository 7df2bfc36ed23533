"""Rank of this process, read from the environment variables that its launcher set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.errors import LaunchError, TopologyError
from hpctrain.launch.rank_identity.launchers import (
    NUM_RANKS_VARIABLE,
    LauncherVariables,
    cure_for,
    find_launcher,
)
from hpctrain.launch.slurm_counts import expand_counts

RANKS_PER_NODE_VARIABLE = "HPCTRAIN_RANKS_PER_NODE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """Rank of this process in the run and on its node. None: the launcher does not set it.

    If `emulated`, `local_rank`, `local_size`, `node_rank` and `node_name` refer to the emulated node. `host_rank` and
    `host_size` always count the ranks on this machine.
    """

    launcher: str
    rank: int
    num_ranks: int
    local_rank: int | None
    local_size: int | None
    node_rank: int | None
    node_name: str
    emulated: bool = False
    ranks_per_node: int | None = None
    host_rank: int | None = None
    host_size: int | None = None

    def describe(self) -> str:
        """For example `rank 2 of 4 (Open MPI), local rank 0 of 2 on host/1 (emulated node)`."""
        text = f"rank {self.rank} of {self.num_ranks} ({self.launcher})"
        if self.local_rank is not None:
            text += f", local rank {self.local_rank}"
            text += f" of {self.local_size}" if self.local_size is not None else ""
        return f"{text} on {self.node_name}" + (" (emulated node)" if self.emulated else "")


def identify(environ: Mapping[str, str], hostname: str) -> RankIdentity:
    """Returns the identity of this process. `hostname`: node name if the launcher sets none.

    Without a launcher's variables this is the only rank. Raises LaunchError if the variables contradict each other
    (left over from another launch), if a rank is set without the number of ranks, or if torchrun started this process.
    """
    row = find_launcher(environ)
    if row is None:
        _refuse_torchrun(environ)
        identity = RankIdentity(
            launcher="none",
            rank=0,
            num_ranks=1,
            local_rank=0,
            local_size=1,
            node_rank=0,
            node_name=hostname,
            host_rank=0,
            host_size=1,
        )
    else:
        identity = _from_row(row, environ, hostname)
    text = environ.get(RANKS_PER_NODE_VARIABLE)
    return _emulate(identity, text, hostname) if text else identity


def _from_row(row: LauncherVariables, environ: Mapping[str, str], hostname: str) -> RankIdentity:
    rank = _number(environ, (row.rank,), row)
    num_ranks = _number(environ, row.num_ranks, row)
    if rank is not None and num_ranks is None and NUM_RANKS_VARIABLE in row.num_ranks:
        raise LaunchError(
            f"{row.name} started this process as rank {rank}, but tells the number of ranks to MPI only, and "
            f"{NUM_RANKS_VARIABLE} is not set: {row.cure}"
        )
    if rank is None or num_ranks is None:
        missing = row.rank if rank is None else " or ".join(row.num_ranks)
        raise LaunchError(
            f"{row.name} started this process, but {missing} is not set: some of the launcher's "
            f"variables were removed, or are left over from another launch; {row.cure}"
        )
    if not 0 <= rank < num_ranks:
        raise LaunchError(
            f"{row.rank}={rank}, but there are {num_ranks} ranks ({row.num_ranks[0]}): these variables are "
            f"left over from another launch, or come from two launches; {row.cure}"
        )
    local_rank = _number(environ, row.local_rank, row)
    local_size = _number(environ, row.local_size, row)
    node_rank = _number(environ, row.node_rank, row)
    if row.tasks_per_node and environ.get(row.tasks_per_node):
        counts = expand_counts(environ[row.tasks_per_node], variable=row.tasks_per_node)
        if sum(counts) != num_ranks or (node_rank is not None and node_rank >= len(counts)):
            raise LaunchError(
                f"{row.tasks_per_node}={environ[row.tasks_per_node]} does not fit "
                f"{row.num_ranks[0]}={num_ranks} and node {node_rank}: these variables come "
                f"from two launches; {row.cure}"
            )
        if node_rank is not None:
            local_size = counts[node_rank]
    if local_rank is not None and local_size is not None and not 0 <= local_rank < local_size <= num_ranks:
        raise LaunchError(
            f"rank {rank} of {num_ranks} is local rank {local_rank} of {local_size} by the variables of "
            f"{row.name}, which cannot be: they come from two launches; {row.cure}"
        )
    return RankIdentity(
        launcher=row.name,
        rank=rank,
        num_ranks=num_ranks,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node_rank,
        node_name=(environ.get(row.host_name) if row.host_name else None) or hostname,
        host_rank=local_rank,
        host_size=local_size,
    )


def _number(environ: Mapping[str, str], names: tuple[str, ...], row: LauncherVariables) -> int | None:
    """Value of the first of `names` that is set; None if none is. Raises LaunchError if it is not a number."""
    for name in names:
        text = environ.get(name)
        if not text:
            continue
        if not (text.isascii() and text.isdigit()):
            raise LaunchError(f"{name}={text!r} is not a number, and {row.name} sets a number: {row.cure}")
        return int(text)
    return None


def _emulate(identity: RankIdentity, text: str, hostname: str) -> RankIdentity:
    """Places the ranks of one machine on emulated nodes of `text` ranks each, in rank order. Raises LaunchError."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise LaunchError(
            f"{RANKS_PER_NODE_VARIABLE}={text!r} is not a number of at least 1: unset it, "
            "or set it with `hpctrain launch --ranks-per-node`"
        )
    if identity.host_size is not None and identity.host_size != identity.num_ranks:
        raise LaunchError(
            f"{RANKS_PER_NODE_VARIABLE}={text} emulates nodes on one machine, but only "
            f"{identity.host_size} of the {identity.num_ranks} ranks are on {hostname}: unset "
            f"it to use the real nodes"
        )
    size = int(text)
    node = identity.rank // size
    return RankIdentity(
        launcher=identity.launcher,
        rank=identity.rank,
        num_ranks=identity.num_ranks,
        local_rank=identity.rank % size,
        local_size=min(size, identity.num_ranks - node * size),
        node_rank=node,
        node_name=f"{identity.node_name}/{node}",
        emulated=True,
        ranks_per_node=size,
        host_rank=identity.host_rank,
        host_size=identity.host_size,
    )


def _refuse_torchrun(environ: Mapping[str, str]) -> None:
    if environ.get("RANK") and environ.get("WORLD_SIZE") and environ.get("MASTER_ADDR"):
        raise LaunchError(
            f"RANK={environ['RANK']} and WORLD_SIZE={environ['WORLD_SIZE']} are set, as by torchrun or a similar "
            "launcher. hpctrain's ranks are started by mpirun or srun: use "
            f"`hpctrain launch -n {environ['WORLD_SIZE']} -- COMMAND`, or unset RANK, WORLD_SIZE and "
            "MASTER_ADDR to run as one rank"
        )


def cross_check(
    identity: RankIdentity, *, mpi_rank: int, mpi_size: int, container: str = "", library: str = ""
) -> None:
    """Raises TopologyError if MPI reports another rank or number of ranks than the environment.

    Every rank finds such a disagreement by itself, so the ranks need not vote; and they could not vote if each
    process is a separate MPI run of one rank. container: what this process runs in (`Surroundings.container`). library:
    name and version of the MPI that this process has loaded.
    """
    if (identity.rank, identity.num_ranks) == (mpi_rank, mpi_size):
        return
    found = (
        f"this process is rank {identity.rank} of {identity.num_ranks} by {identity.launcher}'s variables"
        if identity.launcher != "none"
        else "no launcher's variables are set, so this should be the only rank"
    )
    reported = f"MPI reports rank {mpi_rank} of {mpi_size}" + (f" ({library})" if library else "")
    cure = cure_for(identity.launcher)
    if mpi_size == 1:
        reason = (
            "The launcher and the MPI library do not belong together: each process runs alone, so that the run "
            f"would be done {identity.num_ranks} times"
        )
        if container:
            reason = (
                f"The MPI library in {container} does not understand the launcher: each of the "
                f"{identity.num_ranks} ranks sees a world of one, so that the run would be done that often"
            )
            cure = (
                f"{cure}. If the launcher is inside too, mpi4py has loaded another MPI than the launcher's: build it "
                "with that MPI's compiler (MPICC=PATH make setup). If it is outside, that library must be of the "
                "launcher's family and speak its PMI or PMIx version, so build the image with the site's MPI or one "
                "of its kind, or bind the site's MPI into the container"
            )
    elif mpi_size != identity.num_ranks:
        reason = "The variables are left over from another launch, or another launcher started the ranks"
    else:
        reason = "The two number the ranks differently, so that ranks would use wrong devices and data"
    raise TopologyError(f"{found}, but {reported}. {reason}: {cure}")
