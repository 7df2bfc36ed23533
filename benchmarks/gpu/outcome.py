"""Arguments and results of a check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what starts the checks and prints their outcomes does without it
    import torch


class CheckFailed(Exception):
    """The device's result differs from the CPU's; the message says how."""


class NotHere(Exception):
    """No part of the check can run on this machine; the message says what it needs."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Arguments of a check. device: the device to check. scratch: an empty folder for the check's files."""

    device: torch.device
    scratch: Path

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    def of(self, *, gpu: int, cpu: int) -> int:
        """Returns a size: large enough to take a GPU some time, small enough for the CPU."""
        return gpu if self.has_gpu else cpu


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of a check that passed: `text` says what was compared. figures: name with unit -> number. needs_gpu: parts
    that were skipped, because they need a GPU."""

    text: str
    figures: Mapping[str, float] = field(default_factory=dict)
    needs_gpu: tuple[str, ...] = ()


Check = Callable[[Setting], Found]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a check. status: `passed`, `failed` or `skipped`."""

    name: str
    status: str
    text: str
    figures: Mapping[str, float] = field(default_factory=dict)
    needs_gpu: tuple[str, ...] = ()
    seconds: float = 0.0

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Outcome:
        return cls(**{**document, "needs_gpu": tuple(document["needs_gpu"])})

    def as_json(self) -> dict[str, Any]:
        figures = {name: float(f"{value:.4g}") for name, value in self.figures.items()}
        return {**asdict(self), "figures": figures, "seconds": round(self.seconds, 2)}

    def line(self) -> str:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        skipped = f"; skipped for want of a GPU: {', '.join(self.needs_gpu)}" if self.needs_gpu else ""
        return f"{self.name:<15} {self.status:<7} {self.text}{skipped}{f' [{figures}]' if figures else ''}"
