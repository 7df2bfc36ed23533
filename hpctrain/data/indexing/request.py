"""Parses the request for an index: which datasets of the HDF5 files are fields, what a sample is, and which files."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from hpctrain.errors import DataError, UsageError

if TYPE_CHECKING:
    import h5py

# Names what HDF5 cannot read: a file of another format, or written by a newer HDF5; says how to convert it.


_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"CDF\x01", "a netCDF-3 file (classic format), not HDF5: convert it with nccopy -k nc4 FILE NEW"),
    (b"CDF\x02", "a netCDF-3 file (64-bit offsets), not HDF5: convert it with nccopy -k nc4 FILE NEW"),
    (b"CDF\x05", "a netCDF-3 file (CDF-5), not HDF5: convert it with nccopy -k nc4 FILE NEW"),
    (b"ADIOS-BP", "a part of an ADIOS2 BP file, not HDF5: write it with ADIOS2's HDF5 engine"),
    (b"\x0e\x03\x13\x01", "an HDF4 file, not HDF5: convert it with h4toh5 FILE NEW"),
    (b"MATLAB 5.0 MAT-file", "a MATLAB file before version 7.3, not HDF5: save it with save(FILE, '-v7.3')"),
    (b"\x93NUMPY", "a numpy file, not HDF5: pack it with hpctrain data pack"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the file itself: run git lfs pull"),
    (b"\x1f\x8b", "compressed by gzip as a whole: uncompress it with gunzip"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd as a whole: uncompress it with unzstd"),
    (b"PK\x03\x04", "a zip archive (as numpy's .npz), not HDF5"),
    (b"PAR1", "a Parquet file, not HDF5"),
    (b"GRIB", "a GRIB file, not HDF5"),
    (b"SIMPLE  =", "a FITS file, not HDF5"),
)
# Directories that are one dataset: a file in them, and what they are.
_MARKERS: tuple[tuple[str, str], ...] = (
    ("md.idx", "an ADIOS2 BP directory: write the data with ADIOS2's HDF5 engine"),
    (".zgroup", "a Zarr directory: write the data as HDF5"),
    (".zarray", "a Zarr directory: write the data as HDF5"),
    ("zarr.json", "a Zarr directory: write the data as HDF5"),
)
# HDF5's message if the version of an object's header, layout, datatype or superblock is unknown to it
_UNKNOWN_VERSION = re.compile(r"bad (\w+ )*version number|version number too|unknown (datatype )?class")
# h5repack's number of the newest format that each version of HDF5 reads
_FORMATS = {(1, 8): 1, (1, 10): 2, (1, 12): 3, (1, 14): 4}


def format_of(path: str) -> str | None:
    """Returns in words the format of a file or directory that is not HDF5, and how to convert it.

    Returns None if the format is unknown.
    """
    if os.path.isdir(path):
        return next((what for name, what in _MARKERS if os.path.exists(os.path.join(path, name))), None)
    try:
        with open(path, "rb") as file:
            start = file.read(32)
    except OSError:
        return None
    if not start:
        return "empty: it has no bytes"
    found = next((what for magic, what in _MAGIC if start.startswith(magic)), None)
    if found is None and path.endswith(".bp"):
        return "an ADIOS2 BP file, not HDF5: write it with ADIOS2's HDF5 engine"
    return found


def newer_library(error: object) -> str | None:
    """Returns an explanation for the user if `error`, raised by HDF5, means that a newer HDF5 wrote the file.

    Returns None for other errors.
    """
    import h5py

    text = str(error).strip("'\"")
    if _UNKNOWN_VERSION.search(text) is None:
        return None
    number = h5py.version.hdf5_version
    high = _FORMATS.get(h5py.version.hdf5_version_tuple[:2], 0)
    name = {1: "v108", 2: "v110", 3: "v112", 4: "v114"}.get(high, "earliest")
    again = (
        "with a type that this one has (a complex number as two floats)"
        if "datatype" in text
        else f"with h5repack --low=0 --high={high} FILE NEW of the newer one, or in Python with "
        f'libver=("earliest", "{name}")'
    )
    return (
        f"was written by a newer HDF5 than this one ({number}), which says: {text}. Write it again {again}; or install "
        "an h5py with the newer HDF5"
    )


# Parses the request for an index.


_FIELD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SUFFIXES = (".h5", ".hdf5", ".he5", ".nc")


class SampleIs(str, Enum):
    """What one sample consists of.

    ROWS: One row of each requested HDF5 dataset.
    FILE: The whole of each requested HDF5 dataset in one file.
    GROUPS: The whole of each requested HDF5 dataset in one group of a file.
    """

    ROWS = "rows"
    FILE = "file"
    GROUPS = "groups"


class Decode(str, Enum):
    """How stored values become the values of samples.

    CF: By scale, offset, missing values and masks, as the attributes in the file state by the CF conventions.
    RAW: Unchanged.
    """

    CF = "cf"
    RAW = "raw"


@dataclass(frozen=True, kw_only=True)
class FieldRequest:
    """States which datasets of the files become a field, and how their values are read.

    Attributes:
        name: Name of the field.
        path: Path of the HDF5 dataset in each file. `*` matches any part of a name, as in a shell.
        member: Name of the member, if the dataset is of a compound type; else None.
        padded: True if the first dimension may differ between samples. Samples are then padded with zeros.
        decode: CF or RAW. None: the same as RAW, but with a note if the file states that the stored numbers are not
            the values.
        missing: How missing values are represented with CF. "nan": as NaN. A number: as that number. "mask": as 0, and
            as True in an additional field `NAME.mask`. "auto": as NaN, except for integer fields in which values can be
            missing only in records that were never written, and no such record was found. These fields stay integers,
            and reading such a record is an error.
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
    """Returns how missing values are represented, from a text: auto, nan, mask or a number.

    Raises UsageError for any other text.
    """
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
    """Returns the decoding with the given name, cf or raw. Raises UsageError for any other name."""
    try:
        return Decode(text)
    except ValueError:
        raise UsageError(f"decode must be cf or raw, not {text!r}") from None


def _split(text: str, separator: str) -> list[str]:
    """Splits a text at each `separator` that does not follow a backslash. The backslashes are kept."""
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
    """Returns `text` without the backslashes that escape characters. Of two backslashes in a row one is kept."""
    return re.sub(r"\\(.)", r"\1", text)


def escaped(text: str) -> str:
    """Returns a path or the name of a member in the form for --fields: with a backslash before `:`, `,` and `\\`."""
    return re.sub(r"([\\:,])", r"\\\1", text)


ESCAPES = r"a ':' or ',' that belongs to a name is written '\:' or '\,'"


def parse_field_paths(
    text: str,
    *,
    padded: Sequence[str] = (),
    decode: Decode | None = None,
    missing: str | int | float = "auto",
) -> tuple[FieldRequest, ...]:
    r"""Parses a list of fields such as `x=/images,y=/table:label,t:cf=/t2m,m:cf:mask=/sst`.

    A `:` or `,` that belongs to a name is written `\:` or `\,`. `padded` contains the names of the fields to pad.
    `decode` and `missing` apply to fields for which `text` does not state them. Raises UsageError if `text` is not
    valid.
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
    """Returns what one sample consists of: `asked` if it is given, else GROUPS if the paths have a `*`, else ROWS.

    Raises UsageError if the paths do not fit `asked`, or if only some of them have a `*`.
    """
    wild = [request.has_wildcard for request in requests]
    if any(wild) != all(wild):
        raise UsageError(
            "either all paths of --fields have a '*' for the groups, or none: add it to the others, or leave it out"
        )
    if asked is SampleIs.GROUPS and not any(wild):
        raise UsageError("--samples groups needs paths with a '*', as in x=/*/image,y=/*/label")
    if asked is SampleIs.FILE and any(wild):
        raise UsageError("--samples file means one sample per file: paths with '*' need --samples groups")
    if asked is not None:
        return asked
    return SampleIs.GROUPS if any(wild) else SampleIs.ROWS


def find_files(patterns: Sequence[str]) -> tuple[str, ...]:
    """Returns the absolute paths of all files that match the patterns, without repeats.

    A pattern is a file name, a glob (also with `**`), or a directory. The paths are sorted by name, and numbers in
    names by their value: f2 comes before f10. Raises DataError if a pattern matches no file.
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
    """Returns a key for sorting names, by which numbers in the names are sorted by their value."""
    parts = re.split(r"(\d+)", text)
    return tuple((1, int(part), part) if part.isdigit() else (0, 0, part) for part in parts)


# Resolves paths within an HDF5 file link by link, so that no other file is ever opened.


_MAX_SOFT_LINKS = 32


def resolve(file: h5py.File, path: str) -> str:
    """Returns the path of the object at `path` without soft links.

    Raises DataError if there is no object at `path`, if a link leads to another file, or if soft links form a cycle.
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


def matching_paths(file: h5py.File, parts: tuple[str, ...]) -> dict[tuple[str, ...], str]:
    """Returns the paths in the file that match a path with wildcards, sorted with numbers by their value.

    `parts` are the components of the path, between slashes. The keys of the result are the names that the wildcards
    match.
    """
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
