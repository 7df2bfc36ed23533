"""Runs under `hpctrain supervise` that fail as planned: their recipe, and what their ledgers say."""

from __future__ import annotations

from pathlib import Path

from hpctrain.supervise import Attempt, read_attempts

# The digits as `hpctrain data pack digits data/digits` packs them.
RECIPE = """
[run]
name = "supervised"
directory = "run"
steps = {steps}
{run}
[task]
target = "tests.faults.planned_failures:FailsAsPlanned"
options = {{ plan = "{plan}", step_s = {step_s} }}
[data]
train = "data/digits/train"
global_batch = 24
{data}
[optimizer]
lr = 1e-3
[guards]
out_of_memory = "stop"
[checkpoint]
every_steps = 5
{checkpoint}
"""


def write_recipe(
    folder: Path, *, plan: str, steps: int, step_s: float, run: str = "", data: str = "", checkpoint: str = ""
) -> None:
    """plan: see `FailsAsPlanned`. run, data, checkpoint: more lines of these sections."""
    text = RECIPE.format(plan=plan, steps=steps, step_s=step_s, run=run, data=data, checkpoint=checkpoint)
    (folder / "recipe.toml").write_text(text)


def attempts(folder: Path) -> tuple[Attempt, ...]:
    return read_attempts(folder / "run")


def causes(folder: Path) -> list[str]:
    """The cause of each attempt; "" for one that still runs."""
    return [attempt.cause.value if attempt.cause else "" for attempt in attempts(folder)]
