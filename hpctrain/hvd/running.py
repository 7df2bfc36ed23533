"""Starts and ends Horovod's interface, and holds its module state: session, ranks and process sets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hpctrain.comm import describe_ranks
from hpctrain.distributed import two_level_sums
from hpctrain.errors import LaunchError, UsageError
from hpctrain.hvd.errors import HorovodValueError
from hpctrain.hvd.group import Group
from hpctrain.run import Session, init as init_session, uncaught_as_message

_TIMEOUT_S = 600.0


class ProcessSet:
    """A set of ranks that run operations together.

    Register it on all ranks with `add_process_set` or `init(process_sets=[...])` before it is used.

    Args:
        ranks: The world ranks of the set.

    Attributes:
        process_set_id: The identifier of the set; 0 for the set of all ranks, None if the set is not registered.
        ranks: The world ranks, ascending.

    Raises:
        HorovodValueError: If `ranks` are not distinct integers.
    """

    process_set_id: int | None = None
    mpi_comm = None

    def __init__(self, ranks: Iterable[int]) -> None:
        if not isinstance(ranks, Iterable):
            raise HorovodValueError("a process set was given a communicator: give a list of world ranks")
        self.ranks = sorted(ranks)
        if any(not isinstance(rank, int) for rank in self.ranks) or len(set(self.ranks)) < len(self.ranks):
            raise HorovodValueError(f"a process set is a list of ranks, each only once, not {self.ranks}")

    def size(self) -> int | None:
        """Returns the number of ranks of the set; None if the set is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Returns this rank's index in the set; -1 for a rank outside the set, None if the set is not registered."""
        if self.process_set_id is None:
            return None
        return self.ranks.index(rank()) if self.included() else -1

    def included(self) -> bool:
        """Returns True if this rank is in the set."""
        return _session().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])


class _Groups(NamedTuple):
    """The groups of a process set: one for the script's operations and one for the gradients of optimizers.

    Gradients have a separate group, since `step` may start their reductions after other operations.
    """

    operations: Group
    gradients: Group

    def close(self) -> None:
        self.operations.close()
        self.gradients.close()


class _State:
    """The module state.

    `sets` maps the identifier of a process set to the set and its groups; the groups are None on ranks outside the set.
    """

    session: Session | None = None
    sets: dict[int, tuple[ProcessSet, _Groups | None]]
    next_id = 0


_state = _State()
_state.sets = {}


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
    *,
    timeout_s: float | None = None,
    watch_folder: str | Path | None = None,
) -> None:
    """Connects this process to the other ranks that mpirun or srun started. Collective. A second call does nothing.

    Without a launcher there is one rank.

    Args:
        comm: None, the list of all ranks, or an mpi4py communicator of all ranks.
        process_sets: The process sets to register. `"dynamic"` is accepted and has no effect.
        timeout_s: The time limit of an operation in seconds, after which all ranks end with exit code 6. None:
            HOROVOD_STALL_SHUTDOWN_TIME_SECONDS if it is set and not 0, else 600.
        watch_folder: A folder on a filesystem that all nodes share, created if it does not exist. With it, the message
            at the time limit names the missing ranks.

    Raises:
        LaunchError: If mpi4py is missing.
        UsageError: If `comm` does not hold all ranks.
    """
    if _state.session is not None:
        return
    limit_s = timeout_s or float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") or 0) or _TIMEOUT_S
    session = init_session(device="cpu", timeout_s=limit_s)
    if session.world.backend not in ("mpi", "serial"):
        raise LaunchError(
            f"hpctrain.hvd needs MPI under its ranks, this session's backend is {session.world.backend}: install mpi4py"
        )
    session.agreed(lambda: _check_everyone(comm, session), os_error=UsageError)
    if watch_folder is not None:
        session.world.publish_in(Path(watch_folder))
    _state.session = session
    session.on_close(_close_groups)
    global_process_set.ranks = list(range(session.world_size))
    _make_known(global_process_set, sums_in_two_levels=True)
    for process_set in [] if process_sets is None or isinstance(process_sets, str) else process_sets:
        add_process_set(process_set)


def shutdown() -> None:
    """Waits for the operations that were started, and ends communication.

    Collective. Does nothing without `init`.
    """
    if _state.session is not None:
        _close_groups()  # takes part in what other ranks still reduce
        for process_set, _ in _state.sets.values():
            process_set.process_set_id = None
        session, _state.session, _state.sets, _state.next_id = _state.session, None, {}, 0
        session.close()


def reopen_groups() -> None:
    """Replaces the groups of all process sets after an operation that failed on all ranks. Collective."""
    _close_groups()
    known, _state.sets, _state.next_id = list(_state.sets.items()), {}, 0
    for number, (process_set, _) in known:
        _state.next_id = number
        _make_known(process_set, sums_in_two_levels=number == 0)


def is_initialized() -> bool:
    """Returns True between `init` and `shutdown`."""
    return _state.session is not None


def size() -> int:
    """Returns the number of ranks. Raises HorovodValueError before `init`, as do `rank`, `local_size` and so on."""
    return _session().world_size


def rank() -> int:
    """Returns the rank of this process, from 0."""
    return _session().rank


def local_size() -> int:
    """Returns the number of ranks on this rank's node."""
    return len(_ranks_of_node())


def local_rank() -> int:
    """Returns the index of this rank on its node, from 0."""
    return _session().local_rank


def cross_size() -> int:
    """Returns the number of nodes that have a rank with this rank's local rank."""
    return len(_nodes_with_this_local_rank())


def cross_rank() -> int:
    """Returns the index of this rank's node among the nodes that have a rank with this rank's local rank."""
    session = _session()
    return _nodes_with_this_local_rank().index(session.topology.node_of(session.rank))


def is_homogeneous() -> bool:
    """Returns True if all nodes have the same number of ranks."""
    return len({len(ranks) for ranks in _session().topology.groups("local")}) == 1


def mpi_threads_supported() -> bool:
    """Returns True, since `init` fails without MPI_THREAD_MULTIPLE."""
    _session()
    return True


def mpi_enabled() -> bool:
    """Returns True, since hpctrain.hvd always communicates over MPI."""
    return True


def mpi_built() -> bool:
    """Returns True, since hpctrain.hvd always communicates over MPI."""
    return True


def gloo_enabled() -> bool:
    """Returns False, since hpctrain.hvd does not use Gloo."""
    return False


def gloo_built() -> bool:
    """Returns False, since hpctrain.hvd does not use Gloo."""
    return False


def nccl_built() -> int:
    """Returns 0, since hpctrain.hvd does not use NCCL."""
    return 0


def ddl_built() -> bool:
    """Returns False, since hpctrain.hvd does not use DDL."""
    return False


def ccl_built() -> bool:
    """Returns False, since hpctrain.hvd does not use oneCCL."""
    return False


def cuda_built() -> bool:
    """Returns False, since tensors on a GPU are copied to host memory."""
    return False


def rocm_built() -> bool:
    """Returns False, since tensors on a GPU are copied to host memory."""
    return False


@uncaught_as_message
def run(*arguments: Any, **options: Any) -> NoReturn:
    """Raises UsageError, since Horovod's `run`, which starts ranks from inside a program, is not supported."""
    raise UsageError(
        "hpctrain.hvd has no `run`: ranks are started from outside of the program. Call the function itself, and start "
        f"the script with `hpctrain launch -n {options.get('np') or 'N'} -- python SCRIPT`, with mpirun or with srun"
    )


def start_timeline(file_path: str, mark_cycles: bool = False) -> NoReturn:
    """Raises UsageError, since timelines are not supported."""
    raise UsageError(
        f"hpctrain.hvd writes no timeline ({file_path}): use torch.profiler in the script, or train a recipe, whose "
        "steps `hpctrain trace` shows on all ranks"
    )


def stop_timeline() -> None:
    """Does nothing, since timelines are not supported."""


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers a process set and opens its communicators. Collective over all ranks, members or not.

    Args:
        process_set: The process set, or a list of its world ranks.

    Returns:
        The process set.

    Raises:
        HorovodValueError: If the set is empty, has ranks that do not exist, or equals a registered set.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = process_set.ranks
    if not ranks or not set(ranks) <= set(global_process_set.ranks):
        raise HorovodValueError(
            f"a process set of ranks {ranks}: give one or more of the ranks 0 to {size() - 1}"
        )
    if any(known.ranks == ranks for known, _ in _state.sets.values()):
        raise HorovodValueError(f"there is a process set of {describe_ranks(ranks)} already: use that one")
    group_of(global_process_set).run(f"add_process_set {ranks}", lambda: None, behind=False)
    _make_known(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregisters a process set and closes its communicators. Collective over all ranks.

    Returns:
        False, with nothing changed, if the set is not registered or is the set of all ranks.
    """
    number = process_set.process_set_id
    if not number:
        return False
    group_of(global_process_set).run(f"remove_process_set {process_set.ranks}", lambda: None, behind=False)
    _, groups = _state.sets.pop(number)
    process_set.process_set_id = None
    if groups is not None:
        groups.close()
    return True


def group_of(process_set: ProcessSet) -> Group:
    """Returns the group that runs the operations of `process_set`.

    Raises HorovodValueError if this rank is not in the set.
    """
    return _groups_of(process_set).operations


def gradient_group_of(process_set: ProcessSet) -> Group:
    """Returns the group that reduces the gradients of optimizers over `process_set`.

    Raises HorovodValueError if this rank is not in the set.
    """
    return _groups_of(process_set).gradients


def current_session() -> Session:
    """Returns the session that `init` has started. Raises HorovodValueError before `init`."""
    return _session()


def _groups_of(process_set: ProcessSet) -> _Groups:
    session = _session()
    number = process_set.process_set_id
    if number is None:
        raise HorovodValueError(
            f"{process_set} is not registered: first call hvd.add_process_set on all ranks"
        )
    _, groups = _state.sets[number]
    if groups is None:
        raise HorovodValueError(
            f"rank {session.rank} is not in {process_set}, and cannot take part in its operations"
        )
    return groups


def _session() -> Session:
    if _state.session is None:
        raise HorovodValueError("hpctrain.hvd is not initialised: call hvd.init() first")
    return _state.session


def _make_known(process_set: ProcessSet, *, sums_in_two_levels: bool = False) -> None:
    """Gives the set the next identifier, which is the same on all ranks, and opens its groups on its members.

    Collective over the members.
    """
    groups = None
    if _session().rank in process_set.ranks:
        groups = _Groups(
            *(_open_group(process_set, prefix, sums_in_two_levels) for prefix in ("", "gradients of "))
        )
    process_set.process_set_id = _state.next_id
    _state.sets[_state.next_id] = (process_set, groups)
    _state.next_id += 1


def _open_group(process_set: ProcessSet, prefix: str, sums_in_two_levels: bool) -> Group:
    session = _session()
    opened = session.world.open_group(process_set.ranks, compared=False)
    if opened is None:
        raise LaunchError(
            f"the backend {session.world.backend} cannot create groups for hpctrain.hvd: use the backend mpi"
        )
    comm, _ = opened
    sums = two_level_sums(session.world, session.topology, comm.all_reduce) if sums_in_two_levels else None
    return Group(comm, name=f"{prefix}{describe_ranks(process_set.ranks)}", sums=sums)


def _close_groups() -> None:
    for _, groups in _state.sets.values():
        if groups is not None:
            groups.close()


def _check_everyone(comm: Any, session: Session) -> None:
    """Raises UsageError unless `comm` stands for all ranks."""
    everyone = list(range(session.world_size))
    if comm is None or (isinstance(comm, Iterable) and list(comm) in ([], everyone)):
        return
    if hasattr(comm, "Get_size") and (comm.Get_size(), comm.Get_rank()) == (session.world_size, session.rank):
        return
    raise UsageError(
        f"hvd.init(comm={comm}): hpctrain always uses all {session.world_size} ranks. For operations among some of "
        "the ranks use hvd.add_process_set"
    )


def _ranks_of_node() -> tuple[int, ...]:
    session = _session()
    return session.topology.groups("local")[session.topology.node_of(session.rank)]


def _nodes_with_this_local_rank() -> list[int]:
    nodes = _session().topology.groups("local")
    return [node for node, ranks in enumerate(nodes) if len(ranks) > local_rank()]
