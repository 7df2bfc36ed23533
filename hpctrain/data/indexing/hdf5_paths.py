"""Resolves paths within an HDF5 file link by link, so that no other file is ever opened."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpctrain.data.indexing.request import natural
from hpctrain.errors import DataError

if TYPE_CHECKING:
    import h5py

_MAX_SOFT_LINKS = 32


def resolve(file: h5py.File, path: str) -> str:
    """Returns the path of the same object with soft links resolved.

    Raises DataError if there is no such object, a link leads to another file, or soft links form a cycle.
    """
    import h5py

    todo = [part for part in path.split("/") if part]
    done: list[str] = []
    followed = ""
    for _ in range(_MAX_SOFT_LINKS + len(todo)):
        if not todo:
            return "/" + "/".join(done)
        here = file["/" + "/".join(done)]
        name = todo.pop(0)
        link = here.get(name, getlink=True) if isinstance(here, h5py.Group) else None
        if link is None:
            if followed:
                raise DataError(
                    f"{path} of {file.filename} leads nowhere: {followed}, which does not exist; "
                    f"{_what_is_in(here, done)}"
                )
            raise DataError(f"{file.filename} has no {path}; {_what_is_in(here, done)}")
        if isinstance(link, h5py.ExternalLink):
            target = os.path.join(os.path.dirname(file.filename), link.filename)
            missing = "" if os.path.exists(target) else ", which does not exist here"
            raise DataError(
                f"{path} of {file.filename} is a link to another file, {link.filename}: index that file itself{missing}"
            )
        if isinstance(link, h5py.SoftLink):
            followed = f"/{'/'.join([*done, name])} is a soft link to {link.path}"
            target = [part for part in link.path.split("/") if part and part != "."]
            todo = target + todo
            if link.path.startswith("/"):
                done = []
        else:
            done.append(name)
    raise DataError(f"{path} of {file.filename} is a cycle of soft links")


def _what_is_in(here: h5py.Group | h5py.Dataset, done: list[str]) -> str:
    names = list(here)[:9] if hasattr(here, "keys") else []
    place = "/" + "/".join(done)
    more = ", ..." if len(names) > 8 else ""
    return f"{place} holds {', '.join(names[:8])}{more}" if names else f"{place} holds nothing"


def matches(file: h5py.File, parts: tuple[str, ...]) -> dict[tuple[str, ...], str]:
    """Returns the paths that match `parts`, keyed by the names that its wildcards match, in natural order."""
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
        # Parts without a wildcard are not checked here: opening the dataset fails if they do not exist.
        yield from _matches(file, rest, f"{above}/{head}", key)
        return
    group = file[resolve(file, above)] if above else file["/"]
    if not isinstance(group, h5py.Group):
        return
    for name in group:
        if not fnmatch.fnmatchcase(name, head):
            continue
        # Skip datasets that are next to the groups.
        if rest and not isinstance(file[resolve(file, f"{above}/{name}")], h5py.Group):
            continue
        yield from _matches(file, rest, f"{above}/{name}", (*key, name))
