#!/bin/bash
# PyTorch: a DTensor on a part of one DeviceMesh may come out of an operation with the same part of another mesh.
#
# Two sub-meshes with the same ranks and axis names compare equal and have one hash, whatever meshes they are parts of.
# Results of DTensor operations are kept by their arguments' meshes, so that an operation on a DTensor of the second mesh
# returns one of the first mesh, once that operation has been done there. Code that asks a tensor's mesh for its root
# (which other axes are there, and where on them is this rank?) then gets the answer of another model of the process.
#
# Seen with torch 2.13.0:
#   equal: True, one hash: True; root of the argument: ('stage', 'model'), of its clone: ('data', 'model')
# Exits with 1 if that is no longer so.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/case.py" <<'P'
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
first = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))["model"]
second = init_device_mesh("cpu", (1, 1), mesh_dim_names=("stage", "model"))["model"]
DTensor.from_local(torch.ones(2), first, [Shard(0)]).clone()
tensor = DTensor.from_local(torch.ones(2), second, [Shard(0)])
before, after = (t.device_mesh._get_root_mesh().mesh_dim_names for t in (tensor, tensor.clone()))
equal, one_hash = first == second, hash(first) == hash(second)
print(f"equal: {equal}, one hash: {one_hash}; root of the argument: {before}, of its clone: {after}")
dist.destroy_process_group()
sys.exit(not (equal and one_hash and before == ("stage", "model") and after == ("data", "model")))
P
python3 -m pip install --quiet --target "$work/torch" "torch==2.13.0" "numpy==2.2.6"
PYTHONPATH="$work/torch" python3 "$work/case.py"
