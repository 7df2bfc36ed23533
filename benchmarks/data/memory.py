"""Memory that reading an epoch adds to a process: `python -m benchmarks.data.memory`."""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from hpctrain.data import Dataset, Loader

# Batches after which the consumer pauses, so that the prefetch fills all the memory it is allowed.
PAUSES = (1, 40, 80)
PAUSE_S = 0.5


def read_epoch(
    *, directory: str, batch: int, prefetch_bytes: int, open_options: dict[str, Any]
) -> dict[str, int]:
    """Reads an epoch. Returns in bytes: `idle`, the memory before the dataset is opened; `peak`, the maximum since
    then; `idle_anonymous` and `peak_anonymous`, the same without file pages, sampled after each batch.

    `peak` is the kernel's VmHWM, reset at the beginning. It includes mapped pages of the page cache.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    idle, idle_anonymous = _status("VmHWM"), _status("RssAnon") + _status("RssShmem")
    loader = Loader(
        Dataset.open(directory, **open_options), global_batch=batch, prefetch_bytes=prefetch_bytes
    )
    anonymous = num_samples = 0
    for number, one in enumerate(loader.epoch(0)):
        if number in PAUSES:
            time.sleep(PAUSE_S)
        num_samples += one.num_samples
        anonymous = max(anonymous, _status("RssAnon") + _status("RssShmem"))
    return {
        "idle": idle, "peak": _status("VmHWM"), "idle_anonymous": idle_anonymous, "peak_anonymous": anonymous,
        "samples": num_samples,
    }  # fmt: skip


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    print(json.dumps(read_epoch(**json.loads(sys.argv[1]))))
