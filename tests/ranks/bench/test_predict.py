"""From a measured all-reduce and a training run to a prediction, by the commands that a user gives."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import pack_arrays
from tests.ranks_launcher import run_command
from tests.run_files import records_of

pytestmark = pytest.mark.launches

HPCTRAIN = [sys.executable, "-m", "hpctrain.cli.main"]
RECIPE = """
[run]
name = "digits"
directory = "run"
steps = 40

[task]
target = "hpctrain.tasks.digits:Digits"

[data]
train = "data/train"
global_batch = 32

[reduction]
bucket_mb = 0.05

[checkpoint]
every_steps = 100
"""


def test_a_pair_of_nodes_and_one_rank_predict_a_thousand_nodes(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    fields = {
        "image": generator.random((256, 1, 8, 8), dtype=np.float32),
        "label": generator.integers(10, size=256, dtype=np.int64),
    }
    pack_arrays(tmp_path / "data" / "train", fields)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    pair = tmp_path / "pair.json"
    run_command(
        2,
        [*HPCTRAIN, "bench", "allreduce", "--sizes", "4KiB,256KiB,4MiB", "--algorithms", "flat,direct,ring", "--wires",
         "fp32", "--repeats", "3", "--link-mbit", "100000", "--json", str(pair)],
        env={"HPCTRAIN_RANKS_PER_NODE": "1"}, expect=0,
    )  # fmt: skip
    run_command(None, [*HPCTRAIN, "train", "recipe.toml"], cwd=tmp_path, expect=0)
    run_command(
        2, [*HPCTRAIN, "train", "recipe.toml", "--set", "run.directory=pair", "--set", "data.global_batch=64",
         "--set", "reduction.algorithm=hierarchical"],
        cwd=tmp_path, env={"HPCTRAIN_RANKS_PER_NODE": "1"}, expect=0,
    )  # fmt: skip
    profiles = records_of(tmp_path / "run", "buckets")
    assert len(profiles) == 1
    assert len(profiles[0]["bytes"]) == len(profiles[0]["ready_s"]) > 1
    assert profiles[0]["ready_s"] == sorted(profiles[0]["ready_s"])
    assert 0 < profiles[0]["ready_s"][-1] <= profiles[0]["backward_s"]

    found = tmp_path / "predicted.json"
    command = [
        "bench",
        "predict",
        "--calibration",
        str(pair),
        "--calibration",
        "run",
        "--calibration",
        "pair",
    ]
    command += ["--nodes", "1..1024"]
    result = run_command(
        None, [*HPCTRAIN, *command, "--ranks-per-node", "2", "--link", "1gbit", "--json", str(found)],
        cwd=tmp_path, expect=0,
    )  # fmt: skip
    assert "what would help" in result.stdout
    document = json.loads(found.read_text())
    assert document["schema"] == "hpctrain.bench.predict/1"
    assert document["calibration"]["workload"]["gradient_bytes"] == sum(profiles[0]["bytes"])
    assert 1 <= document["calibration"]["workload"]["overlap_slowdown"] < 8
    assert "is not used" not in " ".join(result.stdout.split() + result.stderr.split())
    rows = document["predictions"]
    assert [row["nodes"] for row in rows] == [2**k for k in range(11)]
    for row in rows:
        assert row["step_s_90"][0] < row["seconds"]["step_s"] < row["step_s_90"][1]
        assert 0 < row["efficiency"] <= 1
        assert math.isfinite(row["samples_per_s"])
    assert rows[-1]["efficiency"] < rows[0]["efficiency"]
