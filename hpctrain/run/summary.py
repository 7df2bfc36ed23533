"""Summary of a run: `summary.json`, and the last line that is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpctrain.comm import all_gather_json
from hpctrain.run.recipe.schema import Recipe
from hpctrain.run.session import Session
from hpctrain.telemetry import tell, write_json
from hpctrain.train import Totals

SUMMARY = "summary.json"


def summarize(
    totals: Totals,
    *,
    recipe: Recipe,
    session: Session,
    environment: dict[str, Any],
    wall_s: float,
    status: str,
) -> dict[str, Any]:
    """Merges the ranks' totals; rank 0 writes and prints the summary. Collective; the same value on all ranks.

    status: `finished`, `stopped` or `diverged`. Seconds are means over the ranks. `samples_per_s` is relative to the
    time of the steps, including input, communication and saving, without start-up and evaluation.
    """
    by_rank = all_gather_json(session.world, totals.seconds)
    names = sorted({name for seconds in by_rank for name in seconds})
    seconds = {name: sum(entry.get(name, 0.0) for entry in by_rank) / len(by_rank) for name in names}
    step_s = seconds.get("step", 0.0)
    summary = {
        "name": recipe.run.name,
        "status": status,
        "ranks": session.num_ranks,
        "topology": environment["topology"],
        "backend": environment["backend"],
        "algorithm": environment["algorithm"],
        "wire": environment["wire"],
        "step": totals.position.step,
        "samples_seen": totals.position.samples,
        "steps_here": totals.steps,
        "samples_here": totals.samples,
        "samples_per_s": totals.samples / step_s if step_s else 0.0,
        "wall_s": wall_s,
        "seconds": seconds,
        "exposed_sync_share": seconds.get("exposed_sync", 0.0) / step_s if step_s else 0.0,
        "loss": totals.last_loss,
        "quality": totals.quality,
        "skipped_steps": totals.skipped_steps,
        "skipped_samples": totals.skipped_samples,
        "checkpoints_written": totals.checkpoints,
        "resumed_from": totals.resumed_from,
    }
    if session.rank == 0:
        write_json(Path(recipe.run.directory) / SUMMARY, summary)
        skipped = f", {totals.skipped_samples:,} damaged samples left out" if totals.skipped_samples else ""
        quality = "".join(f", {name} {value:.4f}" for name, value in totals.quality.items())
        tell(
            f"{recipe.run.name}: {status} at step {totals.position.step}, {summary['samples_per_s']:,.0f} samples/s, "
            f"{summary['exposed_sync_share']:.0%} of the step time exposed to communication{quality}{skipped}; "
            f"records in {recipe.run.directory}"
        )
    return summary


def finished_summary(directory: Path, *, step: int) -> dict[str, Any] | None:
    """Returns the summary in `directory` if it is that of a run finished at `step`, else None. Call it on rank 0."""
    try:
        summary = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    done = isinstance(summary, dict) and summary.get("status") == "finished" and summary.get("step") == step
    return summary if done else None
