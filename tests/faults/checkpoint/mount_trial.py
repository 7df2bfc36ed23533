"""Nodes that save on a filesystem that can fail, and what must hold after each fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.errors import ExitCode
from tests.faults.checkpoint.mounts import Nodes
from tests.faults.checkpoint.process_ranks import in_a_fork
from tests.faults.checkpoint.saves import (
    NUM_RANKS,
    WAYS,
    Reports,
    Way,
    left_over,
    newest_step,
    saver,
)

# "An error within seconds": none of the faults here is one that a rank has to wait for.
LIMIT_S = 60.0


class Trial:
    """Nodes, where they save, and what they have reported."""

    def __init__(self, nodes: Nodes, directory: Path) -> None:
        self.nodes = nodes
        self.reports = Reports(directory / "reported")
        self.place = nodes.shared / "checkpoints"  # as the ranks see it
        self.stored = nodes.storage / "checkpoints"  # as it is, whatever has happened to the mounts

    def newest(self) -> int:
        return int(in_a_fork(lambda: newest_step(self.stored)))

    def check(self, *, before: int) -> int:
        """After anything: the newest checkpoint is whole, and none that was reported is lost. What it is."""
        reported, found = max(before, self.reports.newest()), self.newest()
        assert reported <= found <= reported + 1, (reported, found)
        return found

    def save(self, step: int, *, way: Way) -> None:
        assert self.try_to_save(step, way=way) == 0

    def try_to_save(self, step: int, *, way: Way, timeout_s: float = 300) -> int:
        """The exit code of all ranks: 0, or CHECKPOINT."""
        ranks = self.nodes.start_ranks(
            saver(directory=self.place, steps=range(step, step + 1), way=way, reports=self.reports),
            num_ranks=NUM_RANKS,
        )
        ended = ranks.wait(timeout_s=timeout_s)
        code = ended[0].code
        assert code in (0, ExitCode.CHECKPOINT), ended
        assert [each.code for each in ended] == [code] * NUM_RANKS, ended
        return code

    def cleaned(self) -> dict[str, Any]:
        """One more save, after which nothing but finished checkpoints is there."""
        self.nodes.mend()
        step = self.newest() + 1
        self.save(step, way=WAYS[0])
        assert self.newest() == step
        return {"left": left_over(self.stored), "kept": len(list(self.stored.iterdir()))}
