"""Short stacks of a rank's threads: one line each, so that equal ones of many ranks are folded into one."""

from __future__ import annotations

import gc
import sys
import sysconfig
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

REDUCTION_THREAD = "hpctrain-reduce"
_MOST_FRAMES = 6
_ONE_AT_A_TIME = threading.Lock()
_PACKAGE = str(Path(__file__).resolve().parents[4])
# Where libraries are, the innermost folders first.
_ROOTS = sorted(
    {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")},
    key=len,
    reverse=True,
)
_ABOVE = "hpctrain/cli"  # what is called from here says nothing of a hang


class Frame(NamedTuple):
    path: str
    line: int
    function: str


class _Place(NamedTuple):
    """A frame for the reader. package: of a library; "" for the user's code."""

    package: str
    text: str


def _place(frame: Frame) -> _Place:
    parts = Path(frame.path).parts
    found = f"{frame.line} {frame.function}"
    if frame.path.startswith(f"{_PACKAGE}/hpctrain/"):
        return _Place("hpctrain", f"hpctrain/{parts[-1]}:{found}")
    for root in _ROOTS:
        if frame.path.startswith(f"{root}/"):
            package, *rest = parts[len(Path(root).parts) :]
            return _Place(package, f"{package}/{parts[-1]}:{found}" if rest else f"{package}:{found}")
    if frame.path.startswith("<frozen "):
        return _Place(frame.path, f"{frame.path}:{found}")
    return _Place("", f"{parts[-1] if parts else frame.path}:{found}")


def shorten(frames: Iterable[Frame]) -> str:
    """Returns `file:line function < file:line function < ...`, the innermost first. Pure.

    frames: the innermost first. The user's frames stay; of the frames of one library in a row the innermost stays, with
    the library's name and the file's. At most six frames.
    """
    kept: list[str] = []
    package = ""
    for frame in frames:
        if f"{_PACKAGE}/{_ABOVE}/" in frame.path:
            break
        place = _place(frame)
        if not place.package or place.package != package:
            kept.append(place.text)
        package = place.package
        if len(kept) == _MOST_FRAMES:
            break
    return " < ".join(kept)


def _frames(innermost: FrameType | None) -> Iterable[Frame]:
    frame = innermost
    while frame is not None:
        yield Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def thread_frames() -> dict[int, FrameType]:
    """Returns the current frame of each thread, by the thread's identifier.

    No garbage is collected meanwhile. CPython holds its lock of the list of threads then, and a collection that frees
    a tensor lets other threads run: one that needs the list keeps the interpreter and waits, for ever (CPython issue
    106883, seen with 3.11.2).
    """
    with _ONE_AT_A_TIME:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def own_stack(main_thread: int) -> str:
    """Returns where this process's thread `main_thread` (its identifier) is, and the thread that reduces gradients.

    The latter is left out while it has nothing to do.
    """
    current = thread_frames()
    text = shorten(_frames(current.get(main_thread)))
    for thread in threading.enumerate():
        frame = current.get(thread.ident or 0)
        if thread.name == REDUCTION_THREAD and frame is not None and frame.f_code.co_name != "wait":
            text += f"; reduction: {shorten(_frames(frame))}"
    return text


# ---- of many ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StackGroup:
    """Ranks with equal stacks. text: the stack, or why there is none. late: others wait for these ranks."""

    ranks: tuple[int, ...]
    text: str
    late: bool


def fold_stacks(late: Mapping[int, str], waiting: Mapping[int, str]) -> list[StackGroup]:
    """Returns the ranks with their stacks, those of equal stacks together: late ones first. Pure.

    Of the late ones the fewest come first, since few are what is looked for; of those that wait the most.
    """
    groups: list[StackGroup] = []
    for stacks, is_late in ((late, True), (waiting, False)):
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(stacks):
            ranks_of[stacks[rank]].append(rank)
        found = [StackGroup(ranks=tuple(ranks), text=text, late=is_late) for text, ranks in ranks_of.items()]
        groups += sorted(
            found, key=lambda group: (len(group.ranks) * (1 if group.late else -1), group.ranks[0])
        )
    return groups


def without_stack(process: str) -> str:
    """Returns the text of a rank that is silent. process: state of its process (`board.processes`), "" if not known."""
    return "no stack: interpreter blocked" + (f" (the process {process})" if process else "")
