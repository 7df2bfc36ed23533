"""`make demo`: packs two datasets, trains two models on four ranks, stops one and resumes it on two, verifies.

Every step is a command that a user could type, and is printed before it runs. The table at the end is computed from the
runs' records. The exit code is 0 only if everything worked and both models reached their quality.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hpctrain.errors import ExitCode
from hpctrain.telemetry import read_records

REPOSITORY = Path(__file__).resolve().parent.parent
WORK = REPOSITORY / "demo"
HPCTRAIN = Path(sys.executable).with_name("hpctrain")
# Quality that the models must reach on held-out data.
MIN_ACCURACY = 0.97
MAX_NATS = 2.6

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def run(*words: str, expect: int = 0, stop_at_step: int | None = None, watch: Path | None = None) -> None:
    """Runs `hpctrain words` in the demo folder; at step `stop_at_step` sends the signal that Slurm would send."""
    console.print(f"$ hpctrain {shlex.join(words)}", style="bold", soft_wrap=True)
    process = subprocess.Popen([HPCTRAIN, *words], cwd=WORK)
    if stop_at_step is not None and watch is not None:
        while process.poll() is None and last_step(watch) < stop_at_step:
            time.sleep(0.1)
        console.print(f"$ kill -TERM {process.pid}    # half-way, as at preemption", style="bold")
        process.send_signal(signal.SIGTERM)
    code = process.wait()
    if code != expect:
        console.print(f"exit code {code}, expected {expect}", style="red")
        sys.exit(code or 1)
    console.print()


def last_step(run_directory: Path) -> int:
    path = run_directory / "metrics" / "rank-00000.jsonl"
    if not path.exists():
        return 0
    return max((r["step"] for r in read_records(path) if r["kind"] == "step"), default=0)


def launch(num_ranks: int, recipe: str, *words: str, **options: Any) -> None:
    run(
        "launch", "-n", str(num_ranks), "--ranks-per-node", str(num_ranks // 2), "--",
        "hpctrain", "train", str(Path("..") / "examples" / recipe), *words, **options,
    )  # fmt: skip


def summary(name: str) -> dict[str, Any]:
    return json.loads((WORK / "runs" / name / "summary.json").read_text())


def speed_of_steps(run_directory: Path, *, first: int, last: int) -> dict[str, float]:
    """Returns samples/s and exposed share of the steps `first` to `last`, from rank 0's records."""
    records = [
        r
        for r in read_records(run_directory / "metrics" / "rank-00000.jsonl")
        if r["kind"] == "step" and first <= r["step"] <= last
    ]
    seconds = sum(r["seconds"]["step"] for r in records)
    samples = records[-1]["global_samples"] - records[0]["global_samples"]
    timed = seconds - records[0]["seconds"]["step"]
    exposed = sum(r["seconds"]["exposed_sync"] for r in records)
    return {"samples_per_s": samples / timed, "exposed": exposed / seconds}


def table(rows: list[dict[str, Any]]) -> Table:
    columns = ("task", "ranks", "backend", "algorithm", "wire", "samples/s", "exposed sync", "quality")
    made = Table(title="from the runs' own records")
    for column in columns:
        made.add_column(column, justify="right" if column in ("ranks", "samples/s") else "left")
    for row in rows:
        made.add_row(*(str(row[column]) for column in columns))
    return made


def row(record: dict[str, Any], *, quality: str, **speed: float) -> dict[str, Any]:
    return {
        "task": record["name"], "ranks": record["topology"].removesuffix(" (emulated)"), "backend": record["backend"],
        "algorithm": record["algorithm"], "wire": record["wire"],
        "samples/s": f"{speed.get('samples_per_s', record['samples_per_s']):,.0f}",
        "exposed sync": f"{speed.get('exposed', record['exposed_sync_share']):.0%}", "quality": quality,
    }  # fmt: skip


def main() -> None:
    started = time.monotonic()
    if WORK.exists():
        shutil.rmtree(WORK)
    WORK.mkdir()
    os.environ["PATH"] = f"{HPCTRAIN.parent}{os.pathsep}{os.environ['PATH']}"

    run("data", "pack", "digits", "data/digits")
    run("data", "pack", "python-source", "data/python-source", "--window", "128")
    run("data", "verify", "data/digits/train")

    launch(4, "digits.toml")
    digits = summary("digits")

    steps = 200
    characters = WORK / "runs" / "characters"
    launch(
        4, "characters.toml", expect=ExitCode.STOPPED_EARLY, stop_at_step=steps // 2, watch=characters
    )  # fmt: skip
    first = summary("characters")
    run("checkpoint", "list", "runs/characters/checkpoints")
    launch(2, "characters.toml")
    second = summary("characters")

    run("checkpoint", "verify", "runs/digits/checkpoints")
    run("checkpoint", "verify", "runs/characters/checkpoints")

    accuracy, nats = digits["quality"]["accuracy"], second["quality"]["nats_per_character"]
    console.print(table([
        row(digits, quality=f"{accuracy:.1%} of held-out digits"),
        row(first, quality=f"stopped at step {first['step']}",
            **speed_of_steps(characters, first=1, last=first["step"])),
        row(second, quality=f"{nats:.3f} nats per held-out character",
            **speed_of_steps(characters, first=first["step"] + 1, last=steps)),
    ]))  # fmt: skip
    faults = []
    if accuracy < MIN_ACCURACY:
        faults.append(f"digits reached {accuracy:.1%}, not {MIN_ACCURACY:.0%}")
    if nats >= MAX_NATS:
        faults.append(f"the language model reached {nats:.3f} nats per character, not under {MAX_NATS}")
    if second["resumed_from"] is None or second["ranks"] == first["ranks"]:
        faults.append("the second run did not resume the first on another number of ranks")
    for fault in faults:
        console.print(fault, style="red")
    console.print(f"{time.monotonic() - started:.0f} s; everything it made is in {WORK.name}/")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
