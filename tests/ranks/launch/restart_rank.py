"""What a rank does where it may start anew: `restart_rank.py WORD` prints one line. Without torch and MPI: quick."""

from __future__ import annotations

import os
import sys

from hpctrain.launch.yielding import RESTARTED_VARIABLE, YIELD_VARIABLE, in_effect, restart_with_sleep

if __name__ == "__main__":
    restart_with_sleep()
    facts = [in_effect(), os.environ.get(YIELD_VARIABLE), RESTARTED_VARIABLE in os.environ]
    sys.stdout.write(f"{sys.argv[1]}: {facts}\n")  # in one piece, whatever the other ranks write
