"""Inputs that hang, for `test_input_hangs`; and a loop of one's own over them:
`python -m tests.faults.hanging_inputs KIND TIMEOUT_S`."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import hpctrain
from hpctrain.data import FieldSpec, TransformContext
from hpctrain.resilience import StopRequest

HANGS_AT = 12
Arrays = Mapping[str, NDArray[Any]]


def hang(fields: Arrays, context: TransformContext) -> Arrays:
    """Hangs on the batch that begins at sample HANGS_AT."""
    if context.start == HANGS_AT:
        time.sleep(3600)
    return fields


def unchanged(fields: Arrays, context: TransformContext) -> Arrays:
    return fields


def hold(fields: Arrays, context: TransformContext) -> Arrays:
    """As `hang`, in C code that holds Python's lock."""
    if context.start == HANGS_AT:
        ctypes.PyDLL(None).sleep(3600)
    return fields


def hang_on_rank_1(fields: Arrays, context: TransformContext) -> Arrays:
    """Of two ranks' batches of 16, hangs on the second half of the third, which rank 1 has."""
    if context.start == 32 and 40 in context.indices:
        time.sleep(3600)
    return fields


def hang_after_32(fields: Arrays, context: TransformContext) -> Arrays:
    """Hangs on each batch after the first 32 samples."""
    if context.start >= 32:
        time.sleep(3600)
    return fields


def hang_in_evaluation(fields: Arrays, context: TransformContext) -> Arrays:
    time.sleep(3600)
    return fields


class OwnSamples:
    """A dataset of the user's, whose reads may hang."""

    num_samples = 40
    fields: ClassVar = {"x": FieldSpec(dtype="float32", shape=())}

    def __init__(self, *, hangs: bool, holds: bool = False) -> None:
        self._hangs = hangs
        self._holds = holds

    def gather(self, indices: NDArray[np.int64], *, out: Any = None) -> Arrays:
        if self._hangs and HANGS_AT in indices:
            ctypes.PyDLL(None).sleep(3600) if self._holds else time.sleep(3600)
        return {"x": indices.astype(np.float32)}


def main(kind: str, timeout_s: float) -> None:
    stop = StopRequest().install()
    with hpctrain.init(backend="serial", timeout_s=timeout_s) as session:
        stop.leave = session.world.abort
        kinds: dict[str, dict[str, Any]] = {
            "samples": {},
            "held samples": {"transform": unchanged, "num_threads": 2},
            "thread": {"transform": hang},
            "worker": {"transform": "tests.faults.hanging_inputs:hang", "workers": 2},
            "importing": {"transform": "tests.faults.hanging_import:never", "workers": 1},
            "ahead": {"transform": hang},
            "again": {"transform": hang},
            "held": {"transform": hold},
        }
        options = kinds[kind]
        samples = OwnSamples(hangs=kind in ("samples", "held samples"), holds=kind == "held samples")
        loader = session.loader(samples, global_batch=4, shuffle=False, **options)
        if kind == "importing":
            os.environ["HANGING_IMPORT"] = "1"  # for the workers: this process has imported it
        with loader.epoch(0) as batches:
            for batch in batches:
                print(f"{kind} {batch.start}", flush=True)
                if kind in ("ahead", "again"):
                    time.sleep(1.0)
                    break  # while a thread hangs on a batch that nobody needs
        if kind == "again":
            loader.epoch(1).close()
        print(f"{kind} has ended", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
