"""Compares how many samples each rank computes in an epoch: a rank with more of them makes all others wait (F10)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import final

import torch

from hpctrain.comm import Collective
from hpctrain.data import Batch
from hpctrain.telemetry import RecordWriter


@final
class DataBalance:
    """Counts this rank's samples and their bytes, and compares the ranks at the end of an epoch.

    most_excess: a rank that has more than the mean by more than this fraction is reported, once.
    """

    def __init__(
        self, *, comm: Collective, most_excess: float, say: Callable[[str], None], records: RecordWriter
    ) -> None:
        self._comm = comm
        self._most_excess = most_excess
        self._say = say
        self._records = records
        self._num_samples = 0
        self._num_bytes = 0
        self._noted: set[str] = set()

    def add(self, batch: Batch) -> None:
        """Counts a batch that this rank has computed. Not collective."""
        self._num_samples += batch.num_samples
        self._num_bytes += batch.num_bytes

    def epoch_ended(self, epoch: int, *, step: int) -> None:
        """Compares the ranks after `step`, the last of `epoch`; counts anew. Collective: 16 bytes from each rank."""
        num_ranks = self._comm.num_ranks
        if num_ranks == 1:
            return
        mine = torch.tensor([self._num_samples, self._num_bytes], dtype=torch.int64)
        self._num_samples = self._num_bytes = 0
        gathered = self._comm.all_gather(mine, counts=[2] * num_ranks).view(num_ranks, 2)
        samples, num_bytes = gathered.T.tolist()
        self._records.write({
            "kind": "data_balance", "time": time.time(), "step": step, "epoch": epoch,
            "samples": _spread(samples), "bytes": _spread(num_bytes),
        })  # fmt: skip
        for what, counts in (("samples", samples), ("bytes of samples", num_bytes)):
            found = describe_excess(counts, what=what, most_excess=self._most_excess)
            if found is not None and what not in self._noted:
                self._noted |= {"samples", "bytes of samples"} if what == "samples" else {what}
                self._say(f"epoch {epoch}: {found}")


def describe_excess(counts: Sequence[int], *, what: str, most_excess: float) -> str | None:
    """Returns a text about the rank with the most if it has too many; None if the counts, by rank, are balanced."""
    mean, most = sum(counts) / len(counts), max(counts)
    if most <= mean * (1 + most_excess):
        return None
    rank, least = counts.index(most), min(counts)
    return (
        f"rank {rank} had {most:,} {what}, {most / mean - 1:.0%} more than the mean of {len(counts)} ranks "
        f"({mean:,.1f}; rank {counts.index(least)} had {least:,}): the others wait for it. Ranks have equal shares if "
        "their number divides data.global_batch and no samples are left out as damaged"
    )


def _spread(counts: Sequence[int]) -> dict[str, float]:
    """Returns least, mean and most, and the ranks that have the least and the most."""
    least, most = min(counts), max(counts)
    return {
        "least": least, "least_rank": counts.index(least), "mean": sum(counts) / len(counts),
        "most": most, "most_rank": counts.index(most),
    }  # fmt: skip
