"""The content hash of datasets and checkpoints: xxh3_64, as 16 hex digits.

The hash detects bit rot and torn writes. It does not protect against forgery.
"""

from __future__ import annotations

from typing import Any

import xxhash

HASH_NAME = "xxh3_64"
HASH_DIGITS = 16


def hash_of(data: Any) -> str:
    """Returns the hash of a bytes-like object: xxh3_64, 16 hex digits. Hashing is several times as fast as writing.

    The speed is 31 GB/s on one core.
    """
    return str(xxhash.xxh3_64_hexdigest(data))
