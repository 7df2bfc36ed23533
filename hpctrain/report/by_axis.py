"""Times of the ranks of a split model by their place in it: stages of a pipeline, ranks of tensor groups. Pure."""

from __future__ import annotations

from hpctrain.report.run_data import RunData
from hpctrain.report.table import Row, Table

# Names of a rank's places in environment.json, and what one is called.
_AXES = {"pipeline": "stage", "tensor": "tensor rank"}
_PARTS = ("compute", "bubble", "exposed_sync", "input")


def places(run: RunData, axis: str) -> dict[int, list[int]]:
    """Returns the ranks at each place of an axis, `pipeline` or `tensor`; {} if there is one place."""
    found: dict[int, list[int]] = {}
    for rank, entry in enumerate(run.environment["ranks"]):
        if axis in entry:
            found.setdefault(int(entry[axis]), []).append(rank)
    return dict(sorted(found.items())) if len(found) > 1 else {}


def stage_seconds(run: RunData) -> list[float]:
    """Returns the seconds for which a rank of each stage computes in a step: the mean over its ranks and the steps.

    Empty for a run that is no pipeline, or without times of all ranks.
    """
    if run.times is None:
        return []
    return [float(run.times.seconds["compute"][ranks].mean()) for ranks in places(run, "pipeline").values()]


def by_axis(run: RunData) -> Table | None:
    """Returns the times of each stage and of each place in a tensor group; None for a run without these."""
    if run.times is None:
        return None
    rows = [
        Row(
            name=f"{called} {place}",
            values=[len(ranks), *(1e3 * float(run.times.seconds[part][ranks].mean()) for part in _PARTS)],
            format=",.1f",
        )
        for axis, called in _AXES.items()
        for place, ranks in places(run, axis).items()
    ]
    if not rows:
        return None
    return Table(
        name=f"axes-{run.label}", title=f"Places in the model of {run.label}", rows=rows, head="place",
        columns=["ranks", *(f"{part.replace('_', ' ')}, ms" for part in _PARTS)],
        note="In a step, the mean over ranks and steps. Bubble: the stages of a rank wait for others.",
    )  # fmt: skip
