"""Arrays in anonymous shared memory, passed to another process as a file descriptor and a description.

The memory has no name in any filesystem. The kernel frees the memory when the last process that maps it or holds its
descriptor ends, for any reason. This module imports neither torch nor the rest of the package (see `transform`).
"""

from __future__ import annotations

import json
import mmap
import os
import socket
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import DataError

# Cache lines; every dtype's size divides it.
_ALIGNED_BYTES = 64
# A message is one datagram; the default limit of Linux is 208 KiB.
MAX_MESSAGE_BYTES = 64 << 10
_PARAGRAPH_BYTES = 1 << 30

INDICES = ":indices"
"""Name of the array of sample indices that is sent with the fields of a batch."""

Description = list[dict[str, Any]]
"""One dict of JSON values per array: its name, its dtype, its shape, and its first byte in the shared memory."""


def write_arrays(arrays: Mapping[str, NDArray[Any]]) -> tuple[int, Description]:
    """Copies arrays into new shared memory. Returns the memory's file descriptor, and the description of the arrays.

    The caller must close the descriptor. Raises DataError if the memory cannot be allocated.
    """
    description: Description = []
    end = 0
    for name, array in arrays.items():
        first_byte = -(-end // _ALIGNED_BYTES) * _ALIGNED_BYTES
        description.append(
            {"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "first_byte": first_byte}
        )
        end = first_byte + array.nbytes
    try:
        descriptor = os.memfd_create("hpctrain-batch")
    except OSError as error:
        raise DataError(
            f"shared memory for a batch cannot be allocated: {error.strerror}. Use fewer workers"
        ) from error
    try:
        os.ftruncate(descriptor, max(1, end))
        for entry, array in zip(description, arrays.values(), strict=True):
            # pwrite instead of a map: the kernel fills the pages without a page fault for each.
            _write(descriptor, np.ascontiguousarray(array), at=entry["first_byte"])
    except OSError as error:
        os.close(descriptor)
        raise DataError(
            f"a batch of {end} bytes does not fit into shared memory: {error.strerror}. Use fewer workers, a "
            "smaller prefetch, or a larger memory limit"
        ) from error
    return descriptor, description


def _write(descriptor: int, array: NDArray[Any], *, at: int) -> None:
    content = array.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done : done + _PARAGRAPH_BYTES], at + done)


def map_arrays(descriptor: int, description: Description) -> dict[str, NDArray[Any]]:
    """Maps shared memory copy-on-write, and returns its arrays. Other processes do not see changes to them.

    `descriptor` is the memory's file descriptor, and `description` the description that `write_arrays` returned.
    """
    memory = mmap.mmap(
        descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
    )  # unmapped with the last array
    return {
        entry["name"]: np.ndarray(
            tuple(entry["shape"]), dtype=entry["dtype"], buffer=memory, offset=entry["first_byte"]
        )
        for entry in description
    }


def send(control: socket.socket, message: Mapping[str, Any], *, descriptors: tuple[int, ...] = ()) -> None:
    """Sends a message as JSON, together with file descriptors.

    Raises OSError if the other process closed the socket or ended, DataError if the message is longer than
    MAX_MESSAGE_BYTES.
    """
    content = json.dumps(message).encode()
    if len(content) > MAX_MESSAGE_BYTES:
        raise DataError(f"a message of {len(content)} bytes is too long: the batch has too many fields")
    socket.send_fds(control, [content], list(descriptors), socket.MSG_NOSIGNAL)


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Waits for the next message. Returns the message and the file descriptors that were sent with it.

    Returns None if the other process closed the socket.
    """
    try:
        content, descriptors, _, _ = socket.recv_fds(
            control, MAX_MESSAGE_BYTES, 1, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        )
    except ConnectionError:
        return None
    if not content:
        return None
    return json.loads(content), descriptors
