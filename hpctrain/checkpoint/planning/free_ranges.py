"""What is left of a file between the stretches that are taken. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from hpctrain.errors import CheckpointError


def gaps_between(taken: Iterable[tuple[int, int]], *, file_bytes: int) -> list[tuple[int, int]]:
    """(begin, end) of each gap, ascending; taken: (offset, number of bytes), in any order.

    Raises CheckpointError when two stretches overlap, or one reaches beyond the file.
    """
    gaps, position = [], 0
    for offset, num_bytes in [*sorted(taken), (file_bytes, 0)]:
        if offset < position:
            raise CheckpointError(f"two things in the file overlap at byte {offset}")
        if offset > position:
            gaps.append((position, offset))
        position = offset + num_bytes
    return gaps
