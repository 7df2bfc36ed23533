"""The one content hash of the format: xxh3_64, as 16 hex digits."""

from __future__ import annotations

from typing import Any

import xxhash

HASH_NAME = "xxh3_64"
HASH_DIGITS = 16


def hash_of(data: Any) -> str:
    """Hash of a bytes-like object; 31 GB/s on one core, so it costs a fraction of writing the bytes."""
    return str(xxhash.xxh3_64_hexdigest(data))
