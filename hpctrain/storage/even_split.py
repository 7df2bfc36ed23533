"""Splits a range into parts whose lengths differ by at most one. Pure."""

from __future__ import annotations


def split_evenly(num: int, *, num_parts: int) -> list[int]:
    """Returns the lengths of `num_parts` parts of `num` elements, the longer parts first; some lengths may be 0."""
    whole, rest = divmod(num, num_parts)
    return [whole + (part < rest) for part in range(num_parts)]


def part_of(num: int, *, part: int, num_parts: int) -> tuple[int, int]:
    """Returns the range (start, stop) of the elements in part `part`, if `num` elements are split by `split_evenly`."""
    whole, rest = divmod(num, num_parts)
    first = part * whole + min(part, rest)
    return first, first + whole + (part < rest)
