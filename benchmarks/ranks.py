"""The program of each rank: `python -m benchmarks.ranks MODULE CASE SETTINGS.json RESULT.json`.

The module has `CASES`, name of a case -> function of the session and the settings, which is collective; `place.run`
returns what it returned on rank 0. `THREADS`, if the module has it, is the number of threads of each rank.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.starting import this_rank
from hpctrain.comm import all_gather_json
from hpctrain.run import Session, init

Settings = Mapping[str, Any]
Case = Callable[[Session, Settings], Any]


def main(module: str, case: str, settings_path: str, result_path: str) -> None:
    settings = json.loads(Path(settings_path).read_text())
    faulthandler.dump_traceback_later(0.95 * settings["timeout_s"], exit=False)
    cases = importlib.import_module(module)
    # Not the backend horovod: its thread would communicate while other methods are timed.
    session = init(
        backend="mpi", device="cpu", threads_per_rank=getattr(cases, "THREADS", None),
        timeout_s=settings["timeout_s"],
    )  # fmt: skip
    try:
        started = all_gather_json(session.world, this_rank())
        value = cases.CASES[case](session, settings)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        session.world.abort(1)
    if session.rank == 0:
        Path(result_path).write_text(json.dumps({"value": value, "ranks": started}))
    session.world.barrier()
    session.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
