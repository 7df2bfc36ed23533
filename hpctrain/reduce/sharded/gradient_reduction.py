"""Has FSDP2 reduce gradients in two levels, or encoded, through its hooks for other communication (ADR 55)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from hpctrain.comm import Collective, Traffic, World, make_two_level
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
from hpctrain.reduce.codecs.codec import Codec
from hpctrain.reduce.codecs.registry import codec_named
from hpctrain.reduce.sharded.choices import SHARDED_ALGORITHMS, SHARDED_WIRES
from hpctrain.reduce.sharded.rank_order_sum import RankOrderSum
from hpctrain.reduce.sharded.two_level_sum import TwoLevelSum
from hpctrain.topology import Topology


def reduce_gradients_by(
    algorithm: str,
    *,
    wire: str,
    model: torch.nn.Module,
    world: World,
    topology: Topology,
    note: Callable[[str], None] = lambda text: None,
) -> Callable[[], None]:
    """Has the gradients of a model that `parallelize` has sharded summed by `algorithm`, encoded as `wire`. Collective.

    algorithm: `direct`: each rank receives its part from every other one. `hierarchical`: within the node first, then
    encoded between the nodes. `auto`: FSDP2's own operation for `fp32`, otherwise `direct`. Shards within a node are
    summed there by FSDP2's own operation and encoded between the nodes, by `auto` and `hierarchical`. Sums are in the
    gradients' dtype, in the order of the ranks. note: reports a line if `hierarchical` cannot be had. Raises
    UsageError on every rank for other names, and for a model whose gradients cannot be summed so.

    Returns what ends the thread that sums; later backwards have the gradients summed by FSDP2's own operation.
    """
    if algorithm not in SHARDED_ALGORITHMS or wire not in SHARDED_WIRES:
        raise UsageError(
            f"sharded gradients cannot be summed by the algorithm {algorithm!r} with the wire format {wire!r}: choose "
            f"one of {', '.join(SHARDED_ALGORITHMS)}, and one of {', '.join(SHARDED_WIRES)}",
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
    """Ends what has no thread."""


def _checked_mesh(model: torch.nn.Module, *, num_ranks: int) -> Any:
    """Returns the mesh of the model's parameters. Raises UsageError for a mesh, device or dtype without such sums."""
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
                f"a gradient of dtype {parameter.dtype} is sent as it is: leave algorithm and wire out",
                agreed=True,
            )
    return mesh


def _encode_between_nodes(mesh: Any, *, algorithm: str, codec: Codec) -> None:
    """Has sums over the nodes, the first axis of the mesh, sent encoded: FSDP2 asks its group to add up the shards."""
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
            "torch.distributed was initialised with another backend, which sends gradients as they are: leave it to "
            "session.parallelize, or leave wire out",
            agreed=True,
        )
    group.sum_by(lambda comm: RankOrderSum(comm, codec=codec).all_reduce)


def _polling(world: World, members: Sequence[int]) -> Collective | None:
    """Returns a communicator of these world ranks that leaves the core to backward while it waits; None if there is
    none. Collective over them."""
    opened = world.open_group(members)
    return opened[0] if opened is not None else None


def _sum_during_backward(sums: Sums, model: torch.nn.Module) -> Callable[[], None]:
    """Has the gradients summed by `sums` on a thread, while backward runs. Returns what ends the thread."""
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
    """Writes this rank's part, `out`, of the sum of `values` over the ranks. Collective; blocks."""

    def __call__(self, values: torch.Tensor, *, out: torch.Tensor) -> None: ...
