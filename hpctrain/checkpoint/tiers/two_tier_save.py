"""One save through both tiers: with the interface of a `Saving`, so that it is driven in the same way."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from hpctrain.checkpoint.files.checkpoint_names import part_path
from hpctrain.checkpoint.files.full_io import explained
from hpctrain.checkpoint.format.state import State
from hpctrain.checkpoint.retention.delete_old import retain
from hpctrain.checkpoint.saving.commit import flush_folder
from hpctrain.checkpoint.saving.host_snapshot import HostBuffers
from hpctrain.checkpoint.saving.save import SaveResult, Saving
from hpctrain.checkpoint.saving.save_options import SaveOptions, check_options, retention_of
from hpctrain.checkpoint.saving.submit import submit
from hpctrain.checkpoint.tiers.drain import Pace, copy_file
from hpctrain.checkpoint.tiers.drain_target import commit_target, discard_target, prepare_target
from hpctrain.checkpoint.tiers.node_store import OWN, own_file
from hpctrain.checkpoint.tiers.partner_copy import Offer, send_file
from hpctrain.checkpoint.tiers.partner_protocol import PartnerError
from hpctrain.checkpoint.tiers.tiers import Tiers
from hpctrain.comm.collectives.activity import doing
from hpctrain.comm.collectives.agreement import agreed, all_gather_json, on_rank_0
from hpctrain.comm.interface.communicator import Collective
from hpctrain.errors import CheckpointError, HpctrainError


@final
class TwoTier:
    """A save that goes to node-local storage first, and is drained from there. Made by `begin`.

    `advance` leads through three stages, each in the background: the local save (a `Saving` of its own); copying to
    partner and shared folder, by the nodes' leaders; the commit in the shared folder, by rank 0. What the run calls
    saved is what was committed there. An error leaves the local copies, from which the next start recovers.
    """

    def __init__(
        self,
        saving: Saving,
        *,
        tiers: Tiers,
        step: int,
        comm: Collective,
        options: SaveOptions,
        executor: Executor | None,
        created_unix_s: float,
        begin_s: float,
    ) -> None:
        self._saving: Saving | None = saving
        self._tiers = tiers
        self._step = step
        self._comm = comm
        self._options = options
        self._executor = executor
        self._created_unix_s = created_unix_s
        self._begin_s = begin_s
        self._local: SaveResult | None = None
        self._partial: Path | None = None
        self._copying = False
        self._work: Future[Any] | None = None
        self._warnings: list[str] = []

    @classmethod
    def begin(
        cls,
        state: State,
        *,
        tiers: Tiers,
        step: int,
        comm: Collective,
        options: SaveOptions | None = None,
        buffers: HostBuffers | None = None,
        executor: Executor | None = None,
    ) -> TwoTier:
        """Begin to save `state` as step `step` of the run whose `tiers` these are. Collective.

        comm: of all ranks of the topology that `tiers` was opened with. options: as for `Saving.begin`; `files`,
        `node_of_rank` and `local` are set here, `keep` holds for the shared folder. buffers: the state is copied
        to them; the caller may change its tensors when `begin` returns. executor: where files are written and
        copied; None: at once, in this thread.
        What the nodes hold of this step and later ones belongs to a history that the run has left, and is removed.
        Raises as `Saving.begin`.
        """
        begin_s = time.perf_counter()
        options = options or SaveOptions()
        local = replace(
            options,
            keep=None,  # pruned by what is held, see `LocalStore.prune`
            files="node",
            node_of_rank=tiers.topology.node_of_rank,
            local=True,
        )
        agreed(comm, lambda: check_options(local, step=step, num_ranks=comm.num_ranks))
        created_unix_s = on_rank_0(comm, time.time)
        tiers.forget(from_step=step, comm=comm)
        saving = Saving.begin(
            state,
            directory=tiers.store.own,
            step=step,
            comm=comm,
            options=local,
            buffers=buffers,
            executor=executor,
        )
        return cls(
            saving,
            tiers=tiers,
            step=step,
            comm=comm,
            options=options,
            executor=executor,
            created_unix_s=created_unix_s,
            begin_s=begin_s,
        )

    def ready(self) -> bool:
        """Whether `advance` would not wait for this rank's own work. Not collective."""
        if self._saving is not None:
            return self._saving.ready()
        return self._work is None or self._work.done()

    def advance(self) -> SaveResult | None:
        """Wait for this rank's work of the present stage and begin the next; the result when all is done. Collective.

        Raises CheckpointError on every rank when a node cannot write to its local or to the shared folder. A copy
        that could not be made on a partner node is no error: the result's note says so.
        """
        if self._saving is not None:
            self._local = self._saving.advance()
            if self._local is not None:
                self._saving = None
                with self._doing("beginning to drain"):
                    self._begin_copying(self._local)
            return None
        if self._copying:
            with self._doing("draining to the shared folder"):
                self._end_copying()
            return None
        with self._doing("committing in the shared folder"):
            return self._end_commit()

    def finish(self) -> SaveResult:
        """`advance` until all is done. Collective."""
        while True:
            result = self.advance()
            if result is not None:
                return result

    # ------------------------------------------------------------------ stage 2: to the partner, to the shared folder

    def _begin_copying(self, local: SaveResult) -> None:
        """Collective."""

        def prepare() -> str:
            return str(prepare_target(self._tiers.shared, step=self._step))

        partial = self._partial = Path(on_rank_0(self._comm, prepare))
        self._copying = True
        if self._tiers.is_leader:
            work = functools.partial(self._copy, local.path, save_id=local.id, partial=partial)
            self._work = submit(self._executor, work)

    def _copy(self, step_path: Path, *, save_id: str, partial: Path) -> str:
        """A leader's work in the background: what to warn of, or "". No communication but with the partner."""
        tiers, store = self._tiers, self._tiers.store
        path = own_file(step_path)
        with explained(action="read", path=path):
            num_bytes = path.stat().st_size
        offer = Offer(
            step=self._step,
            save_id=save_id,
            file=tiers.node,
            num_files=tiers.topology.num_nodes,
            num_bytes=num_bytes,
            created_unix_s=self._created_unix_s,
        )
        store.note_own(path, offer=offer)
        pace = Pace(limit_mb_per_s=self._options.limit_mb_per_s)
        digest, warning = "", ""
        if tiers.partner is not None:
            try:
                sent = send_file(
                    path, offer=offer, partner=tiers.partner, token=tiers.token, pace=pace,
                    timeout_s=tiers.timeout_s, on_bytes=self._go_on,
                )  # fmt: skip
                digest = sent.digest
                store.note_own(path, offer=offer, digest=digest)
            except PartnerError as error:
                warning = f"WARNING: {error}"
        target = part_path(partial, tiers.node)
        copy_file(path, target, expected=digest, pace=pace, on_bytes=self._go_on)
        flush_folder(partial)
        store.prune(OWN)
        return warning

    def _go_on(self, num_bytes: int) -> None:
        if self._tiers.stopping.is_set():
            raise CheckpointError(
                f"step {self._step} was being copied from {self._tiers.store.own} when the run ended: the next start "
                "recovers it"
            )

    # ------------------------------------------------------------------ stage 3: the commit

    def _end_copying(self) -> None:
        """Collective."""
        warning = self._agreed_work() or ""
        self._warnings = [text for text in all_gather_json(self._comm, warning) if text]
        self._copying = False
        if self._comm.rank == 0:
            self._work = submit(self._executor, self._commit)

    def _commit(self) -> dict[str, Any]:
        """Rank 0's work: where it is now, how many bytes, and notes."""
        partial, local = self._partial, self._local
        assert partial is not None
        assert local is not None
        committed = commit_target(partial, step=self._step, save_id=local.id)
        if committed.path is None:
            raise CheckpointError(f"what was drained of step {self._step} is damaged: {committed.reason}")
        retention = retention_of(self._options.keep)
        notes = retain(self._tiers.shared, saved=committed.path, retention=retention)
        return {"path": str(committed.path), "bytes": committed.num_bytes, "notes": notes}

    def _end_commit(self) -> SaveResult:
        """Collective."""
        local, done = self._local, self._agreed_work()
        told = on_rank_0(self._comm, lambda: done)
        assert local is not None
        self._partial = None
        return replace(
            local,
            path=Path(told["path"]),
            bytes=told["bytes"],
            seconds=time.perf_counter() - self._begin_s,
            note="; ".join(filter(None, [local.note, *self._warnings, *told["notes"]])),
        )

    def _agreed_work(self) -> Any:
        """What this rank's work came to, once all have theirs; None where it had none. Collective."""
        if self._partial is None:
            raise RuntimeError(f"the save of step {self._step} has ended already")
        work, self._work = self._work, None
        try:
            return agreed(
                self._comm, lambda: work.result() if work is not None else None, os_error=CheckpointError
            )
        except HpctrainError:
            partial, self._partial = self._partial, None
            if self._comm.rank == 0:
                discard_target(partial)
            raise

    def _doing(self, what: str) -> AbstractContextManager[None]:
        return doing(self._comm, f"saving checkpoint step {self._step}: {what}")


def saving_through(
    tiers: Tiers, *, comm: Collective, options: SaveOptions | None = None
) -> Callable[..., TwoTier]:
    """For a `Saver`: saves through both tiers, committed in `tiers.shared`."""

    def begin(state: State, *, step: int, buffers: HostBuffers | None, executor: Executor | None) -> TwoTier:
        return TwoTier.begin(
            state, tiers=tiers, step=step, comm=comm, options=options, buffers=buffers, executor=executor
        )

    return begin
