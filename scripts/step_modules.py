"""Prints which modules of hpctrain one training step enters, on all threads of rank 0 of two, after warm-up.

    python scripts/step_modules.py

Trains the digits recipe over MPI and profiles the function calls of one step: from its beginning to that of the next,
without a save or an evaluation.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = f"{REPOSITORY / 'hpctrain'}/"
PROFILED_STEP = 12
OVERRIDES = (
    "data.train=digits/train", "data.held_out=digits/test", "run.directory=run", "checkpoint.every_steps=1000",
    "run.epochs=1",
)  # fmt: skip


def main() -> int:
    if sys.argv[1:]:
        return profile_one_rank()
    program = [sys.executable, "-m", "hpctrain.cli.main"]
    with tempfile.TemporaryDirectory() as directory:
        for command in (
            [*program, "data", "pack", "digits", "digits"],
            [*program, "launch", "-n", "2", "--", sys.executable, str(Path(__file__).resolve()), "rank"],
        ):
            done = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                print(done.stdout)
                return done.returncode
        lines = [line for line in done.stdout.splitlines() if line.endswith(".py") and " " not in line]
    print("\n".join(lines))
    print(f"one step enters {len(lines)} modules of hpctrain")
    return 0


def profile_one_rank() -> int:
    entered: set[str] = set()
    profiled = [False]

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if profiled[0] and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.add(frame.f_code.co_filename.removeprefix(PACKAGE))

    threading.setprofile(profile)  # threads that start from here on: prefetch, reduction
    from hpctrain.launch import identify
    from hpctrain.resilience import StopRequest
    from hpctrain.run.recipe.load import load_recipe
    from hpctrain.run.training import Resume, train
    from hpctrain.train.task.schedule import Schedule

    learning_rate = Schedule.lr

    def watched(schedule: Schedule, step: int) -> float:
        profiled[0] = step == PROFILED_STEP
        return learning_rate(schedule, step)

    Schedule.lr = watched  # type: ignore[method-assign]
    sys.setprofile(profile)
    path = REPOSITORY / "examples" / "digits.toml"
    train(load_recipe(path, overrides=OVERRIDES), recipe_path=path, resume=Resume(), stop=StopRequest())
    sys.setprofile(None)
    if identify(os.environ, socket.gethostname()).rank == 0:
        print("\n".join(sorted({*entered, "train/task/schedule.py"})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
