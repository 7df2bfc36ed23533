"""Makes FSDP2 reduce gradients in two levels, or encoded, through its hooks for other communication (ADR 55)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol, final

import torch

from hpctrain.comm import Collective, Traffic, TwoLevel, World, make_two_level
from hpctrain.distributed import (
    CommunicatorGroup,
    OperationThread,
    group_traffic,
    is_sharded_tensor,
    shard_mesh_of,
    start_group_sum,
    sum_gradients_by,
)
from hpctrain.errors import UsageError
from hpctrain.reduce.codecs import Codec, codec_named
from hpctrain.reduce.wire_formats import CODEC_WIRES, encodes_every_value
from hpctrain.reduce.zero.choices import SHARDED_ALGORITHMS
from hpctrain.storage import split_evenly
from hpctrain.topology import Topology

_ALIGNMENT = 8  # bytes, of every encoded slice; codecs require it


@final
class RankOrderSum:
    """Reduce-scatter and all-reduce over `comm` that send encoded values and add them up in rank order.

    The values are divided into slices, and each rank owns one slice. Every rank encodes its values of a slice and sends
    them to the owner of the slice, which adds up the values of all ranks in rank order. So the sum does not depend on
    which message arrives first, and each value is rounded once (Thakur et al. 2005, section 4.5). A rank's own values
    of its own slice are not encoded. Values are contiguous float32 or float64 in host memory, and are summed in their
    dtype.

    comm: communicator that no other object may use.
    codec: codec of the values that are sent, without error feedback.
    """

    def __init__(self, comm: Collective, *, codec: Codec) -> None:
        self._comm = comm
        self._codec = codec

    def reduce_scatter(self, values: torch.Tensor, *, counts: Sequence[int], out: torch.Tensor) -> None:
        """Writes this rank's slice of the sum of `values`, shape (sum(counts),), into `out`, shape (counts[rank],).

        Collective. This rank sends all slices except its own, encoded.

        counts: number of elements in each rank's slice, the same on every rank; an entry may be 0.
        """
        mine, num_ranks = self._comm.rank, self._comm.num_ranks
        sizes = [self._codec.num_bytes(count, dtype=values.dtype) for count in counts]
        room = [0 if owner == mine else _aligned(size) for owner, size in enumerate(sizes)]
        leaving = torch.zeros(sum(room), dtype=torch.uint8)
        slices = values.split(list(counts))
        for owner, packet in enumerate(leaving.split(room)):
            if owner != mine:
                self._codec.encode(slices[owner], out=packet[: sizes[owner]])
        received = [0 if rank == mine else _aligned(sizes[mine]) for rank in range(num_ranks)]
        arrived = self._comm.all_to_all(leaving, send_counts=room, receive_counts=received).split(received)
        for rank in range(num_ranks):
            packet = arrived[rank][: sizes[mine]]
            if rank == 0:
                out.copy_(slices[0]) if mine == 0 else self._codec.decode(packet, out=out)
            elif rank == mine:
                out.add_(slices[mine])
            else:
                self._codec.add(packet, out=out)

    def all_reduce(self, values: torch.Tensor) -> None:
        """Sums `values`, shape (n,), over the ranks, in place, with the same bits on every rank. Collective.

        Each rank sums one slice, and sends the sum encoded to all ranks. With N ranks, each rank sends 2 (N-1)/N of the
        encoded bytes of `values`.
        """
        counts = split_evenly(values.numel(), num_parts=self._comm.num_ranks)
        part = torch.empty(counts[self._comm.rank], dtype=values.dtype)
        self.reduce_scatter(values, counts=counts, out=part)
        sizes = [self._codec.num_bytes(count, dtype=values.dtype) for count in counts]
        room = [_aligned(size) for size in sizes]
        packet = torch.zeros(room[self._comm.rank], dtype=torch.uint8)
        self._codec.encode(part, out=packet[: sizes[self._comm.rank]])
        whole = self._comm.all_gather(packet, counts=room)
        firsts = accumulate(room, initial=0)
        for first, size, own in zip(firsts, sizes, values.split(counts), strict=False):
            self._codec.decode(whole[first : first + size], out=own)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@final
class TwoLevelSum:
    """Reduce-scatter in two levels. Values are sent unchanged within a node, and encoded between nodes.

    Every rank receives an equal part of the sum. Each element is added up over the ranks of a node in rank order, then
    over the nodes in node order. So a node sends each element to another node once, not once per rank. With C nodes,
    (C-1)/C of the values leave a node, encoded. The same number of ranks of each node send to other nodes: the number
    of ranks on the smallest node. The remaining ranks of larger nodes receive their parts from a rank of their node.
    This is the first half of the all-reduce of Mikami et al. 2018, arXiv:1811.05233.

    levels: communicators of `topology`, used by this object only.
    codec: codec of the values that are sent between nodes.
    """

    def __init__(self, levels: TwoLevel, *, topology: Topology, codec: Codec) -> None:
        self._local: Collective = levels.local
        self._within = RankOrderSum(levels.local, codec=codec_named("fp32"))
        self._between = RankOrderSum(levels.cross, codec=codec) if levels.cross is not None else None
        self._carriers = range(levels.num_slices)
        # The first ranks of a node carry the parts between nodes: [carrier][node] -> the ranks whose parts it carries.
        self._ranks = [
            [ranks[carrier :: levels.num_slices] for ranks in topology.ranks_by_node]
            for carrier in self._carriers
        ]
        self._order = torch.tensor(
            [rank for of_carrier in self._ranks for of_node in of_carrier for rank in of_node]
        )
        self._node = topology.node_of(levels.local.members[levels.local.rank])

    def reduce_scatter(self, values: torch.Tensor, *, out: torch.Tensor) -> None:
        """Writes this rank's part of the sum of `values`, shape (num_ranks * n,), into `out`, shape (n,).

        Collective over all ranks, and blocking.
        """
        width, place = out.numel(), self._local.rank
        counts = [width * sum(map(len, of_carrier)) for of_carrier in self._ranks]
        counts += [0] * (self._local.num_ranks - len(counts))
        carried = torch.empty(counts[place], dtype=values.dtype)
        ordered = values.view(len(self._order), width)[self._order].view(-1)
        self._within.reduce_scatter(ordered, counts=counts, out=carried)
        mine = carried.new_empty(0)
        if self._between is not None:
            per_node = [width * len(of_node) for of_node in self._ranks[place]]
            mine = carried.new_empty(per_node[self._node])
            self._between.reduce_scatter(carried, counts=per_node, out=mine)
        out.copy_(self._delivered(mine, width=width))

    def _delivered(self, mine: torch.Tensor, *, width: int) -> torch.Tensor:
        """Returns this rank's part of the sum, shape (width,).

        On a node with more ranks than carriers (the ranks that send to other nodes), the carriers send the other ranks
        their parts.

        mine: the parts that this rank has summed, concatenated; empty if it is not a carrier.
        width: number of elements of one rank's part.
        """
        local, carriers = self._local, len(self._carriers)
        if local.num_ranks == carriers:
            return mine
        return local.all_to_all(
            mine,
            send_counts=self._widths(local.rank, width) if local.rank < carriers else [0] * local.num_ranks,
            receive_counts=[
                width if carrier == local.rank % carriers else 0 for carrier in range(local.num_ranks)
            ],
        )

    def _widths(self, carrier: int, width: int) -> Sequence[int]:
        carriers = len(self._carriers)
        return [width if rank % carriers == carrier else 0 for rank in range(self._local.num_ranks)]


# Has FSDP2 reduce gradients in two levels, or encoded, through its hooks for other communication (ADR 55).


def reduce_gradients_by(
    algorithm: str,
    *,
    wire: str,
    model: torch.nn.Module,
    world: World,
    topology: Topology,
    note: Callable[[str], None] = lambda text: None,
) -> Callable[[], None]:
    """Makes FSDP2 sum the gradients of a sharded model by `algorithm`, encoded in the wire format `wire`.

    Collective. Gradients are summed in their dtype, in rank order.

    algorithm: `direct`: each rank receives its part from every other rank. `hierarchical`: gradients are summed within
    the node first, then encoded and summed between the nodes. `auto`: FSDP2's own operation for `fp32`, otherwise
    `direct`. If each node holds all shards of the model (`shard_within = 'node'`), FSDP2's own operation sums within
    the node, and `auto` and `hierarchical` encode the sums between nodes.
    wire: wire format.
    model: a model that `parallelize` has sharded.
    note: function that is called with a text for the user if `hierarchical` is not possible.

    Returns a function that ends the thread that computes the sums; later gradients are then summed by FSDP2's own
    operation. Raises UsageError on every rank for unknown names, and for a model whose gradients cannot be summed in
    this way.
    """
    if algorithm not in SHARDED_ALGORITHMS or not encodes_every_value(wire):
        raise UsageError(
            f"sharded gradients cannot be summed by the algorithm {algorithm!r} with the wire format {wire!r}: choose "
            f"one of {', '.join(SHARDED_ALGORITHMS)}, and one of {', '.join(CODEC_WIRES)}",
            agreed=True,
        )
    if topology.num_ranks == 1 or (algorithm == "auto" and wire == "fp32"):
        return _nothing
    # Its ranks ascend: part r is that of rank r.
    mesh = _checked_mesh(model, num_ranks=topology.num_ranks)
    codec, traffic = codec_named(wire), group_traffic() or Traffic(topology)
    if mesh.ndim == 2:
        _encode_between_nodes(mesh, algorithm=algorithm, codec=codec)
        return _nothing
    if algorithm == "hierarchical" and 1 < topology.num_nodes < topology.num_ranks:
        levels = make_two_level(world, topology)
        local = _polling(world, levels.local.members) or levels.local
        cross = levels.cross and (_polling(world, levels.cross.members) or levels.cross)
        levels = traffic.counted_levels(replace(levels, local=local, cross=cross))
        return _sum_during_backward(TwoLevelSum(levels, topology=topology, codec=codec).reduce_scatter, model)
    if algorithm == "hierarchical":
        note(f"reduction: hierarchical was asked for, direct is used: {topology.describe()}")
    num_ranks = topology.num_ranks
    everyone = _polling(world, range(num_ranks)) or world.duplicate()
    flat = RankOrderSum(traffic.counted(everyone), codec=codec)

    def sums(values: torch.Tensor, *, out: torch.Tensor) -> None:
        flat.reduce_scatter(values, counts=[out.numel()] * num_ranks, out=out)

    return _sum_during_backward(sums, model)


def _nothing() -> None:
    """Does nothing: there is no thread to end."""


def _checked_mesh(model: torch.nn.Module, *, num_ranks: int) -> Any:
    """Returns the device mesh over which the model's parameters are sharded.

    Raises UsageError if hpctrain cannot sum gradients on this mesh, on its device, or in the dtype of a parameter.
    """
    parameters: list[Any] = [p for p in model.parameters() if is_sharded_tensor(p)]
    mesh: Any = shard_mesh_of(model)
    if mesh.device_type != "cpu":
        raise UsageError(
            f"on {mesh.device_type} NCCL sums sharded gradients, uncompressed: leave algorithm and wire out",
            agreed=True,
        )
    if mesh.size() != num_ranks:
        raise UsageError(
            f"the model is sharded over {mesh.size()} of {num_ranks} ranks: algorithms and wire formats of sharded "
            "gradients need shards over all; leave algorithm and wire out",
            agreed=True,
        )
    for parameter in parameters:
        if parameter.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"a gradient of dtype {parameter.dtype} can only be sent unchanged: leave algorithm and wire out",
                agreed=True,
            )
    return mesh


def _encode_between_nodes(mesh: Any, *, algorithm: str, codec: Codec) -> None:
    """Makes the sums over the nodes, the first axis of the mesh, send encoded values.

    FSDP2 uses the process group of this axis to add up the shards of the nodes.
    """
    if algorithm == "direct":
        raise UsageError(
            "shards within a node are summed there first: choose the algorithm hierarchical or auto, or "
            "shard_within = 'world'",
            agreed=True,
        )
    if codec.exact:
        return
    if mesh.size(0) == mesh.size():
        # Its group would be the program's own, whose sums must stay exact.
        raise UsageError(
            "with one rank on each node there are no shards within a node: choose shard = 'none', which has all wire "
            "formats, or shard_within = 'world'",
            agreed=True,
        )
    group = mesh.get_group(0)
    if not isinstance(group, CommunicatorGroup):
        raise UsageError(
            "torch.distributed was initialised with another backend, which cannot encode gradients: let "
            "session.parallelize initialise it, or leave wire out",
            agreed=True,
        )
    group.sum_by(lambda comm: RankOrderSum(comm, codec=codec).all_reduce)


def _polling(world: World, members: Sequence[int]) -> Collective | None:
    """Returns a communicator of the world ranks `members` that polls while it waits, so that backward can use the core.

    Returns None if the backend has no such communicator. Collective over `members`.
    """
    opened = world.open_group(members)
    return opened[0] if opened is not None else None


def _sum_during_backward(sums: Sums, model: torch.nn.Module) -> Callable[[], None]:
    """Makes `sums` sum the gradients on a thread, while backward runs. Returns a function that ends the thread."""
    thread = OperationThread("hpctrain-sharded-sums")
    is_open = True

    def start(values: torch.Tensor, *, out: torch.Tensor, group: Any) -> torch.distributed.Work:
        if not is_open:
            return start_group_sum(values, out=out, group=group)
        return thread.run(lambda: sums(values, out=out), [out], behind=True)

    def close() -> None:
        nonlocal is_open
        is_open = False
        thread.close()

    sum_gradients_by(start, model)
    return close


class Sums(Protocol):
    """Function that writes this rank's part of the sum of `values` into `out`. Collective and blocking."""

    def __call__(self, values: torch.Tensor, *, out: torch.Tensor) -> None: ...
