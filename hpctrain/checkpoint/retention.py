"""Which checkpoints to delete: pure."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.errors import UsageError


def check_keep(keep: int | None) -> None:
    """Raises UsageError unless `keep` is None (all) or at least 1."""
    if keep is not None and keep < 1:
        raise UsageError(f"keep = {keep}: at least the newest checkpoint must be kept (None keeps all)")


def steps_to_delete(steps: Sequence[int], *, saved: int, keep: int | None) -> list[int]:
    """Of the checkpoints at `steps`, the ones to delete now that the one at `saved` is proven; ascending.

    The last `keep` up to and including `saved` stay. Steps beyond `saved` come from a run that went on from
    an older checkpoint: they are neither counted nor deleted, since counting them could delete the one just
    saved.
    """
    check_keep(keep)
    if keep is None:
        return []
    past = sorted(step for step in set(steps) if step <= saved)
    return past[:-keep]
