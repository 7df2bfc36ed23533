"""The losses of peers on the ranks that torchrun has started: `-m tests.ranks.bench.peer_losses RESULT METHOD...`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.parallel.timed_ranks import start_gloo, stepper
from benchmarks.parallel.training import Language

STEPS = 6
SAMPLES = 4


def main(result: str, *methods: str) -> None:
    torch.set_num_threads(1)
    rank, num_ranks = start_gloo()
    workload = Language(window=16, width=64, layers=4)
    found = {}
    for method in methods:
        step = stepper(method, workload, batch=SAMPLES)
        losses = torch.tensor([step(number).loss for number in range(STEPS)], dtype=torch.float64)
        dist.all_reduce(losses)
        found[method] = (losses / num_ranks).tolist()
    if rank == 0:
        Path(result).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
