"""Two tiers: a checkpoint is first on the nodes' own storage, then in the folder that all of them share.

A save writes one file per node to node-local storage, which is as fast as the node's disk. Then, in the
background, each node's leader (its lowest rank) sends its file to another node, so that one lost node loses
nothing, and copies it into the shared folder, where rank 0 commits the checkpoint as any other. What was not
drained when a run died is found again by `hpctrain.checkpoint.tiers.recover.recover`.
"""

from __future__ import annotations

import secrets
import threading
from pathlib import Path
from typing import Any, final

from hpctrain.checkpoint.tiers.node_store import LocalStore, forget_under, run_key
from hpctrain.checkpoint.tiers.partner_copy import DEFAULT_TIMEOUT_S, PartnerServer, greet
from hpctrain.checkpoint.tiers.partner_protocol import PartnerAddress
from hpctrain.comm.collectives.agreement import agreed, all_gather_json, on_rank_0
from hpctrain.comm.interface.communicator import Collective
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.topology import Topology

_TOKEN_BYTES = 32


@final
class Tiers:
    """The two places of a run's checkpoints, and this node's link to its partner. Made by `open`.

    shared: the folder of finished checkpoints. store: this node's folder. node: index of this rank's node.
    partner: where the node's file is copied to; None on ranks that lead no node, and with one node.
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
        keep_local: int = 1,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Tiers:
        """Make this node's folder `local/<run>/<node>`, and with several nodes connect each with its partner, the
        next one. Collective.

        local: a directory on storage of the node's own; it may have another path on every node. keep_local: how
        many checkpoints stay there. timeout_s: the longest silence of a partner.
        Raises on every rank: UsageError for a bad argument, CheckpointError when a node cannot write to its
        folder or cannot reach its partner. Call `close` at the end of the run.
        """
        agreed(comm, lambda: _check_arguments(local=Path(local), keep_local=keep_local, timeout_s=timeout_s))
        chosen = on_rank_0(
            comm, lambda: {"run": run_key(Path(shared)), "token": secrets.token_hex(_TOKEN_BYTES)}
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
        """Collective."""

        def begin() -> dict[str, Any] | None:
            if not self.is_leader:
                return None
            self.store.prepare()
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

    def forget(self, *, from_step: int = 0, comm: Collective) -> None:
        """Remove what the nodes hold of step `from_step` and later: of a history that the run has left. Collective.

        A run that starts anew, or goes on from an older checkpoint than the newest, calls this: or else the next
        start would recover the history that was left. Raises CheckpointError on every rank.
        """
        agreed(
            comm,
            lambda: forget_under(self.store.base, from_step=from_step) if self.is_leader else None,
            os_error=CheckpointError,
        )

    def close(self) -> None:
        """Take no more copies, and stop copying. Not collective; may be called twice."""
        self.stopping.set()
        if self._server is not None:
            self._server.close()
            self._server = None


def _check_arguments(*, local: Path, keep_local: int, timeout_s: float) -> None:
    if isinstance(keep_local, bool) or not isinstance(keep_local, int) or keep_local < 1:
        raise UsageError(f"keep_local = {keep_local!r}: at least one checkpoint stays on the nodes")
    if not timeout_s > 0:
        raise UsageError(f"timeout_s = {timeout_s!r}: give seconds above 0")
    if local.exists() and not local.is_dir():
        raise UsageError(f"local = {local}: this is not a directory")
