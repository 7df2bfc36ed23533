"""Images in folders, one folder per class, decoded to one size."""

from __future__ import annotations

import os
import re
import warnings
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
from hpctrain.data.sources.files import files_below, identity_of
from hpctrain.data.sources.numpy_files import class_folders
from hpctrain.errors import DataError, UsageError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
_MAX_THREADS = 8


class Colour(str, Enum):
    """Channels of the decoded images: three, or one (grey)."""

    RGB = "rgb"
    GREY = "grey"


def parse_size(text: str) -> tuple[int, int]:
    """Returns (height, width): `224x320` -> (224, 320), `224` -> (224, 224). Raises UsageError."""
    found = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text.strip())
    if found is None:
        raise UsageError(f"--size {text}: HEIGHTxWIDTH in pixels is needed, such as 224x224")
    height = int(found[1])
    return height, int(found[2] or height)


class ImageFolder:
    """Images below `root`: field `image`, uint8, shape (channels, height, width); `label` if they are in folders.

    size: (height, width); an image of another shape is scaled to cover it, and its centre is cropped. None: all
    must have the size of the first. Images are rotated according to their EXIF data.
    Raises DataError if Pillow is missing, or there are no images.
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
        return [identity_of(self._files), list(self._size), self._colour.value]

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
        """Returns uint8, shape (channels, height, width). Raises DataError."""
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
