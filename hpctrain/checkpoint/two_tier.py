"""One save through both tiers: with the interface of a `Saving`, so that it is driven in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from hpctrain.checkpoint.commit import flush_folder
from hpctrain.checkpoint.drain import Pace, copy_file
from hpctrain.checkpoint.drained import Committed, commit_target, discard_target, prepare_target
from hpctrain.checkpoint.file_bytes import explained
from hpctrain.checkpoint.listing import part_path
from hpctrain.checkpoint.local_store import OWN, own_file
from hpctrain.checkpoint.partner import Offer, send_file
from hpctrain.checkpoint.partner_wire import PartnerError
from hpctrain.checkpoint.retain import retain
from hpctrain.checkpoint.save_options import SaveOptions, check_options, retention_of
from hpctrain.checkpoint.saving import SaveResult, Saving
from hpctrain.checkpoint.snapshot import HostBuffers
from hpctrain.checkpoint.state import State
from hpctrain.checkpoint.tiers import Tiers
from hpctrain.comm.agreement import agreed, all_gather_json, on_rank_0
from hpctrain.comm.communicator import Collective
from hpctrain.comm.doing import doing
from hpctrain.errors import CheckpointError, HpctrainError


@dataclass(frozen=True, kw_only=True, slots=True)
class _Report:
    """What one leader's background work came to."""

    local_s: float
    partner_s: float
    drain_s: float
    warning: str


@final
class TwoTier:
    """A save that goes to node-local storage first, and is drained from there. Made by `begin`.

    `advance` leads through three stages: the local save (a `Saving` of its own); copying to partner and shared
    folder, by the nodes' leaders in the background; the commit in the shared folder. What the run calls saved is
    what was committed there. An error leaves the local copies, from which the next start recovers.
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
        self._local_s = 0.0
        self._partial: Path | None = None
        self._copying: Future[_Report] | None = None

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
        topology = tiers.topology
        local = replace(
            options,
            keep=None,  # pruned by what is held, see `LocalStore.prune`
            files="node",
            node_of_rank=tuple(topology.node_of(rank) for rank in range(topology.num_ranks)),
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
        return self._copying is None or self._copying.done()

    def advance(self) -> SaveResult | None:
        """Wait for this rank's work of the present stage and begin the next; the result when all is done. Collective.

        Raises CheckpointError on every rank when a node cannot write to its local or to the shared folder. A copy
        that could not be made on a partner node is no error: the result's note says so.
        """
        if self._saving is None:
            with doing(self._comm, f"saving checkpoint step {self._step}: draining to the shared folder"):
                return self._commit()
        local = self._saving.advance()
        if local is not None:
            self._saving = None
            self._local_s = time.perf_counter() - self._begin_s
            with doing(self._comm, f"saving checkpoint step {self._step}: beginning to drain"):
                self._begin_copying(local)
        return None

    def finish(self) -> SaveResult:
        """`advance` until all is done. Collective."""
        while True:
            result = self.advance()
            if result is not None:
                return result

    # ------------------------------------------------------------------ stage 2: to the partner, to the shared folder

    def _begin_copying(self, local: SaveResult) -> None:
        """Collective."""
        self._local = local

        def prepare() -> str:
            return str(prepare_target(self._tiers.shared, step=self._step))

        partial = self._partial = Path(on_rank_0(self._comm, prepare))
        if self._tiers.is_leader:
            self._copying = _submit(
                self._executor, lambda: self._copy(local.path, save_id=local.id, partial=partial)
            )

    def _copy(self, step_path: Path, *, save_id: str, partial: Path) -> _Report:
        """A leader's work in the background. No communication but the partner's connection."""
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
        digest, partner_s, warning = "", 0.0, ""
        if tiers.partner is not None:
            try:
                sent = send_file(
                    path, offer=offer, partner=tiers.partner, token=tiers.token, pace=pace,
                    timeout_s=tiers.timeout_s, on_bytes=self._go_on,
                )  # fmt: skip
                digest, partner_s = sent.digest, sent.seconds
                store.note_own(path, offer=offer, digest=digest)
            except PartnerError as error:
                warning = str(error)
        target = part_path(partial, tiers.node)
        copied = copy_file(path, target, expected=digest, pace=pace, on_bytes=self._go_on)
        flush_folder(partial)
        store.prune(OWN)
        return _Report(local_s=self._local_s, partner_s=partner_s, drain_s=copied.seconds, warning=warning)

    def _go_on(self, num_bytes: int) -> None:
        if self._tiers.stopping.is_set():
            raise CheckpointError(
                f"step {self._step} was being copied from {self._tiers.store.own} when the run ended: the next start "
                "recovers it"
            )

    # ------------------------------------------------------------------ stage 3: the commit

    def _commit(self) -> SaveResult:
        """Collective."""
        partial, local = self._partial, self._local
        if partial is None or local is None:
            raise RuntimeError("the save has ended already")
        copying, self._copying = self._copying, None
        self._partial = None
        try:
            report = agreed(
                self._comm, lambda: copying.result() if copying else None, os_error=CheckpointError
            )
            found = on_rank_0(self._comm, lambda: self._commit_shared(partial, save_id=local.id))
        except HpctrainError:
            if self._comm.rank == 0:
                discard_target(partial)
            raise
        gathered = all_gather_json(self._comm, asdict(report) if report else None)
        reports = [_Report(**value) for value in gathered if value is not None]
        committed = Committed.from_json(found["committed"])
        assert committed.path is not None  # or else an error was raised
        return replace(
            local,
            path=committed.path,
            bytes=committed.num_bytes,
            seconds=time.perf_counter() - self._begin_s,
            note="; ".join([local.note, self._describe(reports), *found["notes"]]),
        )

    def _commit_shared(self, partial: Path, *, save_id: str) -> dict[str, Any]:
        committed = commit_target(partial, step=self._step, save_id=save_id)
        if committed.path is None:
            raise CheckpointError(f"what was drained of step {self._step} is damaged: {committed.reason}")
        retention = retention_of(self._options.keep)
        notes = retain(self._tiers.shared, saved=committed.path, retention=retention)
        return {"committed": committed.to_json(), "notes": notes}

    def _describe(self, reports: list[_Report]) -> str:
        local_s = max(report.local_s for report in reports)
        partner_s = max(report.partner_s for report in reports)
        drain_s = max(report.drain_s for report in reports)
        text = f"local after {local_s:.2f} s, drained in {drain_s:.2f} s"
        if self._tiers.topology.num_nodes > 1:
            text += f", copied to partners in {partner_s:.2f} s"
        return "; ".join([text, *(f"WARNING: {report.warning}" for report in reports if report.warning)])


def saving_through(
    tiers: Tiers, *, comm: Collective, options: SaveOptions | None = None
) -> Callable[..., TwoTier]:
    """For a `Saver`: saves through both tiers, committed in `tiers.shared`."""

    def begin(state: State, *, step: int, buffers: HostBuffers | None, executor: Executor | None) -> TwoTier:
        return TwoTier.begin(
            state, tiers=tiers, step=step, comm=comm, options=options, buffers=buffers, executor=executor
        )

    return begin


def _submit(executor: Executor | None, work: Callable[[], _Report]) -> Future[_Report]:
    """Run `work` in the executor, or now; what it raises is raised by `Future.result`."""
    if executor is not None:
        return executor.submit(work)
    done: Future[_Report] = Future()
    try:
        done.set_result(work())
    except (OSError, HpctrainError) as error:
        done.set_exception(error)
    return done
