"""One rank of the table's programs: `python -m tests.mpis.ranks_program CASE`. Prints each rank and its process."""

from __future__ import annotations

import os
import signal
import sys
import time

import hpctrain

CULPRIT = 1


def main(case: str) -> None:
    with hpctrain.init() as session:
        session.mean(0.0)
        print(f"rank {session.rank} is process {os.getpid()}", flush=True)
        if case.startswith("SIG") and session.rank == CULPRIT:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.Signals[case])
        if case == "exit" and session.rank == CULPRIT:
            sys.exit(3)
        if case == "leaves" and session.rank == CULPRIT:
            os._exit(0)
        if case == "ignores":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)
            print("ready", flush=True)
            time.sleep(600)
        session.mean(0.0)
        time.sleep(0.0 if case == "sound" else 600.0)


if __name__ == "__main__":
    main(sys.argv[1])
