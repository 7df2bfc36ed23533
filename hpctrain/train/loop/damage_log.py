"""Reports the damaged blocks that this rank's loaders have found: in its records, and the first ones on stdout."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

from hpctrain.data import BlockChecker
from hpctrain.telemetry import RecordWriter, tell

_TOLD = 3


class DamageLog:
    """Writes one record for each damaged block. Does not communicate."""

    def __init__(self, records: RecordWriter, *, rank: int, checkers: Sequence[BlockChecker | None]) -> None:
        self._records = records
        self._rank = rank
        self._checkers = [checker for checker in checkers if checker is not None]
        self._written = [0] * len(self._checkers)

    def write(self, *, step: int) -> None:
        """Records the blocks found since the last call; prints the first _TOLD of the run. step: for the records."""
        for place, checker in enumerate(self._checkers):
            for damage in checker.damages[self._written[place] :]:
                self._written[place] += 1
                self._records.write(
                    {"kind": "damage", "time": time.time(), "step": step, "dataset": str(checker.directory)}
                    | asdict(damage)
                )
                number = sum(self._written)
                if number <= _TOLD:
                    more = "; further ones only in the records" if number == _TOLD else ""
                    tell(f"rank {self._rank}: damaged data in {checker.directory}: {damage.describe()}{more}")
