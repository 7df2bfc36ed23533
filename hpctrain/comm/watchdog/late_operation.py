"""Follows an operation that is late: asks the absent ranks for their stacks, and finds out whether one is hung."""

from __future__ import annotations

import threading
import time

from hpctrain.comm.collectives.activity import Section
from hpctrain.comm.watchdog.board.hang_evidence import EarlyLimits, IdleSince
from hpctrain.comm.watchdog.board.status_board import Board
from hpctrain.comm.watchdog.operation_state import Track
from hpctrain.comm.watchdog.section_limits import SectionLimits

# Between two looks: a part of the limit, so that a hang is found soon after it.
_PAUSE_SHARE = 1 / 32
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
# A thread that wakes up later than planned by this much was suspended, and so may the other ranks have been.
_SUSPENDED_AFTER_S = 5.0


def pursue(track: Track, *, board: Board, sections: SectionLimits, over: threading.Event) -> str | None:
    """Returns why the run has to end before its own limit; None if the operation, or the watching, has ended.

    Raises the alarm; on some ranks then looks what the absent ranks do, until the operation ends. over: set when the
    watcher ends. Raises OSError.
    """
    sequence = track.sequence
    board.raise_alarm(track)
    if not board.asks(track):
        return None
    idle = IdleSince()
    while track.sequence == sequence and track.since is not None and (early := sections.early) is not None:
        limits = EarlyLimits(
            here_s=early.seconds,
            everywhere_s=sections.early_everywhere_s,
            of=lambda name: sections.early_s_of(Section(name) if name else None),
        )
        hung = board.find_hung(track, idle=idle, limits=limits)
        if hung and track.sequence == sequence and track.since is not None:
            more = f" and {len(hung) - 4} more" if len(hung) > 4 else ""
            return f"{early.text}; {', '.join(hung[:4])}{more}"
        pause_s = min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, _PAUSE_SHARE * early.seconds))
        began = time.monotonic()
        if over.wait(pause_s):
            return None
        if time.monotonic() > began + pause_s + _SUSPENDED_AFTER_S:
            idle = IdleSince()
    return None
