"""Sources that consist of files with arrays or images: .npy and .npz files, folders of images."""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from hpctrain.data.format.manifest import FieldSpec
from hpctrain.data.sources.row_source import ArrayRows, SampleRows, field_spec, files_below, source_identity
from hpctrain.errors import DataError, UsageError

# Numpy files, .npz and .npy: one array per field, or one file per sample.


_ARRAY_SUFFIXES = frozenset({".npy", ".npz"})
_HELD_FILES = 4


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Returns the arrays of an .npz file by name. Raises DataError if reading fails, or for pickled objects."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise DataError(f"the source {path} does not exist") from None
    except Exception as error:  # zip, zlib and numpy raise different errors for a damaged file
        raise DataError(f"the source {path} cannot be read as .npz without pickle: {error}") from error


def map_npy(path: Path) -> NDArray[Any]:
    """Returns a memory map of an .npy file. Raises DataError if reading fails, or for pickled objects."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"the source {path} does not exist") from None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"the source {path} cannot be read as .npy without pickle: {error}") from error
    return array


def npz_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Returns the arrays of an .npz file by name, each with one entry per sample.

    Raises DataError if the first dimensions of the arrays differ.
    """
    fields = read_npz(path)
    if any(array.ndim == 0 for array in fields.values()) or not fields:
        raise DataError(
            f"the source {path} must contain arrays of equal first dimension, one entry per sample"
        )
    lengths = {name: len(array) for name, array in fields.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"the arrays of {path} differ in their number of samples: {lengths}")
    return fields


def npy_file(path: Path) -> SampleRows:
    """Opens an .npy file as a source of samples. The rows of its array are the samples.

    The samples have one field, with the name of the file.
    """
    return ArrayRows(arrays={_field_name(path): map_npy(path)}, identity=source_identity([path]))


def array_directory(root: Path) -> SampleRows:
    """Opens a directory of .npy files, one per field, or of .npz files with samples of all fields, as a source.

    Raises DataError if the directory contains both kinds, or neither.
    """
    files = files_below(root, suffixes=_ARRAY_SUFFIXES)
    if all(path.suffix.lower() == ".npy" for path in files):
        arrays = {_field_name(path): map_npy(path) for path in files}
        if len(arrays) < len(files):
            raise DataError(
                f"two files below {root} have the same name, so both would become the same field: rename one"
            )
        return ArrayRows(arrays=arrays, identity=source_identity(files))
    if all(path.suffix.lower() == ".npz" for path in files):
        return ArchiveRows(files)
    raise DataError(
        f"{root} holds .npy and .npz files: only .npy files (one per field) or only .npz files (samples) can be packed"
    )


class ArchiveRows:
    """Samples in .npz files, one file after another. The 4 files that were used last are kept in memory.

    Raises DataError if the files have different fields, or no samples.
    """

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._held: OrderedDict[int, dict[str, NDArray[Any]]] = OrderedDict()
        self._lock = threading.Lock()
        lengths = []
        for number, path in enumerate(files):
            arrays = npz_arrays(path)
            lengths.append(len(next(iter(arrays.values()))))
            found = {
                name: field_spec(name, dtype=array.dtype, shape=array.shape[1:])
                for name, array in arrays.items()
            }
            if number == 0:
                self._fields = found
            elif found != self._fields:
                raise DataError(
                    f"the arrays of {path} and {files[0]} differ: {_differing(found, self._fields)}"
                )
        self._starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        if not self._starts[-1]:
            raise DataError(f"the arrays of {files[0].parent} hold no samples: there is nothing to pack")

    @property
    def num_samples(self) -> int:
        return int(self._starts[-1])

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        return self._fields

    @property
    def identity(self) -> JsonValue:
        return source_identity(self._files)

    def read(self, positions: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        out = {n: np.empty((len(positions), *spec.shape), spec.dtype) for n, spec in self._fields.items()}
        file_of = np.searchsorted(self._starts, positions, side="right") - 1
        for number in np.unique(file_of):
            places = np.flatnonzero(file_of == number)
            arrays = self._arrays(int(number))
            for name, array in out.items():
                array[places] = arrays[name][positions[places] - self._starts[number]]
        return out

    def _arrays(self, number: int) -> dict[str, NDArray[Any]]:
        with self._lock:
            if number not in self._held:
                self._held[number] = npz_arrays(self._files[number])
                if len(self._held) > _HELD_FILES:
                    self._held.popitem(last=False)
            self._held.move_to_end(number)
            return self._held[number]


class FileRows:
    """Samples in .npy or .npz files, one file per sample, sorted by name. The field of an .npy file is called `x`.

    If the files are in folders, the folders are the classes, and the field `label` is the class index.
    """

    def __init__(self, root: Path) -> None:
        self._files = files_below(root, suffixes=_ARRAY_SUFFIXES)
        self._labels, self._classes = class_folders(root, self._files)

    @property
    def num_samples(self) -> int:
        return len(self._files)

    @cached_property
    def fields(self) -> Mapping[str, FieldSpec]:
        found = {
            name: field_spec(name, dtype=array.dtype, shape=array.shape)
            for name, array in _sample(self._files[0]).items()
        }
        if self._labels is not None:
            if "label" in found:
                raise DataError(
                    f"{self._files[0]} has an array named 'label', which is the name of the field made from the "
                    "folders' names: rename the array, or put all files into one folder"
                )
            found["label"] = FieldSpec(dtype="int64", shape=(), classes=self._classes)
        return found

    @property
    def identity(self) -> JsonValue:
        return source_identity(self._files)

    def read(self, positions: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        out = {n: np.empty((len(positions), *spec.shape), spec.dtype) for n, spec in self.fields.items()}
        for place, position in enumerate(positions):
            path = self._files[position]
            sample = _sample(path)
            if sample.keys() != out.keys() - ({"label"} if self._labels is not None else set()):
                raise DataError(
                    f"{path} has the arrays {', '.join(sample)}, but {self._files[0]} has others: all samples must "
                    "have the same arrays"
                )
            for name, array in sample.items():
                spec = self.fields[name]
                if array.shape != spec.shape or array.dtype.name != spec.dtype:
                    raise DataError(
                        f"{name!r} of {path} is {array.dtype} {array.shape}, that of {self._files[0]} "
                        f"{spec.dtype} {spec.shape}: all samples must be alike (pad or resize them)"
                    )
                out[name][place] = array
        if self._labels is not None:
            out["label"][:] = self._labels[positions]
        return out


def class_folders(root: Path, files: list[Path]) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """Returns the class index of each file (int64, shape (number of files,)), and the names of the classes.

    The class of a file is its first folder below `root`. Returns (None, ()) if no file is in a folder. Raises
    DataError if some files are in folders and others are not.
    """
    parts = [path.relative_to(root).parts for path in files]
    if all(len(names) == 1 for names in parts):
        return None, ()
    for path, names in zip(files, parts, strict=True):
        if len(names) == 1:
            raise DataError(
                f"{path} is not in a class folder, but others are: use DIR/class/file for all files, or for none"
            )
    classes = tuple(sorted({names[0] for names in parts}))
    numbers = {name: number for number, name in enumerate(classes)}
    return np.array([numbers[names[0]] for names in parts], dtype=np.int64), classes


def _sample(path: Path) -> dict[str, NDArray[Any]]:
    return {"x": map_npy(path)} if path.suffix.lower() == ".npy" else read_npz(path)


def _field_name(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", path.stem).lstrip(".-") or "x"


def _differing(found: Mapping[str, FieldSpec], expected: Mapping[str, FieldSpec]) -> str:
    names = [name for name in {**found, **expected} if found.get(name) != expected.get(name)]
    return ", ".join(sorted(names))


# Images in folders, one folder per class, decoded to one size.


SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
_MAX_THREADS = 8


class Colour(str, Enum):
    """Colour channels of decoded images. RGB: Three channels. GREY: One channel."""

    RGB = "rgb"
    GREY = "grey"


def parse_image_size(text: str) -> tuple[int, int]:
    """Returns (height, width) in pixels from a text such as `224x320`, or `224` for a square.

    Raises UsageError for any other text.
    """
    found = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text.strip())
    if found is None:
        raise UsageError(f"--size {text}: HEIGHTxWIDTH in pixels is needed, such as 224x224")
    height = int(found[1])
    return height, int(found[2] or height)


class ImageFolder:
    """All images below `root`, one per sample. The field `image` is uint8 of shape (channels, height, width).

    If the images are in folders, the folders are the classes, and the field `label` is the class index. `size` is
    (height, width). With `size`, an image of another size is scaled to cover that size, and cropped around its centre.
    Without `size`, all images must have the size of the first image. Images are rotated according to their EXIF data.
    Raises DataError if Pillow is missing, or if there are no images.
    """

    def __init__(
        self, root: Path, *, size: tuple[int, int] | None = None, colour: Colour = Colour.RGB
    ) -> None:
        _pillow()
        self._files = files_below(root, suffixes=SUFFIXES)
        self._labels, self._classes = class_folders(root, self._files)
        self._asked = size
        self._colour = colour

    @property
    def num_samples(self) -> int:
        return len(self._files)

    @cached_property
    def _size(self) -> tuple[int, int]:
        if self._asked is not None:
            return self._asked
        height, width = self._decode(self._files[0], size=None).shape[1:]
        return int(height), int(width)

    @cached_property
    def fields(self) -> Mapping[str, FieldSpec]:
        channels = 3 if self._colour is Colour.RGB else 1
        found = {"image": FieldSpec(dtype="uint8", shape=(channels, *self._size))}
        if self._labels is not None:
            found["label"] = FieldSpec(dtype="int64", shape=(), classes=self._classes)
        return found

    @property
    def identity(self) -> JsonValue:
        return [source_identity(self._files), list(self._size), self._colour.value]

    def read(self, positions: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        images = np.empty((len(positions), *self.fields["image"].shape), dtype=np.uint8)

        def decode(place: int) -> None:
            path = self._files[positions[place]]
            picture = self._decode(path, size=self._asked)
            if picture.shape != images.shape[1:]:
                raise DataError(
                    f"{path} has {picture.shape[1]}x{picture.shape[2]} pixels, {self._files[0]} has "
                    f"{self._size[0]}x{self._size[1]}: use --size HEIGHTxWIDTH to scale all to one size"
                )
            images[place] = picture

        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads, thread_name_prefix="hpctrain-decode") as pool:
            for _ in pool.map(decode, range(len(positions))):
                pass
        found: dict[str, NDArray[Any]] = {"image": images}
        if self._labels is not None:
            found["label"] = self._labels[positions]
        return found

    def _decode(self, path: Path, *, size: tuple[int, int] | None) -> NDArray[np.uint8]:
        """Returns an image as uint8, shape (channels, height, width). Raises DataError if it cannot be decoded."""
        pillow = _pillow()
        from PIL import ImageOps

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about unusual metadata and large images
                with pillow.open(path) as opened:
                    if opened.mode.startswith(("I", "F")):
                        raise DataError(
                            f"{path} has pixels of mode {opened.mode}, not 8 bits: convert it, or pack arrays"
                        )
                    picture = ImageOps.exif_transpose(opened).convert(
                        "RGB" if self._colour is Colour.RGB else "L"
                    )
            if size is not None and picture.size != (size[1], size[0]):
                picture = ImageOps.fit(picture, (size[1], size[0]), method=pillow.Resampling.BILINEAR)
        except DataError:
            raise
        except (
            Exception
        ) as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, ...
            raise DataError(f"the image {path} cannot be decoded: {error}") from error
        pixels = np.asarray(picture, dtype=np.uint8)
        return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"images need Pillow ({error}): pip install hpctrain[formats]") from error
    return Image
