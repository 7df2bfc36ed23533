"""One run on two ranks of which one is slow for a while, first by computing and then by reading."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import pack_arrays
from tests.ranks_launcher import run_command
from tests.run_files import summary_of
from tests.runbook import is_shown
from tests.straggler_tasks import SlowForAWhile

pytestmark = pytest.mark.launches

RECIPE = """
[run]
name = "stragglers"
directory = "run"
steps = 540
[task]
target = "tests.straggler_tasks:SlowForAWhile"
options = { sleep_s = 0.01 }
[data]
train = "data"
global_batch = 4
transform = "tests.straggler_tasks:reads_slowly_later"
prefetch_mb = 0.001
[stragglers]
window_s = 0.3
"""


def test_the_slow_rank_is_named_with_its_cause_and_each_end_is_reported_and_nothing_is_imported_for_it(
    tmp_path: Path,
) -> None:
    pack_arrays(tmp_path / "data", {"x": np.ones((2160, 4), np.float32)})
    (tmp_path / "recipe.toml").write_text(RECIPE)
    hpctrain = str(Path(sys.executable).with_name("hpctrain"))
    done = run_command(2, [hpctrain, "train", "recipe.toml"], cwd=tmp_path, timeout_s=300, expect=0)
    lines = [line for line in done.stdout.splitlines() if " slow (" in line]
    assert len(lines) == 4, done.stdout
    assert all(line.startswith("rank 1 (") for line in lines)
    for line in lines:
        assert is_shown(
            line.replace(line.partition("(")[2].partition(")")[0], "hpct1", 1), page="f2-slow-rank.md"
        )
    summary = summary_of(tmp_path / "run")
    assert [(slow["ranks"], slow["cause"]) for slow in summary["slow"]] == [([1], "compute"), ([1], "input")]
    compute, data = summary["slow"]
    assert 100 < compute["from_step"] < 180 < compute["to_step"] <= data["from_step"]
    assert 320 < data["from_step"] < 400 < data["to_step"]
    assert 0.03 < compute["wait_s"] < 0.06
    begin, end = SlowForAWhile.MODULES_AT
    for rank in range(2):
        before, after = ((tmp_path / f"modules-{step}-{rank}").read_text().split() for step in (begin, end))
        assert not set(after) - set(before)
