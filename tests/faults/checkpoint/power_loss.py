"""What a disk may hold after a power failure: a replay of what a faulty filesystem has traced.

Whatever was not flushed may be there or not. A file's content is on disk as it was at its last fsync; a folder's
names are as at its last fsync, or as they were at any moment since: names go to disk in their order, each rename
as a whole, but folders and files do not wait for each other. Method: Pillai et al. 2014, "All File Systems Are Not
Created Equal".
"""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class Kept(Enum):
    """What of the unflushed is on disk."""

    NOTHING = "nothing"
    NAMES = "names"
    CONTENT = "content"
    ALL = "all"
    SOME = "some"


@dataclass(eq=False)
class File:
    """latest: its content. flushed: at its last fsync, None when it never was."""

    latest: bytearray = field(default_factory=bytearray)
    flushed: bytes | None = None


@dataclass(eq=False)
class Folder:
    """names: what it holds. since_flush: what it held at its last fsync, and after each change since."""

    names: dict[str, File | Folder] = field(default_factory=dict)
    since_flush: list[dict[str, File | Folder]] = field(default_factory=lambda: [{}])


class Disk:
    """The files of one filesystem, as a program sees them and as the disk has them."""

    def __init__(self) -> None:
        self._root = Folder()
        self._by_inode: dict[int, File | Folder] = {}

    def apply(self, event: dict[str, Any]) -> None:
        operation = event["operation"]
        if operation in ("create", "mkdir"):
            made: File | Folder = File() if operation == "create" else Folder()
            self._by_inode[event["inode"]] = made
            self._put(event["path"], made)
        elif operation in ("unlink", "rmdir"):
            self._take(event["path"])
        elif operation == "rename":
            parent, name = self._parent(event["path"])
            moved = parent.names.pop(name)
            target, new_name = self._parent(event["to"])
            target.names[new_name] = moved
            for folder in {id(f): f for f in (parent, target)}.values():
                folder.since_flush.append(dict(folder.names))
        elif operation == "fsyncdir":
            folder = self._by_inode.get(event["inode"], self._root)
            assert isinstance(folder, Folder)
            folder.since_flush = [dict(folder.names)]
        else:
            self._apply_to_file(event)

    def _apply_to_file(self, event: dict[str, Any]) -> None:
        file = self._by_inode[event["inode"]]
        assert isinstance(file, File)
        if event["operation"] == "fsync":
            file.flushed = bytes(file.latest)
        elif event["operation"] == "truncate":
            length = event["length"]
            file.latest = file.latest[:length].ljust(length, b"\0")
        elif event["operation"] == "write":
            data, offset = base64.b64decode(event["data"]), event["offset"]
            file.latest.extend(bytes(max(0, offset + len(data) - len(file.latest))))
            file.latest[offset : offset + len(data)] = data
        else:
            raise ValueError(f"no operation {event['operation']!r}")

    def after_failure(self, kept: Kept, choose: random.Random) -> dict[str, bytes | None]:
        """Path -> content of each file, None for a folder."""
        return dict(self._found(self._root, "", kept, choose))

    def _found(
        self, folder: Folder, place: str, kept: Kept, choose: random.Random
    ) -> Iterator[tuple[str, bytes | None]]:
        some = kept is Kept.SOME
        moment = -1 if kept in (Kept.NAMES, Kept.ALL) else 0
        names = choose.choice(folder.since_flush) if some else folder.since_flush[moment]
        for name, entry in sorted(names.items()):
            path = f"{place}/{name}"
            if isinstance(entry, Folder):
                yield path, None
                yield from self._found(entry, path, kept, choose)
            elif kept in (Kept.CONTENT, Kept.ALL) or (some and choose.random() < 0.5):
                yield path, bytes(entry.latest)
            elif entry.flushed is None and some and choose.random() < 0.5:
                yield path, bytes(len(entry.latest))  # its length came to disk before its content
            else:
                yield path, entry.flushed or b""

    def _parent(self, path: str) -> tuple[Folder, str]:
        *folders, name = path.strip("/").split("/")
        found: File | Folder = self._root
        for folder in folders:
            assert isinstance(found, Folder)
            found = found.names[folder]
        assert isinstance(found, Folder)
        return found, name

    def _put(self, path: str, entry: File | Folder) -> None:
        folder, name = self._parent(path)
        folder.names[name] = entry
        folder.since_flush.append(dict(folder.names))

    def _take(self, path: str) -> None:
        folder, name = self._parent(path)
        del folder.names[name]
        folder.since_flush.append(dict(folder.names))


def write_out(found: dict[str, bytes | None], directory: Path) -> None:
    """Make these files and folders under an empty directory."""
    for path, content in found.items():
        place = directory / path.strip("/")
        if content is None:
            place.mkdir()
        else:
            place.write_bytes(content)


def states_after(
    events: Sequence[dict[str, Any]], *, samples: int
) -> Iterator[tuple[int, dict[str, bytes | None]]]:
    """After each number of events, every different state that is looked at: the extremes, and `samples` others."""
    disk, choose = Disk(), random.Random(3)
    seen: set[int] = set()
    for number, event in enumerate(events, start=1):
        disk.apply(event)
        for kept in [*list(Kept)[:-1], *([Kept.SOME] * samples)]:
            found = disk.after_failure(kept, choose)
            # The reports are outside of the disk that fails: the same files before and after one are two cases.
            key = hash((tuple(found.items()), event.get("path") if event["operation"] == "create" else ""))
            if key not in seen:
                seen.add(key)
                yield number, found
