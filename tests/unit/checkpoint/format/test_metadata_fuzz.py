"""Metadata that somebody made to harm, by property-based fuzzing: an error, soon, within bounds, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[4]
EXAMPLES = max(80, 10 * int(os.environ.get("HPCTRAIN_TRIALS", "0")))


def test_changed_metadata_with_hashes_that_fit_is_an_error_or_loads_and_does_nothing_else(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.checkpoint.fuzz", str(tmp_path), str(EXAMPLES)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    result = json.loads(done.stdout)
    assert result["slowest_s"] < 5
    # Some changes are harmless, most are not; and the watch over what is opened and run does see such things.
    for kind in ("values", "text", "seals"):
        assert result[kind]["refused"] > EXAMPLES // 2, result
        assert result[kind]["loaded"] + result[kind]["refused"] >= EXAMPLES // 2
    assert result["values"]["loaded"] > 0
    assert {"open", "compile", "exec"} <= set(result["watch_sees"])
