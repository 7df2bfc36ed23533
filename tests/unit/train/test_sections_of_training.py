"""Which section of a run, and so which time limit, the exchanges of the training loop belong to."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.comm import Section, World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.data import pack_arrays
from hpctrain.resilience import StopRequest
from hpctrain.run import Session, parse_recipe
from hpctrain.run.training import Resume, carry_out
from tests.sessions import session_over
from tests.tiny_task import TinyTask

RANKS = 2


def note_sections(world: World, session: Session) -> dict[str, set[Section | None]]:
    """Notes, for each function of the training loop that gathers over `world`, in which sections it does."""
    found: dict[str, set[Section | None]] = {}
    gather = world.all_gather

    def all_gather(
        part: torch.Tensor, *, counts: Sequence[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        for frame in traceback.extract_stack():
            if "train/loop" in frame.filename:
                found.setdefault(frame.name, set()).add(session.world._watcher.sections.now)  # type: ignore[attr-defined]
        return gather(part, counts=counts, out=out)

    world.all_gather = all_gather  # type: ignore[method-assign]
    return found


def test_the_exchange_at_the_end_of_an_epoch_has_the_limit_of_a_step(tmp_path: Path) -> None:
    pack_arrays(tmp_path / "data", {"x": np.ones((8, 4), np.float32)})
    recipe: dict[str, Any] = {
        "run": {"directory": str(tmp_path / "run"), "epochs": 2},
        "task": {"target": "tests:Task"},
        "data": {"train": str(tmp_path / "data"), "global_batch": 4},
    }

    def run(world: World) -> dict[str, set[Section | None]]:
        session = session_over(world)
        found = note_sections(world, session)
        carry_out(parse_recipe(recipe), TinyTask(), session=session, resume=Resume(), stop=StopRequest())
        return found

    for found in run_threads(RANKS, run, timeout_s=300):
        assert found["epoch_ended"] == {Section.STEP}
