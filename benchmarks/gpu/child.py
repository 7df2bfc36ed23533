"""Runs checks one after another: `python -m benchmarks.gpu.child DEVICE SCRATCH NAME ...`. Prints a line of JSON each.

It is a separate process, because after a CUDA error a process cannot use the GPU any more.
"""

from __future__ import annotations

import json
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.checks import CHECKS
from benchmarks.gpu.outcome import CheckFailed, NotHere, Outcome, Setting


def main(words: Sequence[str]) -> int:
    name, scratch, *names = words
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    _say({"about": about(device)})
    for name in names:
        directory = Path(scratch) / name
        directory.mkdir(parents=True, exist_ok=True)
        outcome = carry_out(name, Setting(device=device, scratch=directory))
        _say({"outcome": outcome.as_json()})
        if outcome.status == "failed" and device.type == "cuda":
            return 3  # later checks may fail because of this one's error
    return 0


def carry_out(name: str, setting: Setting) -> Outcome:
    begun_s = time.perf_counter()
    try:
        found = CHECKS[name](setting)
    except NotHere as error:
        return Outcome(name=name, status="skipped", text=str(error), seconds=time.perf_counter() - begun_s)
    except CheckFailed as error:
        return Outcome(name=name, status="failed", text=str(error), seconds=time.perf_counter() - begun_s)
    except Exception as error:  # an error in hpctrain, or of the machine
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return Outcome(name=name, status="failed", text=text, seconds=time.perf_counter() - begun_s)
    return Outcome(
        name=name, status="passed", text=found.text, figures=found.figures, needs_gpu=found.needs_gpu,
        seconds=time.perf_counter() - begun_s,
    )  # fmt: skip


def about(device: torch.device) -> dict[str, Any]:
    """Returns the properties of the machine on which results may depend."""
    found: dict[str, Any] = {
        "device": device.type,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "gpu_memory_gb": round(properties.total_memory / 1e9),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return found


def _say(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
