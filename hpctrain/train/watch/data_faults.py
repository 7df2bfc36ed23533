"""Which samples of a dropped step hold NaN or infinity: usually they are why it was dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import final

import torch

from hpctrain.comm import Collective, all_gather_json
from hpctrain.data import Batch

_MAX_SAID = 5
_MAX_SAMPLES = 4  # of a field and rank, by number


@final
class DataFaults:
    """say: prints a line for the user, on rank 0."""

    def __init__(self, *, comm: Collective, say: Callable[[str], None]) -> None:
        self._comm = comm
        self._say = say
        self._num_said = 0

    def after_dropped(self, step: int, batch: Batch) -> None:
        """Says what is not finite in the batch of a dropped step, the first few times. Collective."""
        found = self.describe(batch)
        if found and self._num_said < _MAX_SAID:
            self._num_said += 1
            self._say(f"step {step} is skipped on all ranks: its data are not finite: {found}")

    def describe(self, batch: Batch) -> str:
        """Returns the fields and samples of all ranks that are not finite, in words; empty if all are. Collective.

        batch: this rank's part of the global batch. Samples are named by their number in the dataset, if that is known.
        """
        everyones = all_gather_json(self._comm, list(_faults(batch.real())))
        by_text: dict[str, list[int]] = {}
        for rank, texts in enumerate(everyones):
            for text in texts:
                by_text.setdefault(text, []).append(rank)
        return "; ".join(f"{text} on rank {ranks[0]}" for text, ranks in by_text.items())


def _faults(batch: Batch) -> Iterator[str]:
    for name, tensor in batch.fields.items():
        if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
            continue
        bad = ~torch.isfinite(tensor).reshape(len(tensor), -1).all(dim=1)
        rows = bad.nonzero().flatten().tolist()
        if rows:
            which = (
                [int(batch.indices[row]) for row in rows[:_MAX_SAMPLES]] if batch.indices is not None else []
            )
            more = f" and {len(rows) - len(which)} more" if len(rows) > len(which) else ""
            samples = (
                f"sample{'s' if len(rows) > 1 else ''} {', '.join(map(str, which))}{more}"
                if which
                else f"{len(rows)} samples"
            )
            yield f"field {name!r}, {samples}"
