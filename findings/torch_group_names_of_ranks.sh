#!/bin/bash
# PyTorch: after new_group(use_local_synchronization=True) ranks name their later groups differently.
#
# PyTorch names a group by a counter. Since 2.14 the counter also counts groups made with use_local_synchronization=True,
# which only the group's own ranks make: others return before it. So any later group has another name on them. Gloo's
# ranks find each other in the store under that name, and wait there, by default for half an hour. The backend "fake" is
# used here, which does not wait.
#
# Seen with torch 2.15.0 (2.13.0 gives one name):
#   later group on rank 0: 2, on rank 1: 1
# Exits with 1 if that is no longer so.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/case.py" <<'P'
import sys

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=int(sys.argv[1]), world_size=2)
dist.new_group([0], use_local_synchronization=True)
print(dist.new_group([0, 1]).group_name)
P
python3 -m pip install --quiet --target "$work/torch" "torch==2.15.0" "numpy==2.2.6"  # 3 GB, built for GPUs
export PYTHONPATH="$work/torch"
first=$(python3 "$work/case.py" 0)
second=$(python3 "$work/case.py" 1)
echo "later group on rank 0: $first, on rank 1: $second"
[ "$first" != "$second" ]
