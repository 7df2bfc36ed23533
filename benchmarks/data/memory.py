"""Peak memory of a process that reads an epoch, above the same process before: `python -m benchmarks.data.memory`."""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from hpctrain.data import Dataset, Loader

# Batches behind which the consumer is slow: what is made ahead then fills all the memory that it may have.
PAUSES = (1, 40, 80)
PAUSE_S = 0.5


def read_epoch(
    *, directory: str, batch: int, prefetch_bytes: int, open_options: dict[str, Any]
) -> dict[str, int]:
    """Bytes: `idle` before the dataset is opened, `peak` since then, `peak_anonymous` as seen after each batch.

    peak is the kernel's own mark (VmHWM), reset at the beginning; it counts pages of mapped files too, though
    they are page cache. peak_anonymous leaves those out.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
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
