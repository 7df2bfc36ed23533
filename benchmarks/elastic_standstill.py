"""How long an elastic run stands still when a rank is killed: `python -m benchmarks.elastic_standstill --losses 20`.

The standstill is the time from the last step that is recorded before the loss to the first step that is recorded after
it. The run trains the digits on this machine; each rank is killed by SIGKILL at a random moment, and is started again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hpctrain.supervise import read_attempts
from hpctrain.telemetry import read_records

_HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))
_RECIPE = """
[run]
name = "standstill"
directory = "run"
steps = 1000000
[task]
target = "hpctrain.tasks.digits:Digits"
[data]
train = "data/train"
global_batch = 64
[optimizer]
lr = 1e-3
[telemetry]
write_every_s = 0
[checkpoint]
every_steps = 1000
"""
_WAITS_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--output", type=Path)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), losses=words.losses, ranks=words.ranks)
    text = json.dumps(found, indent=2)
    print(text)
    if words.output is not None:
        words.output.write_text(text + "\n")


def measure(folder: Path, *, losses: int, ranks: int) -> dict[str, Any]:
    subprocess.run(
        [_HPCTRAIN, "data", "pack", "digits", "data"], cwd=folder, check=True, stdout=subprocess.DEVNULL
    )
    (folder / "recipe.toml").write_text(_RECIPE)
    options = ["--elastic", f"1:{ranks}", "--max-restarts", "99999"]
    command = [_HPCTRAIN, "supervise", *options, "--", "hpctrain", "train", "recipe.toml"]
    draw = random.Random(1)
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
    try:
        for number in range(1, losses + 1):
            _wait_until_it_trains(folder, process, attempt=number)
            time.sleep(draw.uniform(0.2, 1.0))
            environment = json.loads((folder / "run" / "environment.json").read_text())
            os.kill(draw.choice(environment["ranks"])["pid"], signal.SIGKILL)
        _wait_until_it_trains(folder, process, attempt=losses + 1)
    except BaseException:
        print((folder / "output").read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    attempts = read_attempts(folder / "run")
    seconds = standstills(folder)
    return {
        "ranks": ranks,
        "losses": len(seconds),
        "median_s": statistics.median(seconds),
        "longest_s": max(seconds),
        "seconds": [round(each, 3) for each in seconds],
        "steps_lost": [attempt.steps_lost for attempt in attempts[:losses]],
    }


def standstills(folder: Path) -> list[float]:
    """Returns, for each loss, the seconds from the last step before it to the first step after it."""
    attempts = read_attempts(folder / "run")
    times = [
        r["time"]
        for r in read_records(folder / "run" / "metrics" / "rank-00000.jsonl")
        if r["kind"] == "step"
    ]
    found = []
    for attempt in attempts[1:]:
        before = [at for at in times if at < attempt.began]
        after = [at for at in times if at > attempt.began]
        if before and after:
            found.append(min(after) - max(before))
    return found


def _wait_until_it_trains(folder: Path, process: subprocess.Popen[bytes], *, attempt: int) -> None:
    until_s = time.monotonic() + _WAITS_S
    while True:
        found = read_attempts(folder / "run")
        path = folder / "run" / "metrics" / "rank-00000.jsonl"
        if len(found) == attempt and path.exists():
            since = [r for r in read_records(path) if r["kind"] == "step" and r["time"] > found[-1].began]
            if len(since) >= 5:
                return
        if process.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"attempt {attempt} does not train")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
