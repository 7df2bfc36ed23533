"""Reads and checks the `.metadata` of a DCP checkpoint: which tensors and objects it has, and where their bytes are.

The layout is that of `torch.distributed.checkpoint.metadata` and `.filesystem`, version 1.0.0 and earlier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, TypeAlias

from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.format.boxes import Box, Steps, TooFragmentedError, cover_exactly
from hpctrain.checkpoint.format.dtypes import dtype_named
from hpctrain.checkpoint.format.state import SEPARATOR
from hpctrain.checkpoint.operations.torch_archives import Record, read_pickled_data
from hpctrain.errors import CheckpointError, UsageError

# Converts between the names of tensors in our checkpoints and their paths in DCP's nested state dicts. Pure.
#
# DCP flattens a nested state dict: the key of a value is its path, joined by dots. A name in our checkpoints has a
# slash after the first part of the path, and the optimizer's state has the names that a run gives it:
#
#     model.0.weight                    model/0.weight
#     optim.state.0.weight.exp_avg      optimizer/0.weight::exp_avg
#     ema.0.weight                      ema/0.weight
#     counter                           counter


MODEL, OPTIMIZER, STATE, GROUPS = "model", "optim", "state", "param_groups"
OUR_OPTIMIZER = "optimizer/"

Path: TypeAlias = tuple[str | int, ...]  # of a value in a nested state dict: keys of dicts, indices of lists


def key_of(path: Path) -> str:
    """Returns DCP's key of the value at `path`: the keys and indices in the path, joined by dots."""
    return ".".join(map(str, path))


def guessed_path(key: str) -> Path:
    """Returns the likely path, in the nested state dict, of the value with DCP's key `key`.

    Used for DCP checkpoints that do not record paths.
    """
    first, *rest = key.split(".", 1)
    return (first, *rest) if first in (MODEL, OPTIMIZER, OUR_OPTIMIZER[:-1]) else (key,)


def below(path: Path, root: str) -> Path | None:
    """Returns the rest of `path` after the keys in `root`; None if `path` does not begin with these keys.

    `path` is a tuple of keys in a nested state dict, and `root` a text of keys joined by dots.
    """
    parts = tuple(root.split(".")) if root else ()
    return path[len(parts) :] if path[: len(parts)] == parts and len(path) > len(parts) else None


def optimizer_path(path: Path) -> Path | None:
    """Returns the part of `path` that lies within the optimizer's state dict, or None for any other path.

    `path` is a path of keys in a nested state dict. Only paths that `get_optimizer_state_dict` can make count. The
    result is (`state`, parameter, key, ...) or (`param_groups`, index, key), also if the state dict was flattened. The
    optimizer may be called "optim" or "optimizer".
    """
    if path[0] not in (OPTIMIZER, OUR_OPTIMIZER[:-1]) or len(path) < 2:
        return None
    rest = path[1:]
    if len(rest) == 1 and isinstance(rest[0], str):  # flatten_optimizer_state_dict=True, or a guessed path
        kind, _, inner = rest[0].partition(".")
        rest = (kind, *(inner.rsplit(".", 1) if kind == STATE else inner.split(".", 1)))
        if kind == GROUPS and len(rest) == 3 and str(rest[1]).isdecimal():
            rest = (kind, int(rest[1]), rest[2])
    is_state = rest[0] == STATE and len(rest) >= 3
    is_group = rest[0] == GROUPS and len(rest) == 3 and isinstance(rest[1], int) and "." not in str(rest[2])
    return rest if is_state or is_group else None


def tensor_name(path: Path) -> str:
    """Returns the name that a tensor of a DCP checkpoint gets in an hpctrain checkpoint.

    `path` is the path of the tensor in the nested state dict: a tuple of keys.
    """
    found = optimizer_path(path)
    if found is not None and found[0] == STATE:
        return OUR_OPTIMIZER + SEPARATOR.join(map(str, found[1:]))
    first, *rest = map(str, path)
    return f"{first}/{'.'.join(rest)}" if rest else first


def path_of(name: str) -> Path:
    """Returns the path in the nested state dict at which DCP stores the tensor `name` of an hpctrain checkpoint.

    The inverse of `tensor_name`, except that a name with dots may become fewer, longer keys of the path.
    """
    if name.startswith(OUR_OPTIMIZER) and SEPARATOR in name:
        return (OPTIMIZER, STATE, *name[len(OUR_OPTIMIZER) :].split(SEPARATOR))
    return tuple(name.split("/", 1))


# Reads and checks the `.metadata` of a DCP checkpoint.


METADATA_FILE = ".metadata"
VERSION = "1.0.0"
MAX_METADATA_BYTES = 512 << 20
MAX_DIMS = 32  # HDF5's limit
_CLASSES = "torch.distributed.checkpoint.metadata."


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveLocation:
    """Where an archive of torch.save lies in a checkpoint: name of the file, offset of its first byte, length.

    Offset and length are in bytes.
    """

    file: str
    begin: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchivedBox:
    """A box (offset and shape) of a tensor, and the archive that holds the elements of the box."""

    box: Box
    place: ArchiveLocation


@dataclass(frozen=True, kw_only=True, slots=True)
class DcpTensor:
    """A tensor of the DCP checkpoint. Its chunks together hold each element exactly once, and no chunk is empty."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[ArchivedBox, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * dtype_named(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class DcpObject:
    """An object of the DCP checkpoint that is not a tensor, written by torch.save."""

    path: Path
    place: ArchiveLocation


@dataclass(frozen=True, kw_only=True, slots=True)
class DcpMetadata:
    tensors: tuple[DcpTensor, ...]
    objects: tuple[DcpObject, ...]

    def to_json(self) -> list[Any]:
        return [
            [
                [
                    tensor.path,
                    tensor.dtype,
                    tensor.shape,
                    [
                        [chunk.box.offset, chunk.box.shape, *_place_to_json(chunk.place)]
                        for chunk in tensor.chunks
                    ],
                ]
                for tensor in self.tensors
            ],
            [[item.path, *_place_to_json(item.place)] for item in self.objects],
        ]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> DcpMetadata:
        tensors, objects = value
        return cls(
            tensors=tuple(
                DcpTensor(
                    path=tuple(path),
                    dtype=dtype,
                    shape=tuple(shape),
                    chunks=tuple(
                        ArchivedBox(box=Box(offset=tuple(offset), shape=tuple(size)), place=_place(*place))
                        for offset, size, *place in chunks
                    ),
                )
                for path, dtype, shape, chunks in tensors
            ),
            objects=tuple(DcpObject(path=tuple(path), place=_place(*place)) for path, *place in objects),
        )


def read_metadata(directory: FilePath) -> DcpMetadata:
    """Reads and checks the metadata of the DCP checkpoint in `directory`, without running anything in it.

    Not collective. Raises CheckpointError if the metadata is invalid, if a chunk does not lie inside a file of the
    directory, if chunks of a tensor overlap or do not cover it, or if all chunks together are larger than the
    files. Raises UsageError if there is no metadata.
    """
    path = directory / METADATA_FILE
    if not path.is_file():
        raise UsageError(f"{directory} {_what_it_is(directory)}")
    with explained(action="read", path=path), open(path, "rb") as file:
        content = file.read(MAX_METADATA_BYTES + 1)
    if len(content) > MAX_METADATA_BYTES:
        raise CheckpointError(f"{path} is longer than {MAX_METADATA_BYTES >> 20} MiB")
    value = read_pickled_data(content, where=str(path))
    try:
        found = _metadata(value)
        _check_files(found, directory)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not metadata of DCP {VERSION} or before: {type(error).__name__}: {error}"
        ) from error
    return found


def _what_it_is(directory: FilePath) -> str:
    if not directory.is_dir():
        return "is not a directory: give the directory that torch.distributed.checkpoint saved to"
    if any(directory.glob(f"__*{METADATA_FILE}")):
        return (
            f"was saved with use_collectives=False: each rank's {METADATA_FILE} has its own part only. Load it and "
            "save it again with use_collectives=True"
        )
    if any(directory.glob("*.safetensors")):
        return "holds safetensors files, not DCP's default format: use `hpctrain checkpoint import` for each file"
    return f"has no {METADATA_FILE}: it is not a checkpoint of torch.distributed.checkpoint, or its save did not finish"


def _metadata(value: Any) -> DcpMetadata:
    """Converts the pickled content of a DCP checkpoint's file `.metadata`.

    `value` is a `Record` that describes an object of DCP's class `Metadata`; the object was not created.

    Raises KeyError, TypeError, ValueError or CheckpointError if `value` is not a valid one.
    """
    state = _state(value, f"{_CLASSES}Metadata")
    version = state.get("version")
    if version not in (None, VERSION):
        raise CheckpointError(f"the metadata has version {version!r}; only {VERSION} and earlier can be read")
    entries, storage, paths = state["state_dict_metadata"], state["storage_data"], state.get("planner_data")
    if not isinstance(entries, dict) or not isinstance(storage, dict) or not isinstance(paths, dict | None):
        raise TypeError("a part of the metadata is not a dict")
    places: dict[tuple[str, tuple[int, ...] | None], ArchiveLocation] = {}
    for index, info in storage.items():
        where = _state(index, f"{_CLASSES}MetadataIndex")
        offset = where.get("offset")
        places[where["fqn"], None if offset is None else _size(offset)] = _stored(info)
    tensors, objects = [], []
    steps = Steps()
    for key, entry in entries.items():
        path = _path(key, (paths or {}).get(key))
        if entry.name == f"{_CLASSES}BytesStorageMetadata":
            objects.append(DcpObject(path=path, place=_found(places, key, None)))
        else:
            tensors.append(_tensor(key, path, entry, places=places, steps=steps))
    return DcpMetadata(tensors=tuple(tensors), objects=tuple(objects))


def _tensor(
    key: str, path: Path, entry: Any, *, places: dict[Any, ArchiveLocation], steps: Steps
) -> DcpTensor:
    state = _state(entry, f"{_CLASSES}TensorStorageMetadata")
    dtype, layout = _state(state["properties"], f"{_CLASSES}TensorProperties", kind=tuple)[:2]
    if layout.name != "torch.serialization._get_layout" or layout.args != ("torch.strided",):
        raise CheckpointError(f"tensor {key!r} is not dense, and only dense tensors can be stored")
    name = _dtype(dtype)
    shape = _size(state["size"])
    if len(shape) > MAX_DIMS:
        raise CheckpointError(f"tensor {key!r} has {len(shape)} dimensions; at most {MAX_DIMS} can be stored")
    chunks = []
    for item in state["chunks"]:
        chunk = _state(item, f"{_CLASSES}ChunkStorageMetadata")
        box = Box(offset=_size(chunk["offsets"]), shape=_size(chunk["sizes"]))
        if not box.lies_within(shape):
            raise CheckpointError(
                f"tensor {key!r}: the chunk {box} does not lie inside its shape {list(shape)}"
            )
        if box.num_elems:
            chunks.append(ArchivedBox(box=box, place=_found(places, key, box.offset)))
    try:
        covered = cover_exactly([chunk.box for chunk in chunks], shape=shape, steps=steps)
    except TooFragmentedError as error:
        raise CheckpointError(f"tensor {key!r}: {error}") from error
    if not covered:
        held = sum(chunk.box.num_elems for chunk in chunks)
        raise CheckpointError(
            f"tensor {key!r}: its {len(chunks)} chunks hold {held} elements, and do not hold each of the "
            f"{math.prod(shape)} elements of shape {list(shape)} exactly once: chunks overlap or are missing"
        )
    return DcpTensor(path=path, dtype=name, shape=shape, chunks=tuple(chunks))


def _check_files(metadata: DcpMetadata, directory: FilePath) -> None:
    places = [chunk.place for tensor in metadata.tensors for chunk in tensor.chunks]
    places += [item.place for item in metadata.objects]
    lengths: dict[str, int] = {}
    for place in places:
        if place.file not in lengths:
            # The metadata must not make us open files outside its directory.
            if place.file != FilePath(place.file).name or place.file in ("", ".."):
                raise CheckpointError(
                    f"the metadata names the file {place.file!r}, which is not a plain file name"
                )
            path = directory / place.file
            if path.is_symlink() or not path.is_file():
                raise CheckpointError(
                    f"the checkpoint's file {place.file!r} is missing or is not a regular file"
                )
            lengths[place.file] = path.stat().st_size
        if place.begin < 0 or place.num_bytes < 0 or place.begin + place.num_bytes > lengths[place.file]:
            raise CheckpointError(
                f"bytes {place.begin} to {place.begin + place.num_bytes} of {place.file!r} are needed, but it is only "
                f"{lengths[place.file]} bytes long: the checkpoint is not complete"
            )
    claimed_bytes, file_bytes = sum(t.num_bytes for t in metadata.tensors), sum(lengths.values())
    if claimed_bytes > file_bytes:
        raise CheckpointError(
            f"the tensors have {claimed_bytes} bytes together, but the checkpoint's files have only {file_bytes}"
        )


# ------------------------------------------------------------------ records


def _state(value: Any, name: str, *, kind: type[Any] = dict) -> Any:
    """Returns the state of the pickled object `value`, which must be an instance of the class `name`.

    `value` is a `Record`: a description of the object, which was not created.

    Raises CheckpointError for anything else. Raises TypeError if the state is not of type `kind`.
    """
    if not isinstance(value, Record) or value.name != name or value.args is None:
        found = value.name if isinstance(value, Record) else type(value).__name__
        raise CheckpointError(
            f"the metadata has {found} where {name} is expected: nothing in the file was run"
        )
    # The class without fields, and one whose fields all have their defaults, have no state.
    state = kind() if value.state is None else value.state
    if not isinstance(state, kind):
        raise TypeError(f"the state of {name} is a {type(state).__name__}, not a {kind.__name__}")
    return state


def _size(value: Any) -> tuple[int, ...]:
    """Returns the numbers in a torch.Size, of which `value` is the description (`Record`) in a pickle."""
    if not isinstance(value, Record) or value.name != "torch.Size" or value.args is None:
        raise CheckpointError(
            "the metadata has no torch.Size where a shape or an offset is expected: nothing in the file was run"
        )
    (numbers,) = value.args or ((),)
    return tuple(_number(n) for n in numbers)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.100} where a number of at least 0 is expected")
    return value


def _dtype(value: Any) -> str:
    if not isinstance(value, Record) or value.args is not None or not value.name.startswith("torch."):
        raise CheckpointError(
            "the metadata has no dtype of torch where one is expected: nothing in the file was run"
        )
    name = value.name.removeprefix("torch.")
    dtype_named(name)
    return name


def _path(key: Any, path: Any) -> Path:
    if type(key) is not str:
        raise TypeError("a key is not text")
    if path is None:
        return guessed_path(key)
    if type(path) is not tuple or not path or not all(type(part) in (str, int) for part in path):
        raise TypeError(f"the path of {key!r} is not a tuple of text and numbers")
    if key_of(path) != key:
        raise ValueError(f"the path recorded for {key!r} is that of {key_of(path)!r}")
    return path


def _stored(info: Any) -> ArchiveLocation:
    state = _state(info, "torch.distributed.checkpoint.filesystem._StorageInfo")
    if state.get("transform_descriptors"):
        raise CheckpointError(
            f"the checkpoint's files were transformed by extensions ({state['transform_descriptors']!r:.100}), "
            "such as compression: save the checkpoint without them"
        )
    if type(state["relative_path"]) is not str:
        raise TypeError("the name of a file is not text")
    return ArchiveLocation(
        file=state["relative_path"], begin=_number(state["offset"]), num_bytes=_number(state["length"])
    )


def _found(places: dict[Any, ArchiveLocation], key: str, offset: tuple[int, ...] | None) -> ArchiveLocation:
    if (key, offset) not in places:
        what = "its content" if offset is None else f"the chunk at {list(offset)}"
        raise CheckpointError(f"{key!r}: the metadata does not say where {what} is stored")
    return places[key, offset]


def _place_to_json(place: ArchiveLocation) -> list[Any]:
    return [place.file, place.begin, place.num_bytes]


def _place(file: str, begin: int, num_bytes: int) -> ArchiveLocation:
    return ArchiveLocation(file=file, begin=begin, num_bytes=num_bytes)
