"""A rank's side of taking turns: it makes steps when the benchmark says so, and sleeps in between.

The ranks of all methods live at the same time, each in a folder that all nodes see. Ranks that wait use no processor:
they look for a file every 20 ms.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_S = 0.02
END = "end"


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """What a step says of this rank. loss: of its samples, before the step. exposed_s: seconds in which it only waited
    for communication; None where that is not known."""

    loss: float
    exposed_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Turns:
    """directory: of this method. warmup: steps after the start. steps: that are timed in a turn, after one that is not.
    idle_s: a rank that waits longer ends, since the benchmark is gone."""

    directory: Path
    warmup: int
    steps: int
    idle_s: float

    def take(
        self,
        step: Callable[[int], Stepped],
        *,
        finish: Callable[[], object] = lambda: None,
        rank: int,
        facts: dict[str, Any],
    ) -> None:
        """Makes the steps of each turn until the benchmark ends the method. Collective over the method's ranks.

        step: makes the step of a number. finish: waits for what a step has left to the next one; of a turn the first
        such rest is timed, with the second step, and not the last. facts: how this rank was started, for the record.
        """
        number = 0
        loss = 0.0
        for _ in range(self.warmup):
            loss = step(number).loss
            number += 1
        self._write(f"ready-{rank}.json", {"loss": loss, "facts": facts})
        turn = 0
        while self._wait_for(turn):
            step(number)
            began = time.perf_counter()
            made = [step(number + more) for more in range(1, 1 + self.steps)]
            seconds = (time.perf_counter() - began) / self.steps
            finish()  # the next turn is another method's
            exposed = [one.exposed_s for one in made if one.exposed_s is not None]
            number += 1 + self.steps
            found = {"step_s": seconds, "exposed_s": sum(exposed) / len(exposed) if exposed else None}
            self._write(f"done-{turn}-{rank}.json", found)
            turn += 1

    def _wait_for(self, turn: int) -> bool:
        """Returns True when turn number `turn` begins, False at the end."""
        until_s = time.monotonic() + self.idle_s
        while time.monotonic() < until_s:
            if (self.directory / f"turn-{turn}").exists():
                return True
            if (self.directory / END).exists():
                return False
            time.sleep(POLL_S)
        return False

    def _write(self, name: str, content: Any) -> None:
        part = self.directory / f"{name}.part"
        part.write_text(json.dumps(content))
        os.replace(part, self.directory / name)
