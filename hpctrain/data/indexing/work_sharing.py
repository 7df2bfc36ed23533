"""Divides work on many files among the ranks, and returns all results on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hpctrain.comm import Collective, agreed, all_gather_json
from hpctrain.data.order.epoch_order import rank_share
from hpctrain.errors import DataError

Item = TypeVar("Item")
Progress = Callable[[int, int | None], None]
"""Called with (done, total) items of this rank's part."""


def share_work(
    comm: Collective,
    items: Sequence[Item],
    function: Callable[[Item], dict[str, Any]],
    *,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Calls `function` for each item, on one rank each; returns all results, in order. Collective over `comm`.

    The items must be the same on all ranks; `function` returns JSON values. An error is raised on all ranks.
    """
    share = rank_share(0, len(items), rank=comm.rank, num_ranks=comm.num_ranks)

    def work() -> list[dict[str, Any]]:
        done = []
        for item in items[share.start : share.stop]:
            done.append(function(item))
            if progress is not None:
                progress(len(done), share.stop - share.start)
        return done

    part = agreed(comm, work, os_error=DataError)
    if comm.num_ranks == 1:
        return part
    return [result for found in all_gather_json(comm, part) for result in found]
