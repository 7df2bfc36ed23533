"""Memory of this process, as Linux counts it. Imports nothing that needs memory itself."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path


def status_bytes(name: str) -> int:
    """Returns a size of /proc/self/status, such as VmHWM (the peak) or RssAnon (without pages of files)."""
    return _sizes("status")[name]


def reset_peak() -> None:
    """Resets the peak VmHWM to the present memory."""
    Path("/proc/self/clear_refs").write_text("5")


def give_back_free() -> None:
    """Makes glibc return its free memory to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def own_and_shared_bytes() -> tuple[int, int]:
    """Returns the memory without pages of files: this process's own, and its part of what it shares, which is divided
    among the processes that have accessed a page."""
    sizes = _sizes("smaps_rollup")
    return sizes["Pss_Anon"], sizes["Pss_Shmem"]


def allocated_bytes(run: Callable[[], object]) -> int:
    """Returns the most memory that Python and numpy have allocated at a time during a call of `run`, which is slower
    meanwhile."""
    import tracemalloc

    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _sizes(file: str) -> dict[str, int]:
    lines = (line.partition(":") for line in Path(f"/proc/self/{file}").read_text().splitlines())
    return {name: 1024 * int(value.split()[0]) for name, _, value in lines if value.endswith(" kB")}
