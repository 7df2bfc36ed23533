"""Keeps of a log what the classifier needs: the last lines, and of the lines before them those that tell something."""

from __future__ import annotations

import time
from collections import deque
from typing import final

from hpctrain.supervise.signs import is_telling

# What was printed earlier has been survived: it says nothing about the end.
_WINDOW_S = 60.0
_MAX_TELLING = 1000
_MAX_RECENT = 1000
_MAX_CHARACTERS = 1000  # of a line


@final
class LogLines:
    """The lines are added in order. Of a step that prints for days, bounded memory is used."""

    def __init__(self) -> None:
        self._telling: deque[tuple[int, float, str]] = deque(maxlen=_MAX_TELLING)
        self._recent: deque[tuple[int, float, str]] = deque(maxlen=_MAX_RECENT)
        self._count = 0

    def add(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")[:_MAX_CHARACTERS]
        self._count += 1
        entry = (self._count, time.monotonic(), text)
        self._recent.append(entry)
        if is_telling(text):
            self._telling.append(entry)

    def lines(self) -> tuple[str, ...]:
        """Returns the lines of the last minute that were kept, in order."""
        since = time.monotonic() - _WINDOW_S
        return tuple(text for _, added, text in sorted({*self._telling, *self._recent}) if added >= since)
