"""Times of the sections ride on the sums of steps: every rank derives the same limits, and rank 0 records them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpctrain.comm import LimitSettings, Monitored, Section, SectionLimits, World, run_threads
from hpctrain.train import LIMITS_FILE, SectionTimes, read_slowest

SETTINGS = LimitSettings(timeout_s=600.0, least_s=20.0)
USUAL = {"step": 5.0, "input": 0.5, "evaluation": 0.0, "checkpoint": 0.0}


def trained(world: World, directory: Path, *, steps: int, usual: bool = True) -> SectionLimits:
    """After so many steps, of which every tenth saves: on rank 1 steps, inputs and saves take longer."""
    monitored = Monitored(world, timeout_s=300)
    limits = SectionLimits(SETTINGS)
    times = SectionTimes(limits, comm=monitored, directory=directory)
    for step in range(1, steps + 1):
        votes = times.votes()
        summed = torch.tensor([votes[name] for name in sorted(votes)], dtype=torch.float64)
        world.all_reduce(summed)
        times.agreed(dict(zip(sorted(votes), summed.tolist(), strict=True)), step=step)
        saves = step % 10 == 0
        seconds = {name: value * (1.0 + 0.3 * world.rank) for name, value in USUAL.items()}
        if saves:
            seconds |= {
                "step": seconds["step"] + 30.0,
                "evaluation": 0.0,
                "checkpoint": 30.0,
                "own_write": 33.0,
            }
        times.step_ended(seconds, is_usual=usual)
    monitored.close()
    return limits


def test_the_ranks_agree_on_the_mean_and_rank_0_records_it(tmp_path: Path) -> None:
    found = run_threads(3, lambda world: trained(world, tmp_path, steps=25))
    assert len({json.dumps(limits.record()) for limits in found}) == 1
    record = found[0].record()
    assert record["step"]["slowest_s"] == pytest.approx(5.0 * 1.3)  # without the save
    assert record["step"]["derived_s"] == pytest.approx(65.0)
    assert record["input"]["derived_s"] == pytest.approx(100.0)
    assert record["save"]["slowest_s"] == pytest.approx(33.0)
    assert record["save"]["derived_s"] == pytest.approx(330.0)
    assert record["load"]["derived_s"] is None
    written = json.loads((tmp_path / LIMITS_FILE).read_text())
    assert written["step"] == 21  # when the times of 20 steps and two saves were known
    assert written["sections"]["step"]["derived_s"] == pytest.approx(65.0)
    slowest_s = read_slowest(tmp_path)
    assert slowest_s == pytest.approx({"step": 6.5, "input": 0.65, "save": 33.0})
    again = SectionLimits(SETTINGS)
    again.count_earlier(slowest_s)
    assert again.slowest(Section.SAVE) == (pytest.approx(33.0), 0)


def test_steps_that_are_not_usual_do_not_count_but_their_saves_do(tmp_path: Path) -> None:
    (limits,) = run_threads(1, lambda world: trained(world, tmp_path, steps=25, usual=False))
    assert limits.slowest(Section.STEP) == (0.0, 0)
    assert limits.slowest(Section.SAVE) == (33.0, 2)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"sections": 3}', '{"sections": {"step": {"slowest_s": "x"}}}']
)
def test_a_record_that_cannot_be_read_counts_for_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / LIMITS_FILE).write_text(text)
    assert read_slowest(tmp_path) == {}
    assert read_slowest(tmp_path / "none") == {}
