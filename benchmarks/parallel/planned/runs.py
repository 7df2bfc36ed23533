"""Trains a small and a large model in each way, and holds the growth of the ranks' memory against the plan."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.parallel.workloads import VOCABULARY
from benchmarks.places import RanksFailed
from benchmarks.results_file import Record
from benchmarks.starting import LAUNCH, run_to_end, user_environment
from hpctrain.data import pack_arrays
from hpctrain.run import parse_recipe, plan_memory, to_toml

MOST_OFF_PLAN = 0.10
NUM_RANKS = 2
STEPS = 4
SAMPLES = 64
# By name of the way, as the plan has it: the section [parallel].
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "none, selective": {"activation_checkpointing": "selective"},
    "none, blocks": {"activation_checkpointing": "blocks"},
    "optimizer": {"shard": "optimizer"},
    "gradients": {"shard": "gradients"},
    "parameters": {"shard": "parameters"},
    "parameters, blocks": {"shard": "parameters", "activation_checkpointing": "blocks"},
    "none, tensor 2": {"tensor": 2},
    "pipeline 2 1f1b": {"pipeline": 2, "schedule": "1f1b", "micro_batches": 8},
    "pipeline 2 interleaved": {"pipeline": 2, "schedule": "interleaved", "micro_batches": 8},
}
# Options of the task. The small model's memory is what any training needs besides, and is taken off both sides.
MODELS: dict[str, dict[str, int]] = {
    "small": {"window": 64, "width": 64, "layers": 4},
    "large": {"window": 64, "width": 512, "layers": 16},
}
QUICK_MODELS: dict[str, dict[str, int]] = {**MODELS, "large": {"window": 64, "width": 256, "layers": 4}}


def plan_records(
    *,
    models: Mapping[str, Mapping[str, int]],
    ways: Mapping[str, Mapping[str, Any]] = WAYS,
    timeout_s: float,
    attempt: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> list[Record]:
    """Returns a record for each way: how far the planned growth from the small to the large model is off.

    attempt: makes the context in which a way of this name is measured, which may take its RanksFailed.
    """
    made = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = np.random.default_rng(0).integers(VOCABULARY, size=(SAMPLES, models["large"]["window"] + 1))
        pack_arrays(folder / "data", {"tokens": tokens.astype(np.uint8)})
        for way, parallel in ways.items():
            measured, planned = {}, {}
            with attempt(way):
                for model, options in models.items():
                    document = recipe_of(options, parallel, data=folder / "data")
                    found = plan_memory(
                        parse_recipe(document), recipe_path=folder / "recipe.toml", num_ranks=NUM_RANKS
                    )
                    chosen = next(entry for entry in found.ways if entry.is_current)
                    assert chosen.needs is not None, chosen.refused
                    planned[model] = chosen.needs(chosen.choices[0]).total
                    where = Path(tempfile.mkdtemp(dir=folder))
                    measured[model] = _trained(document, where, timeout_s=timeout_s)
                made.append(record_of(way, measured=measured, planned=planned))
    return made


def record_of(way: str, *, measured: Mapping[str, list[int]], planned: Mapping[str, int]) -> Record:
    """measured: by model, the growth of each rank's memory; planned: of the rank that needs most."""
    grown = max(measured["large"]) - max(measured["small"])
    expected = planned["large"] - planned["small"]
    return Record(
        id=f"parallel.2.plan.{way}",
        what=f"{way}, {NUM_RANKS} ranks: the most memory of a rank in a run off what `hpctrain plan` says, "
        f"{expected / 1e6:.0f} MB",
        value=abs(expected / grown - 1), bar=MOST_OFF_PLAN, sense="at most", unit="",
        samples={"measured": dict(measured), "planned": dict(planned)},
    )  # fmt: skip


def recipe_of(options: Mapping[str, int], parallel: Mapping[str, Any], *, data: Path) -> dict[str, Any]:
    """Returns the recipe of a run; its plan is for the task as it is."""
    document: dict[str, Any] = {
        "run": {"directory": "run", "steps": STEPS, "device": "cpu"},
        "task": {"target": "hpctrain.tasks.characters:Characters", "options": dict(options)},
        "data": {"train": str(data), "global_batch": 16, "prefetch_mb": 1},
        "optimizer": {"name": "adamw"},
        "parallel": dict(parallel),
    }
    if not parallel.keys() & {"shard", "tensor", "pipeline"}:
        document["reduction"] = {"algorithm": "hierarchical"}  # not `auto`, whose trials need memory too
    return document


def _trained(document: Mapping[str, Any], where: Path, *, timeout_s: float) -> list[int]:
    """Trains as the recipe says, in the folder `where`; returns the growth of each rank's memory, in bytes.

    Which rank accesses how much of the memory that ranks share depends on who sums first: its mean counts.
    """
    watched = {"target": "benchmarks.parallel.planned.task:Watched"}
    options = {**document["task"]["options"], "report": str(where / "report")}
    (where / "report").mkdir()
    recipe = parse_recipe(
        {
            **document,
            "run": {**document["run"], "directory": str(where / "run")},
            "task": {**watched, "options": options},
        }
    )
    (where / "recipe.toml").write_text(to_toml(recipe))
    argv = [*LAUNCH, "-n", str(NUM_RANKS), "--", *LAUNCH[:-1], "train", str(where / "recipe.toml")]
    try:
        done = run_to_end(argv, environ=user_environment(), timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        raise RanksFailed(f"still running after {timeout_s:g} s, killed: {document['parallel']}") from None
    if done.returncode:
        raise RanksFailed(f"{document['parallel']}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    found = [json.loads(file.read_text()) for file in sorted((where / "report").iterdir())]
    alone, shared = ([entry["most"][kind] - entry["before"][kind] for entry in found] for kind in (0, 1))
    return [own + sum(shared) // len(shared) for own in alone]
