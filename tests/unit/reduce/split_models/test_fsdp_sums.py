"""Reduce-scatter and all-reduce of encoded values, flat and in two levels, and what they send to other nodes."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm import Traffic, World, make_two_level, run_threads
from hpctrain.reduce import codec_named
from hpctrain.reduce.split_models.fsdp_sums import RankOrderSum, TwoLevelSum
from hpctrain.topology import Topology

# Of each value, times the number of ranks: see the codecs.
WITHIN = {"fp32": 0.0, "fp16": 2.0**-10, "bf16": 2.0**-7, "int8": 2 / 253}
WIDTH = 700  # of a rank's part: two blocks of int8 and a short one
# Equal nodes, ranks dealt out in turn, unequal nodes, nodes of one rank, one node.
NODES = ["aabb", "abab", "aabbcc", "aab", "abbbb", "aaabb", "abc", "aaa"]


def values_of(
    rank: int, num_ranks: int, dtype: torch.dtype = torch.float32, width: int = WIDTH
) -> torch.Tensor:
    return torch.randn(num_ranks * width, generator=torch.Generator().manual_seed(rank)).to(dtype)


def in_order(num_ranks: int, dtype: torch.dtype) -> torch.Tensor:
    total = values_of(0, num_ranks, dtype)
    for rank in range(1, num_ranks):
        total += values_of(rank, num_ranks, dtype)
    return total


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("wire", WITHIN)
def test_each_rank_gets_its_part_of_the_sum_in_two_levels(nodes: str, wire: str) -> None:
    topology, size = Topology.from_node_names(list(nodes)), len(nodes)

    def rank_main(world: World) -> torch.Tensor:
        levels = make_two_level(world, topology)
        sums = TwoLevelSum(levels, topology=topology, codec=codec_named(wire))
        out = torch.full((WIDTH,), torch.nan)
        sums.reduce_scatter(values_of(world.rank, size), out=out)
        return out

    parts = run_threads(size, rank_main)
    expected = in_order(size, torch.float64)
    torch.testing.assert_close(
        torch.cat(parts).double(), expected, rtol=1e-5, atol=WITHIN[wire] * size * 4 + 1e-5
    )
    # First the ranks of a node, then the nodes, each in their order.
    if wire == "fp32":
        in_turn = torch.zeros(0)
        for number, ranks in enumerate(topology.ranks_by_node):
            of_node = values_of(ranks[0], size)
            for rank in ranks[1:]:
                of_node += values_of(rank, size)
            in_turn = of_node if number == 0 else in_turn + of_node
        assert torch.equal(torch.cat(parts), in_turn)


@pytest.mark.parametrize("wire", WITHIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_sums_in_the_order_of_the_ranks(num_ranks: int, dtype: torch.dtype, wire: str) -> None:
    def rank_main(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        sums = RankOrderSum(world.duplicate(), codec=codec_named(wire))
        mine = values_of(world.rank, num_ranks, dtype)
        out = torch.full((WIDTH,), torch.nan, dtype=dtype)
        sums.reduce_scatter(mine, counts=[WIDTH] * num_ranks, out=out)
        assert torch.equal(mine, values_of(world.rank, num_ranks, dtype))
        whole = mine[:-3].clone()  # slices of unequal lengths
        sums.all_reduce(whole)
        return out, whole

    found = run_threads(num_ranks, rank_main)
    expected = in_order(num_ranks, dtype)
    scattered, whole = torch.cat([part for part, _ in found]), found[0][1]
    assert all(torch.equal(other, whole) for _, other in found)
    if wire == "fp32":
        assert torch.equal(scattered, expected)
        assert torch.equal(whole, expected[:-3])
    within = WITHIN[wire] * num_ranks * 4
    torch.testing.assert_close(scattered, expected, rtol=0, atol=within + 1e-12)
    torch.testing.assert_close(whole, expected[:-3], rtol=0, atol=2 * within + 1e-12)


def test_what_overflows_on_the_wire_is_not_finite_in_the_sum() -> None:
    def rank_main(world: World) -> list[bool]:
        finite = []
        for wire in ("fp16", "int8"):
            sums = RankOrderSum(world.duplicate(), codec=codec_named(wire))
            out = torch.empty(2)
            large = 1e6 if wire == "fp16" else torch.inf
            sums.reduce_scatter(torch.tensor([1.0, large, 1.0, large]), counts=[2, 2], out=out)
            finite.append(bool(torch.isfinite(out).all()))
        return finite

    assert run_threads(2, rank_main) == [[False, False]] * 2


@pytest.mark.parametrize(("wire", "of_fp32"), [("fp32", 1.0), ("fp16", 0.5), ("bf16", 0.5), ("int8", 0.25)])
def test_two_levels_send_each_value_once_from_a_node(wire: str, of_fp32: float) -> None:
    topology, width = Topology.from_node_names(list("aabb")), 4096

    def rank_main(world: World) -> tuple[int, int]:
        traffic = Traffic(topology)
        levels = traffic.counted_levels(make_two_level(world, topology))
        sums = TwoLevelSum(levels, topology=topology, codec=codec_named(wire))
        sums.reduce_scatter(values_of(world.rank, 4, width=width), out=torch.empty(width))
        in_two_levels = traffic.num_bytes()
        flat = RankOrderSum(traffic.counted(world.duplicate()), codec=codec_named(wire))
        flat.reduce_scatter(values_of(world.rank, 4, width=width), counts=[width] * 4, out=torch.empty(width))
        return in_two_levels, traffic.num_bytes() - in_two_levels

    scales = 4 / 256 if wire == "int8" else 0.0
    for in_two_levels, flat in run_threads(4, rank_main):
        assert in_two_levels == 4 * width * (of_fp32 + scales / 4)
        assert flat == 2 * in_two_levels


def test_traffic_counts_what_leaves_the_node() -> None:
    topology = Topology.from_node_names(list("aab"))

    def rank_main(world: World) -> list[int]:
        traffic, found = Traffic(topology), []
        comm = traffic.counted(world.duplicate())
        buffer = torch.ones(6)
        for operation in (
            lambda: comm.all_reduce(buffer),
            lambda: comm.reduce_scatter(buffer, counts=[1, 2, 3]),
            lambda: comm.all_gather(buffer[: world.rank + 1], counts=[1, 2, 3]),
            lambda: comm.all_to_all(buffer, send_counts=[2] * 3, receive_counts=[2] * 3),
            lambda: comm.broadcast(buffer, root=1),
        ):
            before = traffic.num_bytes()
            operation()
            found.append(traffic.num_bytes() - before)
        return found

    # Rank 0's successor is on its node; rank 1 sends to rank 2, and rank 2 to rank 0, on another node.
    assert run_threads(3, rank_main) == [[0, 0, 0, 8, 0], [32, 16, 12, 8, 24], [32, 12, 20, 16, 24]]
