"""A save through both tiers, with the same interface as `Saving`."""

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
from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.format.state import State
from hpctrain.checkpoint.retention.delete_old import retain
from hpctrain.checkpoint.saving.background_thread import submit
from hpctrain.checkpoint.saving.commit import flush_folder
from hpctrain.checkpoint.saving.host_snapshot import HostBuffers
from hpctrain.checkpoint.saving.save import SaveResult, Saving
from hpctrain.checkpoint.saving.save_options import SaveOptions, check_options, retention_of
from hpctrain.checkpoint.tiers.drain import Pace, copy_file
from hpctrain.checkpoint.tiers.drain_target import commit_target, discard_target, prepare_target
from hpctrain.checkpoint.tiers.node_store import OWN, own_file
from hpctrain.checkpoint.tiers.partner_copy import Offer, send_file
from hpctrain.checkpoint.tiers.partner_protocol import PartnerError
from hpctrain.checkpoint.tiers.tiers import Tiers
from hpctrain.comm import Collective, agreed, all_gather_json, doing, on_rank_0
from hpctrain.errors import CheckpointError, HpctrainError


@final
class TwoTier:
    """A save to node storage that is then drained to the shared folder. Create it with `begin`.

    `advance` runs three stages, each with its work in the background: the local save (a `Saving`); copying to the
    partner and to the shared folder, by the nodes' leaders; and the commit in the shared folder, by rank 0. Only then
    the checkpoint counts as saved. An error leaves the local copies, from which the next start recovers.
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
        """Starts to save `state` as step `step`. Collective. Raises as `Saving.begin`.

        First removes the nodes' files of this step and later ones, since the run will write these again.

        Args:
            comm: all ranks of the topology that `tiers` was opened with.
            options: as for `Saving.begin`; `files`, `node_of_rank` and `local` are overridden, and `keep` applies to
                the shared folder.
            buffers: memory for a copy of the state, whose tensors may then change once this returns.
            executor: runs the writing and copying of files; None: immediately, in this thread.
        """
        begin_s = time.perf_counter()
        options = options or SaveOptions()
        local = replace(
            options,
            keep=None,  # `LocalStore.prune` removes old ones
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
        """True if `advance` would not wait for work of this rank. Not collective."""
        if self._saving is not None:
            return self._saving.ready()
        return self._work is None or self._work.done()

    def advance(self) -> SaveResult | None:
        """Waits for this rank's work of the current stage and starts the next one. Collective.

        Returns the result once the checkpoint is committed, else None. Raises CheckpointError on every rank if a node
        cannot write to its local or to the shared folder. A failed copy to a partner node is not an error; it is
        reported in the result's note.
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
        """Calls `advance` until the checkpoint is committed. Collective."""
        while True:
            result = self.advance()
            if result is not None:
                return result

    # ------------------------------------------------------------------ stage 2: to the partner, to the shared folder

    def _begin_copying(self, local: SaveResult) -> None:
        """Creates the folder to drain to, and starts copying on the leaders. Collective."""

        def prepare() -> str:
            return str(prepare_target(self._tiers.shared, step=self._step))

        partial = self._partial = Path(on_rank_0(self._comm, prepare))
        self._copying = True
        if self._tiers.is_leader:
            work = functools.partial(self._copy, local.path, save_id=local.id, partial=partial)
            self._work = submit(self._executor, work)

    def _copy(self, step_path: Path, *, save_id: str, partial: Path) -> str:
        """Background work of a leader; communicates only with the partner. Returns a warning, or ""."""
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
                    timeout_s=tiers.timeout_s, on_bytes=self._raise_if_stopped,
                )  # fmt: skip
                digest = sent.digest
                store.note_own(path, offer=offer, digest=digest)
            except PartnerError as error:
                warning = f"WARNING: {error}"
        target = part_path(partial, tiers.node)
        copy_file(path, target, expected=digest, pace=pace, on_bytes=self._raise_if_stopped)
        flush_folder(partial)
        store.prune(OWN)
        return warning

    def _raise_if_stopped(self, num_bytes: int) -> None:
        if self._tiers.stopping.is_set():
            raise CheckpointError(
                f"the run ended while step {self._step} was being copied from {self._tiers.store.own}; the next start "
                "recovers it"
            )

    # ------------------------------------------------------------------ stage 3: the commit

    def _end_copying(self) -> None:
        """Waits for the copies and starts the commit on rank 0. Collective."""
        warning = self._agreed_work() or ""
        self._warnings = [text for text in all_gather_json(self._comm, warning) if text]
        self._copying = False
        if self._comm.rank == 0:
            self._work = submit(self._executor, self._commit)

    def _commit(self) -> dict[str, Any]:
        """Commits on rank 0. Returns path, size in bytes, and notes."""
        partial, local = self._partial, self._local
        assert partial is not None
        assert local is not None
        committed = commit_target(partial, step=self._step, save_id=local.id)
        if committed.path is None:
            raise CheckpointError(f"the drained copy of step {self._step} is damaged: {committed.reason}")
        retention = retention_of(self._options.keep)
        notes = retain(self._tiers.shared, saved=committed.path, retention=retention)
        return {"path": str(committed.path), "bytes": committed.num_bytes, "notes": notes}

    def _end_commit(self) -> SaveResult:
        """Waits for the commit and returns the result. Collective."""
        local, done = self._local, self._agreed_work()
        of_rank_0 = on_rank_0(self._comm, lambda: done)
        assert local is not None
        self._partial = None
        return replace(
            local,
            path=Path(of_rank_0["path"]),
            bytes=of_rank_0["bytes"],
            seconds=time.perf_counter() - self._begin_s,
            note="; ".join(filter(None, [local.note, *self._warnings, *of_rank_0["notes"]])),
        )

    def _agreed_work(self) -> Any:
        """Waits for the work of all ranks and returns this rank's result, None if it had no work. Collective. Raises on
        every rank if any rank failed."""
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
    """Returns a function for `Saver` that starts saves through both tiers, committed in `tiers.shared`. Not collective;
    calling the function is."""

    def begin(state: State, *, step: int, buffers: HostBuffers | None, executor: Executor | None) -> TwoTier:
        return TwoTier.begin(
            state, tiers=tiers, step=step, comm=comm, options=options, buffers=buffers, executor=executor
        )

    return begin
