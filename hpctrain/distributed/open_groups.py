"""Initialises `torch.distributed` over the communicator of all ranks."""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from hpctrain.comm import Traffic, TwoLevel, World, broadcast_json, host_addresses, make_two_level
from hpctrain.distributed.process_group import CommunicatorGroup
from hpctrain.errors import CommunicationError, LaunchError, UsageError
from hpctrain.topology import Topology

# The address at which the ranks of a run find rank 0.


_LOOPBACK = "127.0.0.1"


def address_of_rank_0(topology: Topology) -> str:
    """Returns, on rank 0, a name or address of its host to which the other ranks can connect. Does not communicate.

    On a single node this is the loopback address. If the host's own name does not resolve, as in containers, the
    address of a network interface is returned. On other ranks the result is not meaningful.
    """
    if topology.num_nodes == 1:
        return _LOOPBACK
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return next(iter(host_addresses()), _LOOPBACK)
    return name


# Opens `torch.distributed` over a world of ranks.


BACKEND = "hpctrain"
# Smaller sums go over all ranks at once: within the node and between the nodes costs more messages.
_TWO_LEVEL_BYTES = 1 << 16
# The oldest release that works. With 2.6 DDP waits for ever when it compares the shapes of parameters, and up to
# 2.5 groups in Python have no name.
_OLDEST = "2.8"


def open_process_group(
    world: World,
    topology: Topology,
    *,
    device: torch.device,
    timeout_s: float = 600.0,
    close: Callable[[], None] | None = None,
) -> None:
    """Initialises `torch.distributed` over the ranks of `world`. Collective.

    Sets the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT)
    where they are not set yet; on the CPU also ACCELERATE_USE_CPU, without which Hugging Face accelerate takes each
    rank for a separate program.

    Args:
        device: On the CPU, groups use hpctrain's communicators; on CUDA, NCCL, and gloo for tensors in host memory.
        timeout_s: The time limit of NCCL's operations, and of waits in PyTorch's key-value store, in seconds.
        close: A function that is called once `destroy_process_group` has ended the groups on the CPU.

    Raises UsageError if torch.distributed is initialised already; LaunchError without MPI or if PyTorch is too old.
    """
    if dist.is_initialized():
        raise UsageError("torch.distributed is initialised already: call destroy_process_group before")
    _forget_meshes()
    _set_variables(world, topology, host_memory=device.type != "cuda")
    if device.type == "cuda":
        _over_nccl(world, topology, device=device, timeout_s=timeout_s)
        return
    if world.backend not in ("mpi", "serial"):
        raise LaunchError(
            f"torch.distributed needs MPI under its ranks, this session's backend is {world.backend}: install mpi4py",
            agreed=True,
        )
    if torch.__version__ < _OLDEST:
        raise LaunchError(
            f"torch.distributed on CPUs needs PyTorch {_OLDEST} or newer, this is {torch.__version__}: "
            "update it. hpctrain's own updaters and recipes work with it, without shard = 'parameters', tensor and "
            "pipeline",
            agreed=True,
        )
    _register()
    _open.ranks, _open.close, _open.traffic = (world, topology), close, Traffic(topology)
    limit = timedelta(seconds=timeout_s)
    _open.store = _SharedStore(
        _store_on_rank_0(world, topology, timeout=limit),
        rank=world.rank,
        num_ranks=world.num_ranks,
        limit=limit,
    )
    _initialize(BACKEND, store=_open.store, world=world)


def _register() -> None:
    """Registers the backend with PyTorch, once per process."""
    if BACKEND.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu"])
    # PyTorch 2.15 and newer attach a recorder of operations to the groups of every backend that is not in this set. It
    # asks for a backend in C++, and would see nothing: it follows PyTorch's dispatcher, which calls no group in Python.
    without_recorder = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if without_recorder is not None:
        without_recorder.add(BACKEND)


def _forget_meshes() -> None:
    """Clears what DTensor has cached per mesh.

    Two meshes count as equal if their ranks and axes are equal, even if their groups differ. Without this, a new mesh
    would compute with the groups of an equal mesh that has ended; other groups may have taken their names.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor, debug

        if hasattr(debug, "_clear_sharding_prop_cache"):
            debug._clear_sharding_prop_cache()
        else:  # torch 2.8 and older
            propagator: Any = DTensor._op_dispatcher.sharding_propagator
            propagator.propagate_op_sharding.cache.cache_clear()


class _Open:
    """The objects that `_make_group` needs to create a process group, because PyTorch cannot pass them to it."""

    ranks: tuple[World, Topology] | None = None
    close: Callable[[], None] | None = None
    traffic: Traffic | None = None
    # PyTorch keeps the C++ part of a store alive, not the Python part.
    store: Store | None = None


_open = _Open()


def group_traffic() -> Traffic | None:
    """Returns the counter of the bytes that groups in host memory have sent; None if no group was ever opened."""
    return _open.traffic


def _make_group(options: Any, _: Any) -> CommunicatorGroup:
    """Creates a group of `options.global_ranks_in_group`; of all ranks if that is empty.

    Collective over these ranks.
    """
    if _open.ranks is None or _open.traffic is None:
        raise UsageError(f"backend {BACKEND!r} of torch.distributed: call hpctrain.init_process_group first")
    (world, topology), traffic = _open.ranks, _open.traffic
    members = list(options.global_ranks_in_group) or list(range(world.num_ranks))
    opened = world.open_group(members)
    if opened is None:
        raise LaunchError(
            f"the backend {world.backend} cannot create groups for torch.distributed: use the backend mpi"
        )
    comm, messages = opened
    if messages is not None:
        messages = traffic.counted_messages(messages, comm=comm)
    comm = traffic.counted(comm)
    everyone = members == list(range(world.num_ranks))
    sums = two_level_sums(world, topology, comm.all_reduce, traffic=traffic) if everyone else None

    def close() -> None:
        if sums is not None:
            sums.close()
        if not options.global_ranks_in_group:
            _close()

    return CommunicatorGroup(
        comm, messages=messages, name=options.group_id, sums=sums, on_shutdown=close,
        timeout_s=options.timeout.total_seconds() if options.timeout < default_pg_timeout else None,
    )  # fmt: skip


def two_level_sums(
    world: World,
    topology: Topology,
    flat_sum: Callable[[torch.Tensor], None],
    *,
    traffic: Traffic | None = None,
) -> TwoLevelSums | None:
    """Returns a function that sums a tensor in place, first within the nodes, then between them. Collective.

    The tensor has shape (n,). Each call opens new communicators, which `close` of the result frees. Returns None if
    there is one node, or one rank per node.

    flat_sum: the function that sums tensors of less than 64 KiB.
    traffic: the counter of the bytes that are sent for larger tensors.
    """
    if topology.num_nodes == 1 or topology.num_nodes == topology.num_ranks:
        return None
    two_level = make_two_level(world, topology)
    if traffic is not None:
        two_level = traffic.counted_levels(two_level)
    return TwoLevelSums(two_level, flat_sum=flat_sum)


@final
class TwoLevelSums:
    """A function that sums a tensor over all ranks, first within the nodes, then between them; see `two_level_sums`."""

    def __init__(self, two_level: TwoLevel, *, flat_sum: Callable[[torch.Tensor], None]) -> None:
        self._two_level = two_level
        self._flat_sum = flat_sum

    def __call__(self, flat: torch.Tensor) -> None:
        if flat.numel() * flat.element_size() < _TWO_LEVEL_BYTES:
            self._flat_sum(flat)
        else:
            self._two_level.all_reduce(flat)

    def close(self) -> None:
        """Frees the communicators of the two levels. Collective."""
        self._two_level.close()


def _close() -> None:
    _open.store = None
    # A session that the caller has made stays open: `torch.distributed.init_process_group("hpctrain")` may follow.
    if _open.close is not None:
        close, _open.ranks, _open.close = _open.close, None, None
        close()


def _set_variables(world: World, topology: Topology, *, host_memory: bool) -> None:
    variables: dict[str, Any] = {
        "RANK": world.rank,
        "WORLD_SIZE": topology.num_ranks,
        "LOCAL_RANK": topology.local_rank_of(world.rank),
        "LOCAL_WORLD_SIZE": len(topology.groups("local")[topology.node_of(world.rank)]),
    }
    if world.num_ranks > 1:
        # Nothing listens there; a library may open its own store. A single process must not look like one of torchrun.
        address = [address_of_rank_0(topology), _free_port()] if world.rank == 0 else None
        variables["MASTER_ADDR"], variables["MASTER_PORT"] = broadcast_json(world, address)
    if host_memory:
        variables["ACCELERATE_USE_CPU"] = "true"
    for name, value in variables.items():
        os.environ.setdefault(name, str(value))


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("", 0))
        return int(server.getsockname()[1])


def _over_nccl(world: World, topology: Topology, *, device: torch.device, timeout_s: float) -> None:
    """Initialises NCCL's groups. The ranks find each other through a store on rank 0."""
    timeout = timedelta(seconds=timeout_s)
    store = _store_on_rank_0(world, topology, timeout=timeout)()
    _initialize("cpu:gloo,cuda:nccl", store=store, world=world, timeout=timeout, device_id=device)


def _store_on_rank_0(world: World, topology: Topology, *, timeout: timedelta) -> Callable[[], Store]:
    """Returns a function that connects to a key-value store on rank 0. MPI broadcasts the store's address. Collective.

    The returned function is not collective. A run of one rank uses a store in that rank's memory.

    timeout: the time limit of the store's operations.
    """
    if world.num_ranks == 1:
        return HashStore
    # `wait_for_workers` would have rank 0 wait until all have connected.
    connect = functools.partial(TCPStore, world_size=world.num_ranks, wait_for_workers=False, timeout=timeout)
    here = address_of_rank_0(topology)
    server = connect(here, 0, is_master=True) if world.rank == 0 else None
    host, port = broadcast_json(world, [here, server.port] if server else None)
    return lambda: server or connect(host, port, is_master=False)


@final
class _SharedStore(Store):
    """PyTorch's key-value store on rank 0, to which this rank connects at the first use.

    Only groups of other backends and the user's program use the store. PyTorch calls the methods by these names.

    limit: time limit of `wait` if the caller gives a longer one, as Gloo does (half an hour), or none. When this limit
    is over, `wait` raises CommunicationError.
    """

    def __init__(self, connect: Callable[[], Store], *, rank: int, num_ranks: int, limit: timedelta) -> None:
        super().__init__()
        self._connected = functools.cache(connect)
        self._rank = rank
        self._num_ranks = num_ranks
        self._limit = limit

    def set(self, key: str, value: Any) -> None:
        self._connected().set(key, value)

    def get(self, key: str) -> bytes:
        return self._connected().get(key)

    def add(self, key: str, value: int) -> int:
        return self._connected().add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._connected().check(keys)

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        return self._connected().compare_set(key, expected_value, desired_value)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        store = self._connected()
        if timeout and timeout[0] <= self._limit:
            store.wait(keys, timeout[0])
            return
        store.set(_groups_key(self._rank), str(_num_groups()))
        try:
            store.wait(keys, self._limit)
        except RuntimeError as error:
            raise CommunicationError(self._missing(store, keys)) from error

    def _missing(self, store: Store, keys: list[str]) -> str:
        """Returns the message about those of `keys` that no rank has set within the limit."""
        missing = ", ".join(key for key in keys if not store.check([key]))
        made = {
            rank: store.get(_groups_key(rank)).decode()
            for rank in range(self._num_ranks)
            if store.check([_groups_key(rank)])
        }
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in made.items())
        return (
            f"waited {self._limit.total_seconds():g} s in torch.distributed's store for {missing}, which no rank has "
            "set. This happens when a group of another backend, such as gloo, waits until all ranks of the group have "
            "made it. PyTorch names the group by the number of groups that a rank has made before, so all ranks of the "
            f"group must have made equally many. Groups made by the ranks that have waited: {counts}. From PyTorch "
            "2.14 on, a group made with new_group(use_local_synchronization=True) is counted only on its own ranks: "
            "make such groups after the groups of other backends, or without that argument"
        )

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        return self._connected().delete_key(key)

    def getNumKeys(self) -> int:  # noqa: N802
        return self._connected().num_keys()

    def clone(self) -> Store:
        return self._connected().clone()  # type: ignore[attr-defined]


def _groups_key(rank: int) -> str:
    return f"hpctrain/groups made/{rank}"


def _num_groups() -> int:
    """Returns the number of groups that this rank has created, from which PyTorch derives the name of the next one."""
    return int(dist.distributed_c10d._world.group_count)


def _initialize(backend: str, *, store: Store, world: World, **options: Any) -> None:
    hook = sys.excepthook
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.num_ranks, **options)
    # PyTorch's hook prints what this one has printed, but the process has ended by then.
    sys.excepthook = hook
