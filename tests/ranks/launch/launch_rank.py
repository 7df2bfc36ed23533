"""What a rank does in the tests of `hpctrain launch`: no torch and no MPI, so that a launch takes a second.

`python -m tests.ranks.launch.launch_rank BEHAVIOUR DIRECTORY`. Each rank leaves what it saw in DIRECTORY.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path

from hpctrain.launch import identify


def main(behaviour: str, directory: Path) -> int:
    identity = identify(os.environ, socket.gethostname())
    got: list[str] = []

    def note(number: int, frame: object) -> None:
        got.append(signal.Signals(number).name)
        (directory / f"{got[-1]}-{identity.rank}").touch()

    if behaviour == "plain":
        pass
    elif behaviour != "stubborn":
        signal.signal(signal.SIGUSR1, note)
        signal.signal(signal.SIGUSR2, note)
    else:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    record = {**asdict(identity), "pid": os.getpid(), "omp": os.environ.get("OMP_NUM_THREADS")}
    (directory / f"rank-{identity.rank}.json.tmp").write_text(json.dumps(record))
    os.replace(directory / f"rank-{identity.rank}.json.tmp", directory / f"rank-{identity.rank}.json")
    if behaviour == "fail" and identity.rank != 1:
        return 0
    if behaviour == "die" and identity.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline_s = time.monotonic() + 300
    while behaviour == "fail" and time.monotonic() < deadline_s:
        if len(list(directory.glob("rank-*.json"))) == identity.num_ranks:
            return 7  # not before: the launcher ends the ranks that have not written theirs yet
        time.sleep(0.02)
    while time.monotonic() < deadline_s and "SIGUSR1" not in got:
        time.sleep(0.02)
    (directory / f"got-{identity.rank}.json").write_text(json.dumps(got))
    while len(list(directory.glob("got-*.json"))) < identity.num_ranks and time.monotonic() < deadline_s:
        time.sleep(0.02)  # the first rank to leave with a code ends the others
    return 75


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
