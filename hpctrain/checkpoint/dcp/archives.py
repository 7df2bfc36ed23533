"""Finds tensors and objects in the archives of a checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.dcp.metadata import Place
from hpctrain.checkpoint.operations.torch_archives import Located, open_archive
from hpctrain.errors import CheckpointError


def locate_tensor(
    directory: Path, place: Place, *, dtype: str, shape: Sequence[int], verify: bool
) -> Located:
    """Returns where the tensor in an archive lies. Raises CheckpointError if it is not one of this dtype and shape.

    verify: compare the content with the archive's CRC-32.
    """
    with open_archive(directory / place.file, begin=place.begin, num_bytes=place.num_bytes) as archive:
        found = archive.locate(archive.description(verify=verify), verify=verify)
        if found.dtype != dtype or found.shape != tuple(shape):
            raise CheckpointError(f"it holds {found.dtype} {list(found.shape)}, not {dtype} {list(shape)}")
    return found


def read_object(directory: Path, place: Place, *, verify: bool) -> Any:
    """Returns the value that torch.save wrote, as `read_pickled_data` does. Raises CheckpointError."""
    with open_archive(directory / place.file, begin=place.begin, num_bytes=place.num_bytes) as archive:
        return archive.description(verify=verify)


def as_json(value: Any) -> Any:
    """Returns plain data as JSON has it, tuples as lists. Raises CheckpointError if it is not plain data."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"it is not plain data: {error}") from error
