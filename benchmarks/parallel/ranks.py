"""The program of each rank: `python -m benchmarks.parallel.ranks CASE SETTINGS.json RESULT.json`."""

from __future__ import annotations

import faulthandler
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.parallel import bubble, cases, checkpoints
from benchmarks.starting import this_rank
from hpctrain.comm import all_gather_json
from hpctrain.run import Session, init

CASES: dict[str, Callable[[Session, Mapping[str, Any]], Any]] = {
    "equality": cases.equality,
    "memory": cases.memory,
    "traffic": cases.traffic,
    "bubble": bubble.bubble,
    "save": checkpoints.save,
    "load": checkpoints.load,
    "dcp": checkpoints.dcp,
}


def main(case: str, settings_path: str, result_path: str) -> None:
    settings = json.loads(Path(settings_path).read_text())
    faulthandler.dump_traceback_later(0.95 * settings["timeout_s"], exit=False)
    session = init(backend="mpi", device="cpu", threads_per_rank=1, timeout_s=settings["timeout_s"])
    try:
        started = all_gather_json(session.world, this_rank())
        result = CASES[case](session, settings)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        session.world.abort(1)
    if session.rank == 0:
        Path(result_path).write_text(json.dumps({"value": result, "ranks": started}))
    session.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
