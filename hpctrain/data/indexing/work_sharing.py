"""Work on many files, shared out to the ranks; what each finds goes to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hpctrain.comm.collectives.agreement import agreed, all_gather_json
from hpctrain.comm.interface.communicator import Collective
from hpctrain.data.order.epoch_order import rank_share
from hpctrain.errors import DataError

Item = TypeVar("Item")
Progress = Callable[[int, int | None], None]
"""Called with (done, total) of this rank's part."""


def share_work(
    comm: Collective,
    items: Sequence[Item],
    function: Callable[[Item], dict[str, Any]],
    *,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """`function` of each item, in order, on every rank; each rank works on its part. Collective.

    The ranks have the same items; what `function` returns is JSON. Where it fails, all ranks raise.
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
