"""Parses the request for an index: fields by their paths in the HDF5 files, what a sample is, and the files."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hpctrain.data.indexing.foreign_files import format_of
from hpctrain.errors import DataError, UsageError

_FIELD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SUFFIXES = (".h5", ".hdf5", ".he5", ".nc")


class SampleIs(str, Enum):
    """Unit of a sample: a row of each dataset, a file, or a group of a file."""

    ROWS = "rows"
    FILE = "file"
    GROUPS = "groups"


class Decode(str, Enum):
    """How stored values become those of samples. CF: as attributes and masks say. RAW: as they are."""

    CF = "cf"
    RAW = "raw"


@dataclass(frozen=True, kw_only=True)
class FieldRequest:
    """Field `name` is at `path` of each file; `*` matches any part of a name, as in a shell.

    member: member of a compound type. padded: the first dimension may differ between samples. decode: None: as stored,
    with a note where the file says that the numbers mean something else. missing: what missing values become with CF:
    "nan", a number, or "mask": 0, with True in a field `NAME.mask`. "auto": NaN; but integers of which only records
    that were never written can be missing, and of which none was seen, stay integers: reading such a record is
    an error.
    """

    name: str
    path: str
    member: str | None = None
    padded: bool = False
    decode: Decode | None = None
    missing: str | int | float = "auto"

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(part for part in self.path.split("/") if part)

    @property
    def has_wildcard(self) -> bool:
        return "*" in self.path


def parse_missing(text: str | float) -> str | int | float:
    """Parses what missing values become: auto, nan, mask or a number. Raises UsageError."""
    text = str(text)
    if text.lower() in ("auto", "nan", "mask"):
        return text.lower()
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise UsageError(f"missing values become nan, mask or a number, not {text!r}")


def parse_decode(text: Decode | str) -> Decode:
    """Parses cf or raw. Raises UsageError."""
    try:
        return Decode(text)
    except ValueError:
        raise UsageError(f"decode is cf or raw, not {text!r}") from None


def _split(text: str, separator: str) -> list[str]:
    """Splits at `separator` where no backslash precedes it. Keeps the backslashes."""
    parts, current, is_escaped = [], "", False
    for character in text:
        if character == separator and not is_escaped:
            parts.append(current)
            current = ""
            continue
        current += character
        is_escaped = character == "\\" and not is_escaped
    return [*parts, current]


def unescaped(text: str) -> str:
    """Returns `text` without the backslashes that precede another character."""
    return re.sub(r"\\(.)", r"\1", text)


def escaped(text: str) -> str:
    """Returns a path or the name of a member as it is written in --fields."""
    return re.sub(r"([\\:,])", r"\\\1", text)


ESCAPES = r"a ':' or ',' that belongs to a name is written '\:' or '\,'"


def parse_field_paths(
    text: str,
    *,
    padded: Sequence[str] = (),
    decode: Decode | None = None,
    missing: str | int | float = "auto",
) -> tuple[FieldRequest, ...]:
    r"""Parses `x=/images,y=/table:label,t:cf=/t2m,m:cf:mask=/sst`; `\:` and `\,` are characters of a name.

    padded: names of fields to pad. decode, missing: of fields that do not say. Raises UsageError.
    """
    requests: list[FieldRequest] = []
    for part in filter(None, (part.strip() for part in _split(text, ","))):
        left, equals, place = part.partition("=")
        name, *options = left.split(":")
        path, *members = _split(place, ":")
        if not equals or not path.strip("/") or len(members) > 1 or members == [""]:
            raise UsageError(
                f"--fields {part!r}: NAME=/PATH or NAME=/PATH:MEMBER is expected, as in x=/images,y=/labels "
                f"({ESCAPES})"
            )
        if not _FIELD_NAME.fullmatch(name):
            raise UsageError(f"--fields {part!r}: a name has letters, digits, '_', '.' and '-' ({ESCAPES})")
        if len(options) > 2:
            raise UsageError(f"--fields {part!r}: NAME:cf=, NAME:cf:MISSING= or NAME:raw= is expected")
        requests.append(
            FieldRequest(
                name=name,
                path="/" + unescaped(path).strip("/"),
                member=unescaped(members[0]) if members else None,
                padded=name in padded,
                decode=parse_decode(options[0]) if options else decode,
                missing=parse_missing(options[1]) if len(options) > 1 else missing,
            )
        )
    names = [request.name for request in requests]
    if not names:
        raise UsageError("--fields is empty: name the datasets of the fields, as in x=/images,y=/labels")
    if len(set(names)) != len(names):
        raise UsageError(f"--fields {text!r} names a field twice")
    unknown = [name for name in padded if name not in names]
    if unknown:
        raise UsageError(
            f"--pad {','.join(unknown)}: there is no such field; the fields are {', '.join(names)}"
        )
    return tuple(requests)


def sample_is(requests: Sequence[FieldRequest], *, asked: SampleIs | None) -> SampleIs:
    """Returns `asked` if given; else GROUPS if the paths have a `*`, else ROWS. Raises UsageError if they conflict."""
    wild = [request.has_wildcard for request in requests]
    if any(wild) != all(wild):
        raise UsageError("either all paths of --fields have a '*' for the groups, or none")
    if asked is SampleIs.GROUPS and not any(wild):
        raise UsageError("--samples groups needs paths with a '*', as in x=/*/image,y=/*/label")
    if asked is SampleIs.FILE and any(wild):
        raise UsageError("--samples file means one sample per file: paths with '*' need --samples groups")
    if asked is not None:
        return asked
    return SampleIs.GROUPS if any(wild) else SampleIs.ROWS


def find_files(patterns: Sequence[str]) -> tuple[str, ...]:
    """Returns the absolute paths of all files that match names, globs (also `**`) and directories, without repeats.

    Sorted by name, numbers by value: f2 before f10. Raises DataError if a pattern matches no file.
    """
    found: set[str] = set()
    for pattern in patterns:
        if os.path.isdir(pattern):
            names = [name for name in os.listdir(pattern) if name.endswith(_SUFFIXES)]
            matches = [os.path.join(pattern, name) for name in names if not name.startswith(".")]
        elif os.path.exists(pattern):
            matches = [pattern]
        else:
            matches = [match for match in glob.glob(pattern, recursive=True) if os.path.isfile(match)]
        if not matches and os.path.isdir(pattern) and format_of(pattern) is not None:
            raise DataError(f"{pattern} is {format_of(pattern)}")
        if not matches:
            raise DataError(f"no files to index: nothing matches {pattern!r}")
        found.update(os.path.abspath(match) for match in matches)
    return tuple(sorted(found, key=natural))


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Returns a sort key with which numbers within names are sorted by value."""
    parts = re.split(r"(\d+)", text)
    return tuple((1, int(part), part) if part.isdigit() else (0, 0, part) for part in parts)
