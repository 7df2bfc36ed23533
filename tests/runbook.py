"""Which lines that ranks or Slurm have printed are lines that a runbook shows."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.ranks_launcher import REPOSITORY

RUNBOOKS = REPOSITORY / "docs" / "runbooks"

_UNIT = r"(?:ms|s|min|h|[kMGT]?B(?:/s)?|[KMGT]iB)\b"
_IN_NUMBER = r"[\d.,e+-]"
_HASH = "[0-9a-f]{16}"
_VARIES = re.compile(rf"\.\.\.|\b{_HASH}\b|\d{_IN_NUMBER}*(?: {_UNIT})?")


def is_shown(line: str, *, page: str) -> bool:
    """Returns True if a code block of `docs/runbooks/PAGE` has this line, but for numbers, units and hashes.

    A line may be broken into several on the page; `...` within a line of the page stands for any text.
    """
    found = " ".join(line.split())
    return any(_pattern(shown).fullmatch(found) for shown in _shown(page))


def find_shown(printed: str, text: str, *, page: str) -> str:
    """Returns the first line of `printed` that contains `text` and that `docs/runbooks/PAGE` shows.

    Raises AssertionError, with the lines that contain `text` or else all of them, if there is none.
    """
    lines = printed.splitlines()
    candidates = [line for line in lines if text in line]
    for line in candidates:
        if is_shown(line, page=page):
            return line
    raise AssertionError(
        f"docs/runbooks/{page} shows none of these lines:\n" + "\n".join(candidates or lines)
    )


def _shown(page: str) -> Iterator[str]:
    """Yields the lines of the page's code blocks, and runs of lines that may be one line of output, joined."""
    for block in re.findall(
        r"^ *```\n(.*?)^ *```", (RUNBOOKS / page).read_text(), flags=re.DOTALL | re.MULTILINE
    ):
        lines = [" ".join(line.split()) for line in block.splitlines()]
        for first in range(len(lines)):
            for end in range(first + 1, len(lines) + 1):
                if lines[end - 1] in ("", "...") or lines[end - 1].startswith("$ "):
                    break
                yield " ".join(lines[first:end])


def _pattern(shown: str) -> re.Pattern[str]:
    parts, end = [], 0
    for match in _VARIES.finditer(shown):
        parts += [re.escape(shown[end : match.start()]), _wildcard(match[0])]
        end = match.end()
    return re.compile("".join([*parts, re.escape(shown[end:])]))


def _wildcard(part: str) -> str:
    if part == "...":
        return ".+"
    if re.fullmatch(_HASH, part):
        return _HASH
    return f"{_IN_NUMBER}+" + (f" {_UNIT}" if " " in part else "")
