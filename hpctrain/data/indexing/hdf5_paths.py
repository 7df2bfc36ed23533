"""Paths within an HDF5 file, walked link by link: nothing outside the file is ever opened."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpctrain.data.indexing.request import natural
from hpctrain.errors import DataError

if TYPE_CHECKING:
    import h5py

_MAX_SOFT_LINKS = 32


def resolve(file: h5py.File, path: str) -> str:
    """The path of the same object through hard links alone; soft links within the file are followed.

    Raises DataError: no such object (says what there is), or a link that leaves the file.
    """
    import h5py

    todo = [part for part in path.split("/") if part]
    done: list[str] = []
    for _ in range(_MAX_SOFT_LINKS + len(todo)):
        if not todo:
            return "/" + "/".join(done)
        here = file["/" + "/".join(done)]
        name = todo.pop(0)
        link = here.get(name, getlink=True) if isinstance(here, h5py.Group) else None
        if link is None:
            raise DataError(f"{file.filename} has no {path}; {_what_is_in(here, done)}")
        if isinstance(link, h5py.ExternalLink):
            raise DataError(
                f"{path} of {file.filename} is a link to another file, {link.filename}: "
                "index that file itself"
            )
        if isinstance(link, h5py.SoftLink):
            target = [part for part in link.path.split("/") if part and part != "."]
            todo = target + todo
            if link.path.startswith("/"):
                done = []
        else:
            done.append(name)
    raise DataError(f"{path} of {file.filename} is a circle of soft links")


def _what_is_in(here: h5py.Group | h5py.Dataset, done: list[str]) -> str:
    names = list(here)[:9] if hasattr(here, "keys") else []
    place = "/" + "/".join(done)
    more = ", ..." if len(names) > 8 else ""
    return f"{place} holds {', '.join(names[:8])}{more}" if names else f"{place} holds nothing"


def matches(file: h5py.File, parts: tuple[str, ...]) -> dict[tuple[str, ...], str]:
    """Paths that fit `parts`, by what the parts with a `*` stand for, in the order that people count."""
    return dict(sorted(_matches(file, parts, "", ()), key=lambda match: tuple(map(natural, match[0]))))


def _matches(
    file: h5py.File, parts: tuple[str, ...], above: str, key: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    import h5py

    if not parts:
        yield key, above
        return
    head, rest = parts[0], parts[1:]
    if "*" not in head:
        # The plain parts behind the last `*` are looked up, and missed, by whoever asks for the dataset.
        yield from _matches(file, rest, f"{above}/{head}", key)
        return
    group = file[resolve(file, above)] if above else file["/"]
    if not isinstance(group, h5py.Group):
        return
    for name in group:
        if not fnmatch.fnmatchcase(name, head):
            continue
        # A dataset beside the groups is no group.
        if rest and not isinstance(file[resolve(file, f"{above}/{name}")], h5py.Group):
            continue
        yield from _matches(file, rest, f"{above}/{name}", (*key, name))
