"""Short stacks of a rank's threads: one line each, so that equal stacks of many ranks can be grouped."""

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
_ABOVE = "hpctrain/cli"  # the frames above this one do not help to explain a hang


class Frame(NamedTuple):
    path: str
    line: int
    function: str


class _Place(NamedTuple):
    """A stack frame as it is printed.

    package: the library that contains it; "" for the user's code.
    """

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
    """Returns a text `file:line function < file:line function < ...`, with at most six frames, innermost first. Pure.

    All of the user's frames are kept. Of consecutive frames of one library only the innermost is kept, with the names
    of the library and the file.

    frames: the frames, innermost first.
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
    """Returns the current frame of each thread, by thread identifier.

    Garbage collection is switched off during the call, in which CPython holds the lock of its list of threads. A
    collection that frees a tensor would let other threads run. A thread that needs the list would then wait for the
    lock forever, without releasing the interpreter (CPython issue 106883, seen with 3.11.2).
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
    """Returns the stack of this process's main thread, and that of the reduction thread unless it is idle.

    main_thread: identifier of the main thread.
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
    """Ranks with equal stacks.

    text: the stack, or why there is none.
    late: True if other ranks wait for these ranks.
    """

    ranks: tuple[int, ...]
    text: str
    late: bool


def fold_stacks(late: Mapping[int, str], waiting: Mapping[int, str]) -> list[StackGroup]:
    """Groups ranks with equal stacks: the groups of late ranks first, then those of waiting ranks. Pure.

    late: the stack of each rank for which other ranks wait.
    waiting: the stack of each rank that waits.

    Among the late ranks, small groups come first, since a hang is usually caused by few ranks. Among the waiting ranks,
    large groups come first.
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
    """Returns the text to show in place of the stack of a rank that no longer writes its file.

    process: state of the rank's process (`rank_status.activities`); "" if unknown.
    """
    return "no stack: interpreter blocked" + (f" (the process {process})" if process else "")
