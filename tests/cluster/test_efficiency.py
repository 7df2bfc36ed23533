"""Links that become slower: all of the time that steps then take longer appears as exposed reduction."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import pack_arrays
from hpctrain.scaling import attribute, efficiency_of, read_step_times
from hpctrain.telemetry import PART_NAMES
from tests.cluster import Cluster
from tests.run_files import newest
from tests.states import wait_for

pytestmark = pytest.mark.launches

FAST, SLOW = "1gbit", "250mbit"
BITS_PER_S = {FAST: 1e9, SLOW: 250e6}
# 4 MB: more than the shaped queue holds at once would be dropped, and TCP measured instead of the link.
PARAMETERS = 1_000_000
STEPS, SLOW_FROM = 44, 22
RECIPE = f"""
[run]
name = "efficiency"
directory = "run"
steps = {STEPS}
[task]
target = "tests.straggler_tasks:Steps"
options = {{ sleep_s = 0.05, parameters = {PARAMETERS} }}
[data]
train = "samples"
global_batch = 2
[optimizer]
name = "sgd"
lr = 1e-9
[reduction]
algorithm = "direct"
bucket_mb = 4
[telemetry]
write_every_s = 0
[stragglers]
find = false
"""


def test_a_link_that_becomes_slower_is_exposed_reduction_and_transfer(
    cluster: Cluster, tmp_path: Path
) -> None:
    pack_arrays(tmp_path / "samples", {"x": np.ones((2 * STEPS, 4), np.float32)})
    (tmp_path / "recipe.toml").write_text(RECIPE)
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", "--wait=30", "hpctrain", "train", "recipe.toml"]
    cluster.set_rate(FAST)
    process = subprocess.Popen(
        cluster.argv(srun, cwd=tmp_path), env=cluster.environment(), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        wait_for(lambda: len(newest(tmp_path / "run", "step")) >= SLOW_FROM or process.poll() is not None)
        assert process.poll() is None, process.communicate()[0]
        cluster.set_rate(SLOW)
        counted_from = max(newest(tmp_path / "run", "step")) + 1
        while counted_from not in newest(tmp_path / "run", "step"):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        sent = cluster.bytes_sent()  # just after a step, while the next one computes
        output, _ = process.communicate(timeout=300)
    finally:
        cluster.set_rate(FAST)
        if process.poll() is None:
            process.kill()
    assert process.returncode == 0, output
    after = cluster.bytes_sent()
    # What has left a node in a step, headers included; before and after the steps that were counted there is little.
    step_bytes = max(after[node] - sent[node] for node in sent) / (STEPS - counted_from)
    assert 0.95 * 4 * PARAMETERS < step_bytes < 1.15 * 4 * PARAMETERS
    expected_s = 8 * step_bytes * (1 / BITS_PER_S[SLOW] - 1 / BITS_PER_S[FAST])
    before, slow = (
        read_step_times(tmp_path / "run", first=first, last=last)
        for first, last in ((5, SLOW_FROM - 1), (counted_from + 1, STEPS))
    )
    added = np.median(attribute(slow), axis=1) - np.median(attribute(before), axis=1)
    for name, seconds in zip(PART_NAMES, added.T, strict=True):
        print(f"{name}: {seconds.round(4)} s added, {expected_s:.4f} s at least by bytes / rate")
    # By the time of day, so by another clock than the parts. TCP needs more than bytes / rate through a shaped link.
    at = {step: record["time"] for step, record in newest(tmp_path / "run", "step").items()}
    walls = [
        np.median([at[int(step)] - at[int(step) - 1] for step in times.steps]) for times in (before, slow)
    ]
    longer = float(walls[1] - walls[0])
    assert added[:, PART_NAMES.index("exposed_reduction")] == pytest.approx([longer] * 2, rel=0.1)
    assert longer > 0.9 * expected_s
    others = [number for number, name in enumerate(PART_NAMES) if name != "exposed_reduction"]
    assert (np.abs(added[:, others]) < 0.1 * expected_s).all()
    factors, factors_before = efficiency_of(slow).factors, efficiency_of(before).factors
    print(factors_before, factors)
    assert factors.transfer < factors_before.transfer
    assert min(factors.load_balance, factors.serialisation) > 0.85
