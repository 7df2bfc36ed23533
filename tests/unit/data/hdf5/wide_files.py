"""Draws valid HDF5 files with more than `random_files` has: sizes of addresses, shared and committed messages, dense
attributes, files reopened with other library bounds, external and virtual storage, filters in any order, empty
dataspaces, chunks of one element, borders without filters, types within types.

Each file has one dataset, /x. All choices follow from a number. HDF5 itself may crash on a few: to be made in a process
of its own.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5f, h5p, h5s, h5t, h5z

from tests.unit.data.hdf5.random_attributes import Said, add_attributes
from tests.unit.data.hdf5.random_files import (
    LZF,
    SZIP_ELEMENTS,
    CannotMakeError,
    DrawnFile,
    set_filters,
    set_times,
)
from tests.unit.data.hdf5.random_types import Random
from tests.unit.data.hdf5.wide_types import LIBRARY, Wide, draw_wide

_BOUNDS = (
    ("earliest", h5f.LIBVER_EARLIEST), ("v108", getattr(h5f, "LIBVER_V18", None)),
    ("v110", getattr(h5f, "LIBVER_V110", None)), ("latest", h5f.LIBVER_LATEST),
)  # fmt: skip


def make_wide_file(path: Path, *, number: int) -> DrawnFile:
    """Writes file `number`, and perhaps PATH.raw and PATH.source, in which its data are.

    Raises CannotMakeError if HDF5 does not take the combination.
    """
    random = np.random.default_rng([36, number])
    wide = draw_wide(random)
    said: list[str] = []
    try:
        file = _new_file(path, random, said)
        with file:
            if random.random() < 0.3:
                file["before"] = np.arange(int(random.integers(1, 2000)))
        with _reopened(path, random, said) as file:
            dataset = _make_dataset(file, wide, random, said)
            drawn = wide.drawn
            meant = Said({})
            if dataset is not None and dataset.shape and 0 not in dataset.shape:
                meant = add_attributes(dataset, drawn, random)
                _more_attributes(dataset, random)
            elif dataset is not None:
                _more_attributes(dataset, random)
            file["after"] = np.arange(3000)
        if random.random() < 0.3:
            with _reopened(path, random, said) as file:
                del file["after"]
                dataset = file["x"]
                if not meant.mask and dataset.shape and _is_written_here(dataset):
                    _resize(dataset, wide, random, said)
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, OverflowError) as error:
        raise CannotMakeError(f"{wide.drawn.name}: {error}") from error
    return DrawnFile(f"wide {number}: {wide.drawn.name}; {'; '.join(said)}; {meant.texts}", wide.drawn, meant)


def _new_file(path: Path, random: Random, said: list[str]) -> h5py.File:
    creation, access = h5p.create(h5p.FILE_CREATE), _access(random, said)
    if random.random() < 0.4:
        sizes = [(4, 4), (8, 4), (4, 8)][int(random.integers(3))]
        creation.set_sizes(*sizes)
        said.append(f"addresses and lengths of {sizes}")
    if random.random() < 0.2:
        creation.set_userblock(int(random.choice([512, 2048])))
        said.append("user block")
    if random.random() < 0.2:
        LIBRARY.H5Pset_istore_k(ctypes.c_int64(creation.id), ctypes.c_uint(int(random.integers(1, 40))))
        LIBRARY.H5Pset_sym_k(ctypes.c_int64(creation.id), ctypes.c_uint(2), ctypes.c_uint(3))
        said.append("small B-trees")
    if random.random() < 0.2:
        identity = ctypes.c_int64(creation.id)
        LIBRARY.H5Pset_shared_mesg_nindexes(identity, ctypes.c_uint(1))
        # dataspaces, types, fill values, filters and attributes, of any size
        flags, least = (
            ctypes.c_uint(0x02 | 0x08 | 0x20 | 0x800 | 0x1000),
            ctypes.c_uint(int(random.choice([1, 40]))),
        )
        LIBRARY.H5Pset_shared_mesg_index(identity, ctypes.c_uint(0), flags, least)
        said.append("shared messages")
    if random.random() < 0.2:
        creation.set_link_creation_order(h5p.CRT_ORDER_TRACKED | h5p.CRT_ORDER_INDEXED)
    return h5py.File(h5f.create(str(path).encode(), h5f.ACC_TRUNC, creation, access))


def _access(random: Random, said: list[str]) -> h5p.PropFAID:
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    known = [(name, value) for name, value in _BOUNDS if value is not None]
    low = int(random.integers(len(known)))
    high = len(known) - 1 if random.random() < 0.7 else int(random.integers(max(1, low), len(known)))
    access.set_libver_bounds(known[low][1], known[high][1])
    said.append(f"{known[low][0]} to {known[high][0]}")
    if random.random() < 0.2:
        access.set_alignment(1, int(random.choice([8, 512])))
    if random.random() < 0.2:
        access.set_meta_block_size(int(random.choice([1, 256])))
    return access


def _reopened(path: Path, random: Random, said: list[str]) -> h5py.File:
    return h5py.File(h5f.open(str(path).encode(), h5f.ACC_RDWR, _access(random, said)))


def _make_dataset(file: h5py.File, wide: Wide, random: Random, said: list[str]) -> h5py.Dataset | None:
    kind = wide.drawn.kind
    if random.random() < 0.2:
        kind = kind.copy()
        kind.commit(file.id, b"kind")
        said.append("committed type")
    rank = int(random.choice([0, 1, 1, 2, 2, 2, 3, 3, 4]))
    if wide.drawn.values is not None or wide.through_h5py:
        rank = 1
    shape = tuple(int(size) for size in random.integers(1, [40, 12, 8, 4][: max(1, rank)][-1] + 1, rank))
    if rank and random.random() < 0.04:
        shape = (*shape[:-1], 0)
    layouts = ["chunked"] * 7 + ["contiguous"] * 3 + ["compact"] + ["external"] + ["virtual"]
    layout = str(random.choice(layouts)) if rank else "contiguous"
    if random.random() < 0.02:
        h5d.create(file.id, b"x", kind, h5s.create(h5s.NULL))
        said.append("no dataspace")
        return file["x"]
    if layout in ("external", "virtual") and (wide.drawn.values is not None or wide.through_h5py):
        layout = "chunked"
    plist = h5p.create(h5p.DATASET_CREATE)
    limits: tuple[int, ...] | None = None
    said.append(f"{layout} {shape}")
    if layout == "chunked":
        limits = tuple(
            [size or 1, size or 1, size + 5, h5s.UNLIMITED, h5s.UNLIMITED][int(random.integers(5))]
            for size in shape
        )
        chunks = tuple(
            int(random.integers(1, max(1, size) + (3 if limit == h5s.UNLIMITED else 1)))
            for size, limit in zip(shape, limits, strict=True)
        )
        if random.random() < 0.15 and np.prod(shape) < 500:
            chunks = (1,) * rank
        plist.set_chunk(chunks)
        if random.random() < 0.15:
            LIBRARY.H5Pset_chunk_opts(ctypes.c_int64(plist.id), ctypes.c_uint(2))
            said.append("borders without filters")
        said.append(f"limits {limits} chunks {chunks} filters {_add_filters(plist, wide, random, chunks)}")
    elif layout == "compact":
        plist.set_layout(h5d.COMPACT)
    elif layout == "external":
        num_bytes = int(np.prod(shape)) * kind.get_size()
        plist.set_external(f"{file.filename}.raw".encode(), int(random.choice([0, 7])), max(1, num_bytes))
    elif layout == "virtual":
        return _make_virtual(file, kind, shape, wide, random)
    _fill(plist, wide, random, layout, said)
    if random.random() < 0.3:
        plist.set_attr_phase_change(*[(0, 0), (2, 1), (8, 6)][int(random.integers(3))])
    if random.random() < 0.2:
        plist.set_attr_creation_order(h5p.CRT_ORDER_TRACKED | h5p.CRT_ORDER_INDEXED)
    plist.set_obj_track_times(bool(random.random() < 0.5))
    space = h5s.create_simple(shape, limits) if rank else h5s.create(h5s.SCALAR)
    h5d.create(file.id, b"x", kind, space, plist)
    dataset = file["x"]
    _write(dataset, wide, random, said)
    if limits is not None and random.random() < 0.4:
        _resize(dataset, wide, random, said)
    return dataset


def _make_virtual(
    file: h5py.File, kind: h5t.TypeID, shape: tuple[int, ...], wide: Wide, random: Random
) -> h5py.Dataset:
    inside = random.random() < 0.5
    source = file if inside else h5py.File(f"{file.filename}.source", "w")
    h5d.create(source.id, b"data", kind if inside else wide.drawn.kind, h5s.create_simple(shape))
    _write(source["data"], wide, random, [])
    plist, space = h5p.create(h5p.DATASET_CREATE), h5s.create_simple(shape)
    if 0 not in shape:
        name = b"." if inside else source.filename.encode()
        plist.set_virtual(space, name, b"data", h5s.create_simple(shape))
    plist.set_layout(h5d.VIRTUAL)
    h5d.create(file.id, b"x", kind, space, plist)
    if not inside:
        source.close()
    return file["x"]


def _is_written_here(dataset: h5py.Dataset) -> bool:
    plist = dataset.id.get_create_plist()
    return plist.get_layout() == h5d.CHUNKED and dataset.chunks is not None


def _add_filters(plist: h5p.PropDCID, wide: Wide, random: Random, chunks: tuple[int, ...]) -> list[int]:
    """Adds up to four filters in any order, optional or not."""
    if random.random() < 0.35:
        return []
    drawn = wide.drawn
    kind = drawn.kind.get_class()
    choice = [h5z.FILTER_SHUFFLE, h5z.FILTER_DEFLATE, h5z.FILTER_FLETCHER32, LZF]
    if drawn.values is None and not wide.through_h5py:
        choice.append(h5z.FILTER_NBIT)
    codes = [int(code) for code in random.permutation(choice)[: int(random.integers(1, 5))]]
    if h5z.FILTER_NBIT in codes:
        # Behind a filter that changes the size, n-bit writes over the end of its buffer (HDF5 1.10.8).
        codes = [h5z.FILTER_NBIT, *(code for code in codes if code != h5z.FILTER_NBIT)]
        if random.random() < 0.1:
            codes = [h5z.FILTER_SHUFFLE, h5z.FILTER_NBIT]
    if kind in (h5t.INTEGER, h5t.FLOAT) and random.random() < 0.15:
        codes = [h5z.FILTER_SCALEOFFSET, *(code for code in codes if code != h5z.FILTER_NBIT)]
    elif drawn.numpy is not None and np.prod(chunks) >= SZIP_ELEMENTS and random.random() < 0.2:
        codes = [h5z.FILTER_SZIP, *(code for code in codes if code != h5z.FILTER_NBIT)]
    is_float = kind == h5t.FLOAT
    return set_filters(
        plist, codes, random, is_float=is_float,
        digits=lambda: int(random.integers(0, 4)) if is_float else int(random.choice([0, 0, 5])),
    )  # fmt: skip


def _fill(plist: h5p.PropDCID, wide: Wide, random: Random, layout: str, said: list[str]) -> None:
    drawn = wide.drawn
    if drawn.values is None and not wide.through_h5py and random.random() < 0.5:
        value = np.ascontiguousarray(drawn.elements(1)).tobytes()
        LIBRARY.H5Pset_fill_value(ctypes.c_int64(plist.id), ctypes.c_int64(drawn.kind.id), value)
        said.append(f"fill {value[:8].hex()}")
    said += set_times(plist, random, share=0.5, layout=layout)


def _more_attributes(dataset: h5py.Dataset, random: Random) -> None:
    """Adds up to 40 attributes, some of which are removed again."""
    count = int(random.choice([0, 0, 1, 7, 9, 40]))
    for number in range(count):
        dataset.attrs[f"note {number}"] = np.arange(int(random.integers(1, 60)))
    for number in range(0, count, 3):
        if random.random() < 0.5:
            del dataset.attrs[f"note {number}"]


def _write(dataset: h5py.Dataset, wide: Wide, random: Random, said: list[str]) -> None:
    """Writes nothing, all elements, or some blocks of them."""
    shape, drawn = dataset.shape, wide.drawn
    how = str(random.choice(["all", "all", "all", "some", "some", "nothing"]))
    said.append(f"{how} written")
    if how == "nothing" or 0 in shape:
        return
    if drawn.values is not None:
        if len(drawn.values(1)):
            for row, value in enumerate(drawn.values(len(dataset))):
                dataset[row] = value
        return
    for _ in range(1 if how == "all" else int(random.integers(1, 4))):
        begin = tuple(0 if how == "all" else int(random.integers(size)) for size in shape)
        count = tuple(size - b if how == "all" else int(random.integers(1, size - b + 1))
                      for size, b in zip(shape, begin, strict=True))  # fmt: skip
        elements = int(np.prod(count, dtype=int))
        if wide.memory is not None:
            space = dataset.id.get_space()
            memory = h5s.create_simple(count) if count else h5s.create(h5s.SCALAR)
            if count:
                space.select_hyperslab(begin, count)
            dataset.id.write(memory, space, np.ascontiguousarray(drawn.elements(elements)), wide.memory)
        for member, values in wide.through_h5py.items():
            one = dataset.id.get_type().get_member_type(int(member[1:]))
            for row, value in enumerate(values(count[0])):
                _write_member(dataset, member, one, begin[0] + row, value)


def _write_member(dataset: h5py.Dataset, member: str, kind: h5t.TypeID, row: int, value: Any) -> None:
    """Writes one member of one row."""
    data = np.empty(1, dtype=[(member, kind.dtype)])
    data[member][0] = value
    space = dataset.id.get_space()
    space.select_hyperslab((row,), (1,))
    dataset.id.write(h5s.create_simple((1,)), space, data, h5t.py_create(data.dtype))


def _is_unlimited(limit: int | None) -> bool:
    """HDF5 1.10.8 returns 2^32 - 1 for an unlimited dimension in a file with lengths of 4 bytes."""
    return limit is None or limit > 1 << 20


def _resize(dataset: h5py.Dataset, wide: Wide, random: Random, said: list[str]) -> None:
    """Makes the dataset larger or smaller, and perhaps writes again."""
    # HDF5 1.10.8 may crash when it changes the extent of a dataset whose border has no filters.
    if dataset.maxshape == dataset.shape or "borders without filters" in said:
        return
    for _ in range(int(random.integers(1, 3))):
        size = tuple(
            int(random.integers(1, extent + 6 if _is_unlimited(limit) else limit + 1))
            for extent, limit in zip(dataset.shape, dataset.maxshape, strict=True)
        )
        dataset.id.set_extent(size)
        said.append(f"resized {size}")
        if random.random() < 0.5 and wide.drawn.values is None:
            _write(dataset, wide, random, said)
