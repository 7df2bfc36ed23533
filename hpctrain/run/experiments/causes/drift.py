"""Finds where the ranks of one trial begin to differ in what all should hold alike. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.run.experiments.causes.observations import Drift


def find_drift(by_rank: Sequence[Mapping[str, Any]]) -> Drift | None:
    """Returns the first difference between the ranks, or None.

    by_rank: of each rank `initial`, hashes of the parameters by name, and `steps`: each with hashes `before` (when the
    optimizer was called), `gradients`, `after`, and `options`, the optimizer's groups. Steps that not all ranks have
    finished are left out.
    """
    found = _apart([rank["initial"] for rank in by_rank])
    if found is not None:
        return Drift(step=0, phase="built", name=found[0], ranks=found[1])
    for number in range(min(len(rank["steps"]) for rank in by_rank)):
        steps = [rank["steps"][number] for rank in by_rank]
        for phase, key in (
            ("forward", "before"),
            ("option", "options"),
            ("gradient", "gradients"),
            ("optimizer", "after"),
        ):
            values = [step[key] for step in steps]
            if any(value is None for value in values):
                continue
            if key == "options":
                option = _option_apart(values)
                if option is not None:
                    return Drift(
                        step=number + 1, phase=phase, name=option[0], ranks=option[1], values=option[2]
                    )
                continue
            found = _apart(values)
            if found is not None:
                where = phase if all(step["before"] is not None for step in steps) else "forward"
                return Drift(step=number + 1, phase=where, name=found[0], ranks=found[1])
    return None


def schedulers_apart(by_rank: Sequence[Mapping[str, str]], *, step: int) -> Drift | None:
    """Returns the first value of a learning rate scheduler that is not the same on all ranks.

    by_rank: path -> text, after `step` steps.
    """
    for path, of_rank_0 in by_rank[0].items():
        ranks = [rank for rank, values in enumerate(by_rank) if values.get(path, of_rank_0) != of_rank_0]
        if ranks:
            values = (of_rank_0, by_rank[ranks[0]][path])
            return Drift(step=step, phase="scheduler", name=path, ranks=ranks, values=values)
    return None


def _apart(values: Sequence[Mapping[str, int]]) -> tuple[str, list[int]] | None:
    for name, of_rank_0 in values[0].items():
        ranks = [rank for rank, value in enumerate(values) if value.get(name, of_rank_0) != of_rank_0]
        if ranks:
            return name, ranks
    return None


def _option_apart(
    values: Sequence[Sequence[Mapping[str, Any]]],
) -> tuple[str, list[int], tuple[str, str]] | None:
    for number, group in enumerate(values[0]):
        for name, of_rank_0 in group.items():
            found = [value[number].get(name) if number < len(value) else None for value in values]
            ranks = [rank for rank, value in enumerate(found) if value != of_rank_0]
            if ranks:
                return name, ranks, (str(of_rank_0), str(found[ranks[0]]))
    return None
