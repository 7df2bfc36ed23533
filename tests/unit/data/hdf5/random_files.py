"""Draws valid HDF5 files: layouts, types, filters, fill values, unlimited dimensions, library bounds, user blocks.

Each file has one dataset, /x. All choices follow from a number, so that a file can be made again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t, h5z

from tests.unit.data.hdf5.random_attributes import Said, add_attributes
from tests.unit.data.hdf5.random_types import Drawn, Random, draw

LZF = 32000
# libsz 2.0.1 writes over the end of its buffer if a small chunk becomes larger by compression: also what scale-offset
# and n-bit have made small.
SZIP_ELEMENTS = 64


class DrawnFile(NamedTuple):
    """description: of all choices. member: to be indexed, if the dataset is a table. written: number of writes."""

    description: str
    drawn: Drawn
    said: Said

    @property
    def fields(self) -> str:
        return "x=/x" if self.drawn.member is None else f"x=/x:{self.drawn.member}"


class CannotMakeError(Exception):
    """Raised if HDF5 refuses to make this combination."""


def library_bounds() -> list[Any]:
    """Returns the arguments `libver` that this HDF5 takes."""
    low = [version for version in ("earliest", "v108", "v110", "v112", "v114", "v200") if _is_known(version)]
    pairs = [(a, b) for number, a in enumerate(low) for b in [*low[number:], "latest"] if b != "earliest"]
    return [None, "earliest", "latest", "latest", *pairs]


def _is_known(version: str) -> bool:
    return version in h5py._hl.files.libver_dict


def make_file(path: Path, *, number: int) -> DrawnFile:
    """Writes file `number`. Raises CannotMakeError if HDF5 does not take the combination."""
    random = np.random.default_rng([35, number])
    bounds = library_bounds()
    options: dict[str, Any] = {"libver": bounds[int(random.integers(len(bounds)))]}
    if random.random() < 0.3:
        options["userblock_size"] = int(random.choice([512, 1024, 4096]))
    if random.random() < 0.2 and options["libver"] not in (
        "earliest",
        ("earliest", "v108"),
        ("v108", "v108"),
    ):
        options["fs_strategy"] = str(random.choice(["fsm", "page", "aggregate", "none"]))
    if random.random() < 0.2 and "userblock_size" not in options:
        options |= {"alignment_threshold": 1, "alignment_interval": int(random.choice([8, 64, 4096]))}
    drawn = draw(random)
    try:
        with h5py.File(path, "w", **options) as file:
            if random.random() < 0.3:
                file["before"] = np.arange(int(random.integers(1, 2000)))
            description = _make_dataset(file, drawn, random)
            said = add_attributes(file["x"], drawn, random)
            if random.random() < 0.3:
                for note in range(int(random.integers(1, 12))):
                    file["x"].attrs[f"note {note}"] = np.arange(20)
            file["after"] = np.arange(3000)
        if random.random() < 0.2 and drawn.values is None and not said.mask:
            with h5py.File(path, "a", libver=options["libver"]) as file:
                del file["after"]
                _write(file["x"], drawn, random)
    except (OSError, ValueError, RuntimeError, TypeError, KeyError) as error:
        raise CannotMakeError(f"{drawn.name}: {error}") from error
    return DrawnFile(f"{number}: {drawn.name}; {options}; {description}; {said.texts}", drawn, said)


def _make_dataset(file: h5py.File, drawn: Drawn, random: Random) -> str:
    rank = int(random.choice([0, 1, 1, 2, 2, 2, 3, 3, 4]))
    if drawn.values is not None:
        rank = 1
    shape = tuple(int(size) for size in random.integers(1, [40, 12, 8, 4][: max(1, rank)][-1] + 1, rank))
    if rank and random.random() < 0.01:  # an index of several levels
        shape = (int(random.integers(300, 9000)), *shape[1:2])
    layout = str(random.choice(["chunked"] * 6 + ["contiguous"] * 3 + ["compact"])) if rank else "contiguous"
    plist = h5p.create(h5p.DATASET_CREATE)
    limits: tuple[int, ...] | None = None
    said = f"{layout} {shape}"
    if layout == "chunked":
        limits = tuple(
            [size, size, size + 5, h5s.UNLIMITED, h5s.UNLIMITED][int(random.integers(5))] for size in shape
        )
        chunks = tuple(
            int(random.integers(1, size + (3 if limit == h5s.UNLIMITED else 1)))
            for size, limit in zip(shape, limits, strict=True)
        )
        if random.random() < 0.15:
            chunks = tuple(max(1, size if limit == h5s.UNLIMITED else min(size, limit))
                           for size, limit in zip(shape, limits, strict=True))  # fmt: skip
        plist.set_chunk(chunks)
        said += f" limits {limits} chunks {chunks} filters {_add_filters(plist, drawn, random, chunks)}"
    elif layout == "compact":
        plist.set_layout(h5d.COMPACT)
    said += _fill(plist, drawn, random, layout)
    space = h5s.create_simple(shape, limits) if rank else h5s.create(h5s.SCALAR)
    name = "x" if random.random() < 0.8 else "group/y"
    link = None
    if name != "x":
        link = h5p.create(h5p.LINK_CREATE)
        link.set_create_intermediate_group(True)
    h5d.create(file.id, name.encode(), drawn.kind, space, plist, link)
    if name != "x":
        file["x"] = h5py.SoftLink("/group/y") if random.random() < 0.5 else file[name]
    dataset = file["x"]
    return said + _write(dataset, drawn, random) + _resize(dataset, drawn, random, limits)


def _add_filters(plist: h5p.PropDCID, drawn: Drawn, random: Random, chunks: tuple[int, ...]) -> list[int]:
    if random.random() < 0.4:
        return []
    kind = drawn.kind.get_class()
    codes = []
    if random.random() < 0.4:
        codes.append(h5z.FILTER_SHUFFLE)
    if kind in (h5t.INTEGER, h5t.FLOAT) and random.random() < 0.15:
        codes = [h5z.FILTER_SCALEOFFSET]
    elif kind in (h5t.INTEGER, h5t.FLOAT) and random.random() < 0.1:
        codes = [h5z.FILTER_NBIT]
    if random.random() < 0.6:
        codes.append(h5z.FILTER_DEFLATE)
    elif random.random() < 0.3:
        codes.append(LZF)
    elif (
        drawn.numpy is not None
        and np.prod(chunks) >= SZIP_ELEMENTS
        and not {h5z.FILTER_SCALEOFFSET, h5z.FILTER_NBIT} & set(codes)
        and random.random() < 0.5
    ):
        codes.append(h5z.FILTER_SZIP)
    if random.random() < 0.3:
        codes.insert(int(random.integers(len(codes) + 1)), h5z.FILTER_FLETCHER32)
    is_float = kind == h5t.FLOAT
    return set_filters(plist, codes, random, is_float=is_float, digits=lambda: 3 if is_float else 0)


def set_filters(
    plist: h5p.PropDCID, codes: list[int], random: Random, *, is_float: bool, digits: Callable[[], int]
) -> list[int]:
    """Adds these filters. digits: what scale-offset keeps. Returns the codes."""
    for code in codes:
        if code == h5z.FILTER_DEFLATE:
            plist.set_deflate(int(random.integers(0, 10)))
        elif code == h5z.FILTER_SHUFFLE:
            plist.set_shuffle()
        elif code == h5z.FILTER_FLETCHER32:
            plist.set_fletcher32()
        elif code == h5z.FILTER_SZIP:
            plist.set_szip(h5z.SZIP_NN_OPTION_MASK, int(random.choice([2, 4, 8])))
        elif code == h5z.FILTER_SCALEOFFSET:
            plist.set_scaleoffset(h5z.SO_FLOAT_DSCALE if is_float else h5z.SO_INT, digits())
        else:
            plist.set_filter(code, h5z.FLAG_OPTIONAL)
    return [int(code) for code in codes]


def set_times(plist: h5p.PropDCID, random: Random, *, share: float, layout: str) -> list[str]:
    """Chooses when a dataset is filled and allocated. share: of the datasets for which each is chosen."""
    said = []
    if random.random() < share:
        time = int(random.choice([h5d.FILL_TIME_ALLOC, h5d.FILL_TIME_NEVER, h5d.FILL_TIME_IFSET]))
        plist.set_fill_time(time)
        said.append(f"fill time {time}")
    if random.random() < share and layout in ("chunked", "contiguous"):
        times = [h5d.ALLOC_TIME_EARLY, h5d.ALLOC_TIME_LATE]
        time = int(random.choice([*times, h5d.ALLOC_TIME_INCR] if layout == "chunked" else times))
        plist.set_alloc_time(time)
        said.append(f"allocated {time}")
    return said


def _fill(plist: h5p.PropDCID, drawn: Drawn, random: Random, layout: str) -> str:
    said = []
    if drawn.numpy is not None and random.random() < 0.4:
        value = drawn.elements(1).reshape(-1).view(drawn.numpy.base)[:1]
        if drawn.numpy.subdtype is None:
            plist.set_fill_value(value.reshape(1))
            said.append(f"fill {value[0]}")
    said += set_times(plist, random, share=0.4, layout=layout)
    return "".join(f" {each}" for each in said)


def _write(dataset: h5py.Dataset, drawn: Drawn, random: Random) -> str:
    """Writes nothing, all elements, or some blocks of them."""
    shape = dataset.shape
    if drawn.values is not None:
        if random.random() < 0.9:
            for row, value in enumerate(drawn.values(len(dataset))):
                dataset[row] = value
        return ""
    how = str(random.choice(["all", "all", "all", "some", "some", "nothing"]))
    if how == "nothing" or 0 in shape:
        return " never written"
    for _ in range(1 if how == "all" else int(random.integers(1, 4))):
        begin = tuple(0 if how == "all" else int(random.integers(size)) for size in shape)
        count = tuple(size - b if how == "all" else int(random.integers(1, size - b + 1))
                      for size, b in zip(shape, begin, strict=True))  # fmt: skip
        data = drawn.elements(int(np.prod(count, dtype=int)))
        space = dataset.id.get_space()
        memory = h5s.create_simple(count) if count else h5s.create(h5s.SCALAR)
        if count:
            space.select_hyperslab(begin, count)
        dataset.id.write(memory, space, np.ascontiguousarray(data), drawn.kind)
    return f" {how} written"


def _resize(dataset: h5py.Dataset, drawn: Drawn, random: Random, limits: tuple[int, ...] | None) -> str:
    """Makes the dataset larger or smaller, and perhaps writes again."""
    if limits is None or drawn.values is not None or random.random() < 0.6:
        return ""
    said = ""
    for _ in range(int(random.integers(1, 3))):
        size = tuple(
            int(random.integers(1, extent + 6 if limit == h5s.UNLIMITED else limit + 1))
            for extent, limit in zip(dataset.shape, limits, strict=True)
        )
        dataset.id.set_extent(size)
        said += f" resized {size}"
        if random.random() < 0.5:
            said += _write(dataset, drawn, random)
    return said
