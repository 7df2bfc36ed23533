"""The models that are trained, and their batches, which follow from a seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from hpctrain.distributed import TensorPlan
from hpctrain.tasks.characters import Characters
from hpctrain.tasks.digits import Digits

Fields = Mapping[str, torch.Tensor]
VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class Language:
    """The task `characters`, with `layers` blocks, on random text."""

    window: int
    width: int
    layers: int
    heads: int = 4

    @property
    def block_output(self) -> int:
        """Values that a block gives to the next one, of one sample."""
        return self.window * self.width

    @property
    def task(self) -> Characters:
        return Characters(
            window=self.window, width=self.width, layers=self.layers, heads=self.heads, vocabulary=VOCABULARY
        )

    def fields(self, *, samples: int, seed: int) -> Fields:
        generator = torch.Generator().manual_seed(seed)
        return {"tokens": torch.randint(VOCABULARY, (samples, self.window + 1), generator=generator)}

    @property
    def tensor_plan(self) -> TensorPlan:
        return self.task.tensor_plan()


@dataclass(frozen=True, kw_only=True)
class Images:
    """The convolution net of the task `digits`, on random images of 8 x 8.

    Its two linear layers can be split over tensor groups. It has no repeated blocks of which stages could be made.
    """

    width: int

    @property
    def task(self) -> Digits:
        return Digits(width=self.width)

    def fields(self, *, samples: int, seed: int) -> Fields:
        generator = torch.Generator().manual_seed(seed)
        return {
            "image": 16 * torch.rand((samples, 1, 8, 8), generator=generator),
            "label": torch.randint(10, (samples,), generator=generator),
        }

    @property
    def tensor_plan(self) -> TensorPlan:
        return {"7": "column", "9": "row"}


Workload = Language | Images

WORKLOADS: dict[str, Workload] = {
    "language": Language(
        window=32, width=64, layers=8, heads=8
    ),  # as many as the ranks of a group or pipeline
    "saved": Language(window=32, width=64, layers=4),
    "convolution": Images(width=8),
    "tiny": Language(window=16, width=64, layers=4),
    "3M": Language(window=16, width=256, layers=4),
    "50M": Language(window=16, width=512, layers=16),  # 50.7 million parameters
    "timed": Language(window=64, width=256, layers=4),  # 3.3 million
    "sent": Language(window=16, width=512, layers=4),  # 12.9 million
}


def of_ranks(
    workload: Workload, ranks: Iterable[int], *, number: int, num_ranks: int, samples: int
) -> Fields:
    """Returns the samples that are those of `ranks` in step `number`, if each of `num_ranks` ranks has `samples`."""
    first = number * num_ranks
    parts = [workload.fields(samples=samples, seed=first + rank) for rank in ranks]
    return {name: torch.cat([fields[name] for fields in parts]) for name in parts[0]}


def part(fields: Fields, *, rank: int, num_ranks: int) -> Fields:
    """Returns a rank's samples of a batch: every `num_ranks`-th one."""
    return {name: values[rank::num_ranks] for name, values in fields.items()}
