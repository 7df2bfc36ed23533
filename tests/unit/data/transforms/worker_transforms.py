"""Transforms for workers to import. None of them needs torch: workers start without it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.transforms.transform import TransformContext

Arrays = dict[str, NDArray[Any]]


def augment(fields: Arrays, context: TransformContext) -> Arrays:
    """Changes its input in place, adds fields, and draws random numbers for each sample."""
    fields["x"] *= 2
    draws = [context.generator(row).integers(1 << 40) for row in range(len(fields["x"]))]
    return {**fields, "draw": np.array(draws, dtype=np.int64), "big": fields["label"].astype(">u2")}


def process(fields: Arrays) -> Arrays:
    """What a worker is: its process, its parent, whether torch is there, launcher variables that it has."""
    seen = [name for name in os.environ if name.startswith(("OMPI_", "PMIX_", "SLURM_", "HOROVOD_"))]
    facts = [os.getpid(), os.getppid(), "torch" in sys.modules, len(seen), int("mpi4py" in sys.modules)]
    return {"facts": np.tile(np.array(facts), (len(fields["label"]), 1))}


def die_once(fields: Arrays) -> Arrays:
    """The first process that gets label 7 kills itself; the file that says so is named by the environment."""
    mark = Path(os.environ["HPCTRAIN_TEST_MARK"])
    if 7 in fields["label"] and not mark.exists():
        fields["label"] += 1000  # half-done work must not reach the second try
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return fields


def die_always(fields: Arrays) -> Arrays:
    if 7 in fields["label"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return fields


def leave(fields: Arrays) -> Arrays:
    os._exit(9)


def slow(fields: Arrays) -> Arrays:
    """Never gives the interpreter lock up for long, and takes seconds."""
    mark = os.environ.get("HPCTRAIN_TEST_MARK")
    if mark:
        Path(mark).write_text(str(os.getpid()))
    end = time.monotonic() + 300
    while time.monotonic() < end:
        sum(range(100000))
    return fields


def grow(fields: Arrays) -> Arrays:
    """Four times as many bytes as it is given, and then some more with each label."""
    rows = len(fields["label"])
    return {"wide": np.zeros((rows, 4 * fields["x"][0].size), fields["x"].dtype), "label": fields["label"]}


def fail(fields: Arrays) -> Arrays:
    if 45 in fields["label"]:
        raise ValueError("label 45 is odd")
    return fields


def wrong_rows(fields: Arrays) -> Arrays:
    return {"x": fields["x"][:1]}


def text(fields: Arrays) -> Arrays:
    return {"x": np.array(["a"] * len(fields["x"]))}


def nothing(fields: Arrays) -> None:
    return None


number = 3


def mortal(fields: Arrays, context: TransformContext) -> Arrays:
    """Each worker notes that it lived; one dies over the first batch, and every one that gets sample 100."""
    where = Path(os.environ["HPCTRAIN_TEST_MARK"])
    (where / f"worker-{os.getpid()}").touch()
    if context.start == 0:
        try:
            (where / "first").touch(exist_ok=False)
        except FileExistsError:
            return fields
        os.kill(os.getpid(), signal.SIGKILL)
    if 100 in context.indices:
        with (where / "over-sample-100").open("a") as file:
            print(time.time(), file=file)
        os.kill(os.getpid(), signal.SIGKILL)
    return fields
