"""The task `characters`, which notes how much memory its process has while it is trained."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.memory import give_back_free, own_and_shared_bytes
from hpctrain.tasks.characters import Characters
from hpctrain.train import Fields

_EVERY_S = 0.02


class Watched(Characters):
    """Writes into the folder `report` a file for each process, each time that the loss is computed.

    In it are bytes of this process alone and of its part of what it shares with others: `before` the model was built,
    and the `most` since then until the newest step began, so that what the run does after its last step does not count.
    Of what is shared the part when that step began counts: before all have accessed a page, others have none of it, and
    the largest parts of all processes would be more than there is.
    """

    def __init__(self, *, report: str, **options: Any) -> None:
        super().__init__(**options)
        self._report = Path(report) / f"{os.getpid()}.json"
        self._before = (0, 0)
        self._most = 0  # of this process alone

    def build_model(self) -> nn.Module:
        give_back_free()
        self._before = own_and_shared_bytes()
        threading.Thread(target=self._watch, daemon=True).start()
        return super().build_model()

    def loss(self, model: nn.Module, fields: Fields) -> torch.Tensor:
        most = self._most, own_and_shared_bytes()[1]
        self._report.write_text(json.dumps({"before": self._before, "most": most}))
        return super().loss(model, fields)

    def _watch(self) -> None:
        ended = threading.Event()
        while not ended.wait(_EVERY_S):
            self._most = max(self._most, own_and_shared_bytes()[0])
