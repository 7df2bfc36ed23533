"""What the ranks do for the figures of split models that no time decides, and for bubbles."""

from __future__ import annotations

from benchmarks.parallel import bubble, cases, checkpoints
from benchmarks.ranks import Case

THREADS = 1
CASES: dict[str, Case] = {
    "equality": cases.equality,
    "memory": cases.memory,
    "traffic": cases.traffic,
    "bubble": bubble.bubble,
    "save": checkpoints.save,
    "load": checkpoints.load,
    "dcp": checkpoints.dcp,
}
