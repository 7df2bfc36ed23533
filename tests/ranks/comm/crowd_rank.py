"""What each rank does in `test_crowd.py`, as a user's own script: `crowd_rank.py BACKEND DIRECTORY`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import hpctrain
from hpctrain.comm import make_two_level
from hpctrain.launch.rank_identity.launcher_process import YIELD_STEM


def main(backend: str, directory: Path) -> None:
    with hpctrain.init(backend=backend, timeout_s=300) as session:
        two_levels = make_two_level(session.world, session.topology)
        sums = set()
        for _ in range(10):
            for group in (session.world, two_levels):
                buffer = torch.full((20_000,), float(session.rank + 1))
                group.all_reduce(buffer)
                sums.add(float(buffer[-1]))
        found = {
            "sums": sorted(sums),
            "mapped": YIELD_STEM in Path("/proc/self/maps").read_text(),
            "threads": torch.get_num_threads(),
            "notes": session.notes,
        }
        (directory / f"rank-{session.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
