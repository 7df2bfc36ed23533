"""The matrix of split models: one model in many layouts on several numbers of ranks, and what is compared for all.

A test module names its `FAMILY`; `LayoutTests` has the comparisons, and `conftest.py` launches the ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.checkpoint import finished_newest_first, open_checkpoint
from hpctrain.comm import SerialWorld, World
from hpctrain.data import pack_arrays
from hpctrain.resilience import StopRequest
from hpctrain.run import parse_recipe
from hpctrain.run.training import Resume, carry_out
from hpctrain.telemetry import read_records
from hpctrain.train.task.task import Task
from tests.fsdp2 import fsdp2_refusal, needs_fsdp2
from tests.ranks_launcher import run_ranks
from tests.sessions import session_over

STEPS, LATER = 20, 23
NODES = {1: ["a"], 2: ["a", "b"], 3: ["a", "a", "b"], 4: ["a", "a", "b", "b"]}
RELATIVE = 1e-10

Layout = Mapping[str, Any]  # the section [parallel] of a recipe
Found = dict[str, Any]  # what one rank has found, by run


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What one start of ranks does, in this order."""

    ranks: int
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further arguments of `train`, for some of the layouts."""
    continued: Mapping[str, Layout] = field(default_factory=dict)
    """Runs that launches before this one have saved, such as `2-world`, and the layout in which they go on."""
    overflowing: Mapping[str, Layout] = field(default_factory=dict)
    """float16 runs in which a step overflows; all are compared to the first one of the family."""
    more: Callable[[World, Path], Found] = lambda world, where: {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Trainings of one model. It is the `FAMILY` of the module `cases`, from which ranks import it."""

    cases: str
    launches: Sequence[Launch]
    train: Callable[..., Found] | None = None
    """Called as `train(world, directory, name, layout, steps=..., ...)`."""
    overflows: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `train` for a float16 run in which a step overflows."""
    reference: str = ""
    """The run with whose model and optimizer all that have done as many steps must end; it is not continued."""

    def layouts(self) -> list[tuple[int, str]]:
        return [(launch.ranks, name) for launch in self.launches for name in launch.layouts]

    def continued(self) -> list[tuple[int, str]]:
        return [(launch.ranks, run) for launch in self.launches for run in launch.continued]

    def overflowing(self) -> list[tuple[int, str]]:
        return [(launch.ranks, name) for launch in self.launches for name in launch.overflowing]

    def start(self, directory: Path) -> dict[int, list[Found]]:
        """Launches all. Returns by number of ranks what each rank found."""
        found: dict[int, list[Found]] = {}
        for number, launch in enumerate(self.launches):
            outputs = run_ranks(
                launch.ranks, run_launch, self.cases, number, str(directory), timeout_s=900
            ).outputs
            before = found.setdefault(launch.ranks, [{} for _ in outputs])
            for of_rank, output in zip(before, outputs, strict=True):
                of_rank.update(output)
        return found


def run_launch(world: World, cases: str, number: int, directory: str) -> Found:
    """What each rank of one launch does. Trainings that need a newer FSDP2 are left out."""
    family: Family = importlib.import_module(cases).FAMILY
    launch, where, refused = family.launches[number], Path(directory), bool(fsdp2_refusal())
    found: Found = {}

    def train_in(key: str, name: str, layout: Layout, **more: Any) -> None:
        assert family.train is not None
        if not (refused and "parameters" in (layout.get("shard"), saved_layouts.get(name, {}).get("shard"))):
            found[key] = family.train(world, where, name, layout, **more)

    saved_layouts = {
        f"{one.ranks}-{name}": layout for one in family.launches for name, layout in one.layouts.items()
    }
    for name, layout in launch.layouts.items():
        train_in(name, f"{launch.ranks}-{name}", layout, **launch.options.get(name, {}))
    if launch.ranks == 1 and launch.layouts and family.continued():
        train_in("later", "1-later", {}, steps=LATER)
    for run, layout in launch.continued.items():
        train_in(f"{run} continued", run, layout, steps=LATER)
    for name, layout in launch.overflowing.items():
        options = {"precision": "fp16", "guards": {"loss_jump_z": 0.0}, **family.overflows}
        train_in(f"overflow {name}", f"{launch.ranks}-overflow-{name}", layout, **options)
    return found | launch.more(world, where)


class LayoutTests:
    """Any layout of the module's FAMILY trains as one rank does."""

    def test_a_split_model_trains_as_on_one_rank(
        self, launches: dict[int, list[Found]], directory: Path, family: Family, trained: tuple[int, str]
    ) -> None:
        (ranks, layout), whole = trained, launches[1][0]["none"]
        if layout not in launches[ranks][0]:
            needs_fsdp2()
        for found in launches[ranks]:
            assert found[layout]["status"] == "finished"
            assert len(found[layout]["steps"]) == STEPS
            np.testing.assert_allclose(numbers(found[layout]), numbers(whole), rtol=RELATIVE)
            for kind in ("evaluation", "evaluation of the average"):
                assert found[layout][kind] == pytest.approx(whole[kind], rel=RELATIVE)
        name = f"{ranks}-{layout}"
        # Continued runs have saved later states since.
        if name not in [run for _, run in family.continued()]:
            expected, found_state = (saved_states(directory, run)[0] for run in (family.reference, name))
            assert found_state.keys() == expected.keys()
            assert any(tensor.endswith("exp_avg_sq") for tensor in expected)
            for tensor, values in expected.items():
                torch.testing.assert_close(found_state[tensor], values, rtol=1e-8, atol=1e-12, msg=tensor)


class ContinuedTests:
    """Any layout continues any other's checkpoint; the module's FAMILY says which."""

    def test_any_layout_continues_any_other(
        self, launches: dict[int, list[Found]], family: Family, continued: tuple[int, str]
    ) -> None:
        (ranks, run), whole = continued, launches[1][0]["later"]
        assert len(whole["steps"]) == LATER - STEPS
        if f"{run} continued" not in launches[ranks][0]:
            needs_fsdp2()
        for found in (of_rank[f"{run} continued"] for of_rank in launches[ranks]):
            np.testing.assert_allclose(found["steps"], whole["steps"], rtol=RELATIVE)
            assert found["steps"][0][0] == pytest.approx(whole["steps"][0][0], rel=1e-12)
            average = "evaluation of the average"
            assert found[average] == pytest.approx(whole[average], rel=RELATIVE)


class OverflowTests:
    """A float16 run in which a step overflows, in the layouts of the module's FAMILY."""

    def test_a_step_that_overflows_is_skipped_on_all_ranks(
        self, launches: dict[int, list[Found]], family: Family, overflowing: tuple[int, str]
    ) -> None:
        first = next(launch for launch in family.launches if launch.overflowing)
        name = next(iter(first.overflowing))
        expected = launches[first.ranks][0][f"overflow {name}"]["steps"]
        applied = [step[2] for step in expected]
        assert any(applied)
        assert not all(applied)
        ranks, name = overflowing
        for found in launches[ranks]:
            steps = found[f"overflow {name}"]["steps"]
            assert [step[2] for step in steps] == applied
            losses = [[step[0] for step in each if step[2]] for each in (expected, steps)]
            np.testing.assert_allclose(losses[1], losses[0], rtol=1e-2)


def numbers(found: Found) -> list[list[float]]:
    """Returns loss, norm and whether it was applied, of each step. The norm of a skipped one is NaN, as text."""
    return [[float(value) for value in step] for step in found["steps"]]


def train(
    world: World,
    directory: Path,
    name: str,
    layout: Layout,
    *,
    task: Task,
    steps: int = STEPS,
    nodes: Sequence[str] | None = None,
    precision: str = "fp64",
    **sections: dict[str, Any],
) -> Found:
    """61 samples in batches of 12: the last of an epoch has one, and most ranks have none of it."""
    document: dict[str, dict[str, Any]] = {
        "run": {"directory": str(directory / name), "steps": steps, "seed": 3, "precision": precision},
        "task": {"target": "tests:Layers"},
        "data": data_section(directory, layout),
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1, "clip_norm": 0.3, "ema": 0.6},
        "parallel": dict(layout),
        **sections,
    }
    session = session_over(world, nodes=nodes or NODES[world.num_ranks])
    summary = carry_out(parse_recipe(document), task, session=session, resume=Resume(), stop=StopRequest())
    records = list(read_records(directory / name / "metrics" / f"rank-{world.rank:05}.jsonl"))
    qualities = [record["quality"] for record in records if record["kind"] == "evaluation"]
    return {
        "steps": [
            [r["loss"], r["grad_norm"], r["applied"]]
            for r in records
            if r["kind"] == "step" and r["step"] > steps - (steps if steps == STEPS else LATER - STEPS)
        ],
        "evaluation": qualities[-1]["nats"],
        "evaluation of the average": qualities[-1].get("ema_nats"),
        "evaluations": [quality["nats"] for quality in qualities],
        "status": summary["status"],
    }


def data_section(
    directory: Path, layout: Layout, *, train: str = "data", held_out: str = "data"
) -> dict[str, Any]:
    """The section [data]. train, held_out: folders in `directory`."""
    return {
        "train": str(directory / train), "held_out": str(directory / held_out), "global_batch": 12,
        "micro_batches": 1 if "pipeline" in layout else 2, "evaluation_batch": 12,
    }  # fmt: skip


def pack_rows(where: Path, *, name: str = "data", samples: int = 61) -> None:
    """Makes the folder `name` in `where`: rows of three numbers, of two classes."""
    x = np.random.default_rng(0).normal(size=(61, 3))[:samples]
    pack_arrays(where / name, {"x": x, "label": (x.sum(1) > 0).astype(np.int64), "id": np.arange(samples)})


def pack_tokens(where: Path) -> None:
    """Makes the folder `data` in `where`: sequences of five characters of ten."""
    random = np.random.default_rng(0)
    pack_arrays(where / "data", {"tokens": random.integers(0, 10, (61, 5)), "id": np.arange(61)})


def saved_states(directory: Path, name: str) -> list[dict[str, torch.Tensor]]:
    """Model, optimizer moments and averages in each checkpoint of a run, whole, the newest first."""
    found = [
        open_checkpoint(path, comm=SerialWorld()).read_all()
        for path in finished_newest_first(directory / name / "checkpoints")
    ]
    return [{n: t for n, t in of.items() if n.startswith(("model/", "optimizer/", "ema/"))} for of in found]
