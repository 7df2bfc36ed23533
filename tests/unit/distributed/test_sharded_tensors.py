"""Which rank counts as the first that holds a part of a DTensor."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hpctrain.distributed.sharded_tensors import is_first_replica


def test_the_only_rank_of_a_programs_own_mesh_holds_the_first_replica() -> None:
    """On every PyTorch that is allowed: the mesh that another one was cut out of has another name in 2.8."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "parts"))
        for own, placements in ((mesh, [Replicate(), Shard(0)]), (mesh["parts"], [Shard(0)])):
            assert is_first_replica(distribute_tensor(torch.ones(2), own, placements))
    finally:
        dist.destroy_process_group()
