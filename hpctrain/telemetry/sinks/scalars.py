"""The numbers of a run by step, for programs that draw them: what is called how. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_STEPS = ("loss", "lr", "grad_norm", "loss_scale")


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record by name, such as `loss` and `seconds/compute`; {} if it has none.

    record: as in docs/metrics.md, of a file or before it is written. A number that is not finite is a float here.
    """
    kind = record["kind"]
    if kind == "step":
        found = {name: record[name] for name in _OF_STEPS} | _below("seconds", record["seconds"])
    elif kind == "evaluation":
        found = _below("evaluation", record["quality"])
    elif kind == "checkpoint":
        names = ("stall_seconds", "write_seconds", "mb_per_s", "bytes")
        found = {f"checkpoint/{name}": record[name] for name in names}
    elif kind == "efficiency":
        found = _below("efficiency", record["factors"]) | _below("parts", record["parts"])
    else:
        return {}
    return {name: float(value) for name, value in found.items()}


def _below(folder: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{folder}/{name}": value for name, value in values.items()}
