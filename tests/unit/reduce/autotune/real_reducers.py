"""Two real reductions as candidates, over three threads on two nodes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hpctrain.comm import World
from hpctrain.reduce.autotune.link_speed import Candidate
from hpctrain.reduce.collective_reducers.collective_reducer import CollectiveReducer
from hpctrain.reduce.contract.bucket_reducer import BucketReducer
from hpctrain.topology import Topology

CPU = torch.device("cpu")


NODES = Topology.from_node_names(["a", "a", "b"])
CANDIDATES = (Candidate("flat", "fp32"), Candidate("direct", "fp32"))


def make_real(world: World, topology: Topology, *, made: list[str]) -> Callable[[str, str], BucketReducer]:
    from hpctrain.reduce.codecs import codec_named

    def make(algorithm: str, wire: str) -> BucketReducer:
        made.append(algorithm)
        comm = world.duplicate()
        if algorithm == "flat":
            return CollectiveReducer.flat(comm, topology=topology, wire=wire)
        return CollectiveReducer.direct(comm, topology=topology, codec=codec_named(wire))

    return make
