"""Ranks that only have a watcher, on nodes that are folders; and positions of ranks that do not exist."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from hpctrain.comm.watchdog.board.node_files import WatchFolders, make_node_folders
from hpctrain.comm.watchdog.board.rank_status import GroupPosition, RankNodes, RankPosition
from hpctrain.comm.watchdog.operation_state import Track
from hpctrain.comm.watchdog.watcher import Watcher

FOUR, SEVEN = "all_reduce (4 x float32) sum", "all_reduce (7 x float32) sum"


def folders(directory: Path, *, rank: int, nodes: Sequence[int]) -> WatchFolders:
    """nodes: the node of each rank; the nodes are called h0, h1, ... Makes the folder that all of them share."""
    (directory / "watch").mkdir(exist_ok=True)
    names = [f"h{node}" for node in range(max(nodes) + 1)]
    make_node_folders(directory / "watch", num_nodes=len(names))
    return WatchFolders(
        rank=rank, shared=directory / "watch", local=directory / f"local-{nodes[rank]}",
        placement=RankNodes(node_of_rank=nodes, node_names=names),
    )  # fmt: skip


class Rank:
    """A rank that only has a watcher: it notes how the watcher ends it. nodes: see `folders`; by default all are h0."""

    def __init__(
        self,
        rank: int,
        *,
        timeout_s: float,
        directory: Path,
        num_ranks: int = 2,
        nodes: Sequence[int] | None = None,
    ) -> None:
        self.ended = threading.Event()
        self.how: list[tuple[str, int]] = []
        self.watcher = Watcher(
            rank=rank,
            timeout_s=timeout_s,
            abort=lambda code: self.end("abort", code),
            leave=lambda code: self.end("leave", code),
        )
        self.folders = folders(directory, rank=rank, nodes=nodes or [0] * num_ranks)
        self.track: Track = self.watcher.track(
            group="world", members=tuple(range(len(nodes or [0] * num_ranks)))
        )
        self.folders.local.mkdir(exist_ok=True)
        self.watcher.publish_in(self.folders)

    def end(self, how: str, code: int) -> None:
        self.how.append((how, code))
        self.ended.set()


def position(
    rank: int,
    *,
    sequence: int = 3,
    signature: str | None = None,
    waits: bool = True,
    host: str | None = None,
    written: float = 0.0,
) -> RankPosition:
    """In operation `sequence` of the world, or past it."""
    place = GroupPosition(
        sequence=sequence,
        operation="all_reduce",
        waiting_s=2.5 if waits else None,
        signature=signature,
        num_ranks=3,
    )
    return RankPosition(
        rank=rank, host=host or f"h{rank}", pid=1, written=written, step=12, groups={"world": place}
    )
