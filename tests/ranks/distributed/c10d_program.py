"""Runs PyTorch's own tests of torch.distributed (distributed_test) on the ranks that mpirun started.

    hpctrain launch -n 4 -- python -m tests.ranks.distributed.c10d_program GROUP DIRECTORY

GROUP: hpctrain; gloo runs them over PyTorch's own group, for comparison. DIRECTORY: `order.json` there is a list of
tests to run, in this order, by default all; `done.json` a list of tests to leave out. Each rank writes into
DIRECTORY/rank-K.jsonl when a test has started and how it ended. A test that fails on one rank ends all ranks, since the
others may wait for it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
import unittest
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

import hpctrain
from hpctrain.comm import broadcast_json

# Of one operation of a test. PyTorch's own limit for most of them is 60 s.
LIMIT_S = 60.0
OF_THE_NAME = ("test_Backend_enum_class", "test_barrier_timeout_global", "test_get_backend")


def outcome_of(case: unittest.TestCase, name: str, *, skips: frozenset[object]) -> tuple[str, str]:
    try:
        getattr(case, name)()
    except unittest.SkipTest as reason:
        return "skipped", str(reason)
    except SystemExit as end:
        if end.code in skips:
            return "skipped", f"exit code {end.code}"
        return "failed", traceback.format_exc()
    except BaseException:
        return "failed", traceback.format_exc()
    return "passed", ""


def record(lines: TextIO, name: str, outcome: str) -> None:
    lines.write(json.dumps({"test": name, "outcome": outcome}) + "\n")
    lines.flush()


def read_names(path: Path) -> list[str]:
    return json.loads(path.read_text()) if path.exists() else []


def main(group: str, directory: Path) -> None:
    session = hpctrain.init(device="cpu", timeout_s=LIMIT_S)
    rank, size = session.rank, session.world_size
    # Read when PyTorch's module is imported: which tests there are to run follows from them.
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size), TEMP_DIR=str(directory), INIT_METHOD="file://")
    from torch.testing._internal import common_distributed, common_utils
    from torch.testing._internal.distributed import distributed_test

    skips = frozenset(skip.exit_code for skip in common_distributed.TEST_SKIPS.values())

    class Case(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        pass

    done = read_names(directory / "done.json")
    names = read_names(directory / "order.json") or sorted(n for n in dir(Case) if n.startswith("test_"))
    lines = (directory / f"rank-{rank}.jsonl").open("a")
    for name in (name for name in names if name not in done):
        if getattr(getattr(Case, name), "__unittest_skip__", False):
            record(lines, name, "skipped")
            continue
        scratch = Path(tempfile.mkdtemp(dir=directory)) if rank == 0 else None
        scratch = Path(broadcast_json(session.world, str(scratch)))
        if rank == 0:
            for folder in ("barrier", "test_dir", "init_dir"):
                (scratch / folder).mkdir()
        session.world.barrier()
        os.environ["TEMP_DIR"] = str(scratch)
        # Most tests decide from this name what they run; these compare it with the group's, or make a group of it.
        distributed_test.BACKEND = group if name in OF_THE_NAME else "gloo"
        distributed_test.INIT_METHOD = f"file://{scratch}/init_dir/again"
        distributed_test.Barrier.barrier_id = 0
        dist.set_debug_level(dist.DebugLevel.OFF)
        if group == "hpctrain":
            hpctrain.init_process_group(session)
        else:
            store = dist.FileStore(str(scratch / "init_dir" / "store"), size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        record(lines, name, "started")
        case = Case(name)
        case.rank = rank
        common_utils.set_rng_seed(common_utils.SEED)
        outcome, message = outcome_of(case, name, skips=skips)
        record(lines, name, outcome)
        if outcome == "failed":
            print(f"rank {rank}: {name} failed\n{message}", file=sys.stderr, flush=True)
            session.world.abort(1)
        session.world.barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
    session.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
