"""Our codecs, reducers, updater and engines meet the contracts that others can inherit."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm import World
from hpctrain.reduce import (
    AllReduceUpdater,
    BucketReducer,
    DistributedOptimizer,
    ReducerMaker,
    ZeroUpdater,
    codec_named,
    parse_algorithm,
)
from hpctrain.testing import (
    BucketReducerContract,
    CodecContract,
    DistributedOptimizerContract,
    EngineContract,
)
from hpctrain.topology import Topology


class TestFp32(CodecContract):
    codec = codec_named("fp32")


class TestFp16(CodecContract):
    codec = codec_named("fp16")

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        size = values.double().abs()
        return torch.maximum(size * 2.0**-11, torch.tensor(2.0**-25)) + size * 2.0**-24


class TestBf16(CodecContract):
    codec = codec_named("bf16")

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        size = values.double().abs()
        return torch.maximum(size * 2.0**-8, torch.tensor(2.0**-134).double()) + size * 2.0**-24


class TestInt8(CodecContract):
    codec = codec_named("int8")

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        size = values.double().abs()
        blocks = [block.amax(dim=0).expand(len(block)) for block in size.split(256) if len(block)]
        return torch.maximum(torch.cat([*blocks, size[:0]]) / 253, torch.tensor(2.0**-126).double())


class _Named(BucketReducerContract):
    algorithm, wire, nodes = "flat", "fp32", "aaaa"

    def make(self, world: World) -> BucketReducer:
        topology = Topology.from_node_names(list(self.nodes[: world.num_ranks]))
        maker = ReducerMaker(world, topology=topology)
        return maker.make(parse_algorithm(self.algorithm), wire=self.wire)


class TestFlat(_Named): ...


class TestFlatFp16(_Named):
    wire, tolerance = "fp16", 2.0**-9


class TestOnOneNode(_Named):
    algorithm = "hierarchical"


class TestBetweenNodes(_Named):
    algorithm, nodes = "hierarchical", "aabb"


class TestRingFp16(_Named):
    algorithm, nodes, wire, tolerance = "ring", "abcd", "fp16", 2.0**-8


class TestUnequalNodes(_Named):
    algorithm, nodes = "hierarchical-ring", "aaab"


class TestAllReduceUpdater(DistributedOptimizerContract):
    def make(
        self, world: World, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> DistributedOptimizer:
        maker = ReducerMaker(world, topology=Topology.from_node_names(["a"] * world.num_ranks))
        reducer = maker.make(parse_algorithm("hierarchical"), wire="fp32")
        return AllReduceUpdater(optimizer, comm=world.duplicate(), reducer=reducer, bucket_bytes=100)


class TestShardedOptimizer(DistributedOptimizerContract):
    nodes, keeps_gradients = "aabb", True

    def make(
        self, world: World, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> DistributedOptimizer:
        maker = ReducerMaker(world, topology=Topology.from_node_names(list(self.nodes[: world.num_ranks])))
        if world.num_ranks == 1:  # there is nothing to shard
            whole = maker.make(parse_algorithm("flat"), wire="fp32")
            return AllReduceUpdater(optimizer, comm=world.duplicate(), reducer=whole, bucket_bytes=100)
        return ZeroUpdater(
            optimizer, comm=world.duplicate(), reducer=maker.make_zero("auto", wire="fp32"), bucket_bytes=100,
            keeps_gradients=self.keeps_gradients, align_elems=1,
        )  # fmt: skip


class TestShardedGradients(TestShardedOptimizer):
    nodes, keeps_gradients = "abca", False


class TestDirectEngine(EngineContract):
    engine = "direct"


def test_a_contract_finds_a_codec_that_rounds_where_it_says_it_does_not() -> None:
    class Wrong(CodecContract):
        codec = codec_named("fp16")

        def error_bound(self, values: torch.Tensor) -> torch.Tensor:
            return torch.zeros(values.shape, dtype=torch.float64)

    with pytest.raises(AssertionError):
        Wrong().test_errors_stay_within_the_bound(torch.float32, 1000)
