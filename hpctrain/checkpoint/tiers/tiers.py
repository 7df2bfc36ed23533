"""Two tiers: a checkpoint is saved to node storage first, then drained to the folder that all nodes share.

A save writes one file per node to node storage, at the speed of the node's disk. Then, in the background, each node's
leader (its lowest rank) sends the file to another node, so that the loss of one node loses no data, and copies it to
the shared folder, where rank 0 commits the checkpoint. After a crash, `hpctrain.checkpoint.tiers.recover.recover`
drains the files that were not yet in the shared folder.
"""

from __future__ import annotations

import secrets
import threading
from pathlib import Path
from typing import Any, final

from hpctrain.checkpoint.tiers.node_store import LocalStore, forget_under, note_directory, others_of, run_key
from hpctrain.checkpoint.tiers.partner_copy import DEFAULT_TIMEOUT_S, PartnerServer, greet
from hpctrain.checkpoint.tiers.partner_protocol import PartnerAddress
from hpctrain.comm import Collective, agreed, all_gather_json, on_rank_0
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.topology import Topology

_TOKEN_BYTES = 32


@final
class Tiers:
    """The two locations of a run's checkpoints, and this node's link to its partner. Create it with `open`.

    shared: folder of finished checkpoints. store: this node's folder. node: index of this rank's node.
    partner: where this node's file is copied to; None on ranks other than leaders, and if there is only one node.
    """

    def __init__(
        self,
        *,
        shared: Path,
        store: LocalStore,
        topology: Topology,
        rank: int,
        token: bytes,
        timeout_s: float,
    ) -> None:
        self.shared = shared
        self.store = store
        self.topology = topology
        self.node = topology.node_of(rank)
        self.is_leader = topology.local_rank_of(rank) == 0
        self.token = token
        self.timeout_s = timeout_s
        self.partner: PartnerAddress | None = None
        self.stopping = threading.Event()
        self._server: PartnerServer | None = None

    @classmethod
    def open(
        cls,
        *,
        local: Path | str,
        shared: Path | str,
        topology: Topology,
        comm: Collective,
        run: str | None = None,
        keep_local: int = 1,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Tiers:
        """Creates this node's folder `local/<run>/<node>`, and connects each of several nodes to its partner, the next
        node. Collective. Call `close` at the end of the run.

        local: a directory on node storage; its path may differ between nodes. keep_local: number of checkpoints kept
        there. run: name of the run's folder; None: one that follows from the path of `shared`, so that a run that is
        started anew there recovers what an older one has left on the nodes. timeout_s: longest time without an answer
        from a partner.
        Raises on every rank: UsageError for an invalid argument, CheckpointError if a node cannot write to its folder
        or reach its partner.
        """
        agreed(comm, lambda: _check_arguments(local=Path(local), keep_local=keep_local, timeout_s=timeout_s))
        chosen = on_rank_0(
            comm, lambda: {"run": run or run_key(Path(shared)), "token": secrets.token_hex(_TOKEN_BYTES)}
        )
        node = topology.node_of(comm.rank)
        store = LocalStore(
            base=Path(local).absolute() / chosen["run"], node=topology.node_names[node], keep_steps=keep_local
        )
        tiers = cls(
            shared=Path(shared),
            store=store,
            topology=topology,
            rank=comm.rank,
            token=bytes.fromhex(chosen["token"]),
            timeout_s=timeout_s,
        )
        try:
            tiers._connect(comm)
        except BaseException:
            tiers.close()
            raise
        return tiers

    def _connect(self, comm: Collective) -> None:
        """Starts the servers of the leaders and connects each to its partner. Collective."""

        def begin() -> dict[str, Any] | None:
            if not self.is_leader:
                return None
            self.store.prepare()
            note_directory(self.store.base, shared=self.shared)
            if self.topology.num_nodes == 1:
                return None
            self._server = PartnerServer(
                node=self.store.node, token=self.token, shelf=self.store, timeout_s=self.timeout_s
            )
            return self._server.address.to_json()

        addresses = all_gather_json(comm, agreed(comm, begin, os_error=CheckpointError))

        def meet() -> None:
            if self._server is None:
                return
            following = self.topology.ranks_by_node[(self.node + 1) % self.topology.num_nodes][0]
            self.partner = greet(PartnerAddress.from_json(addresses[following]), token=self.token)

        agreed(comm, meet, os_error=CheckpointError)

    def left_by_others(self, *, comm: Collective) -> list[str]:
        """Returns the folders on the nodes with checkpoints of other runs that had the same shared directory, each with
        its newest step, as text. Collective. Raises CheckpointError on every rank."""
        mine = agreed(
            comm, lambda: others_of(self.store.base, shared=self.shared) if self.is_leader else {},
            os_error=CheckpointError,
        )  # fmt: skip
        newest: dict[str, int] = {}
        for theirs in all_gather_json(comm, mine):
            for name, step in theirs.items():
                newest[name] = max(step, newest.get(name, 0))
        return [f"{name} (step {step})" for name, step in sorted(newest.items())]

    def forget(self, *, from_step: int = 0, comm: Collective) -> None:
        """Removes the nodes' files of step `from_step` and later. Collective. Raises CheckpointError on every rank.

        To be called by a run that starts from scratch or resumes from an older checkpoint than the newest; otherwise
        the next start would recover steps that the run has discarded.
        """
        agreed(
            comm,
            lambda: forget_under(self.store.base, from_step=from_step) if self.is_leader else None,
            os_error=CheckpointError,
        )

    def close(self) -> None:
        """Stops accepting copies, and copying. Not collective; may be called twice."""
        self.stopping.set()
        if self._server is not None:
            self._server.close()
            self._server = None


def _check_arguments(*, local: Path, keep_local: int, timeout_s: float) -> None:
    if isinstance(keep_local, bool) or not isinstance(keep_local, int) or keep_local < 1:
        raise UsageError(f"keep_local = {keep_local!r}: give an integer of at least 1")
    if not timeout_s > 0:
        raise UsageError(f"timeout_s = {timeout_s!r}: give seconds above 0")
    if local.exists() and not local.is_dir():
        raise UsageError(f"local = {local}: this is not a directory")
