"""Two-tier saves: a checkpoint is saved to node storage first, then drained to the folder that all nodes share.

A save writes one file per node to node storage, at the speed of the node's disk. Then, in the background, each
node's leader (its lowest rank) sends the file to a partner node, so that the loss of one node loses no data, and
copies it to the shared folder, where rank 0 commits the checkpoint. After a crash, `hpctrain.checkpoint.recover`
drains the files that were not yet in the shared folder.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from hpctrain.checkpoint.files.checkpoint_names import part_path
from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.format.state import State
from hpctrain.checkpoint.retention.delete_old import retain
from hpctrain.checkpoint.retention.policy import Retention
from hpctrain.checkpoint.saving.background import HostBuffers, submit
from hpctrain.checkpoint.saving.rank_file_work import flush_folder
from hpctrain.checkpoint.saving.save import (
    CheckpointSave,
    Phase,
    Phases,
    SaveResult,
    agreed_result,
    phases_of_save,
)
from hpctrain.checkpoint.saving.save_options import SaveOptions, check_save_options, retention_of
from hpctrain.checkpoint.tiers.drain import Pace, commit_target, copy_file, discard_target, prepare_target
from hpctrain.checkpoint.tiers.node_store import (
    OWN,
    LocalStore,
    forget_under,
    note_directory,
    others_of,
    own_file,
    run_key,
)
from hpctrain.checkpoint.tiers.partner_copy import (
    DEFAULT_TIMEOUT_S,
    Offer,
    PartnerAddress,
    PartnerError,
    PartnerServer,
    greet,
    send_file,
)
from hpctrain.comm import Collective, agreed, all_gather_json, doing, on_rank_0
from hpctrain.errors import CheckpointError, LaunchError, UsageError
from hpctrain.storage import replace_file
from hpctrain.topology import Topology

_TOKEN_BYTES = 32


@final
class Tiers:
    """The two locations of a run's checkpoints, node storage and a shared folder. Create it with `open`.

    Also connects this node to its partner node, to which the node's files are copied.

    Attributes:
        shared: Directory of the finished checkpoints, which all nodes share.
        store: This node's folder on node storage.
        topology: States which rank runs on which node.
        node: Index of this rank's node in the topology.
        is_leader: True on the lowest rank of each node, which copies the node's file.
        partner: Address of the node to which this node's file is copied; None on ranks other than leaders, and if
            there is only one node.
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
        partners: bool = True,
    ) -> Tiers:
        """Opens the two locations of a run's checkpoints, node storage and the shared folder. Collective.

        Creates this node's folder `local/<run>/<node>`. Connects each node to the next node, its partner, to which the
        node's files are copied.

        Args:
            local: A directory on node storage; its path may differ between nodes.
            shared: Directory of the finished checkpoints, which all nodes share.
            topology: Which rank runs on which node, such as `session.topology`.
            comm: All ranks of the topology.
            run: Name of the run's folder on node storage. None: derived from the path of `shared`, so that a run
                that is started again with the same path recovers what the earlier one left on the nodes.
            keep_local: Number of checkpoints to keep on node storage, at least 1.
            timeout_s: Longest time to wait for an answer from a partner, in seconds.
            partners: False if nodes are not to be connected, because no checkpoint will be saved through the tiers.

        Returns:
            The two locations. Call `close` at the end of the run.

        Raises:
            UsageError: On every rank, for an invalid argument.
            CheckpointError: On every rank, if a node cannot write to its folder or cannot reach its partner.
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
            tiers._connect(comm, partners=partners)
        except BaseException:
            tiers.close()
            raise
        return tiers

    def _connect(self, comm: Collective, *, partners: bool) -> None:
        """Prepares folders, and starts a server on the lowest rank (leader) of each node. Collective.

        With `partners`, connects each leader to its partner, the leader of the next node.
        """

        def begin() -> dict[str, Any] | None:
            if not self.is_leader:
                return None
            self.store.prepare()
            note_directory(self.store.base, shared=self.shared)
            if self.topology.num_nodes == 1 or not partners:
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
        """Lists folders on the nodes with checkpoints of other runs that used the same shared directory. Collective.

        Args:
            comm: All ranks of the topology.

        Returns:
            The name of each folder with its newest step, as text.

        Raises:
            CheckpointError: On every rank, if a node cannot read its storage.
        """
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
        """Removes the nodes' files of step `from_step` and later. Collective.

        A run must call `forget` if it starts from scratch, or resumes from an older checkpoint than the newest.
        Otherwise the next start of the run would recover steps that this start has discarded.

        Args:
            from_step: The first step to remove.
            comm: All ranks of the topology.

        Raises:
            CheckpointError: On every rank, if a node cannot remove its files.
        """
        agreed(
            comm,
            lambda: forget_under(self.store.base, from_step=from_step) if self.is_leader else None,
            os_error=CheckpointError,
        )

    def begin_save(
        self,
        state: State,
        *,
        step: int,
        comm: Collective,
        options: SaveOptions | None = None,
        buffers: HostBuffers | None = None,
        executor: Executor | None = None,
    ) -> CheckpointSave:
        """Starts a save to node storage, from which the checkpoint is then copied to the shared folder. Collective.

        First removes the nodes' files of this step and later steps, since the run will write these files again. The
        checkpoint counts as saved once it is committed in the shared folder. A failed copy to a partner node is not an
        error; the note of the result reports it. After an error the files on node storage remain, and the next start of
        the run recovers the checkpoint from them.

        Args:
            state: This rank's part of the content.
            step: Step of the checkpoint; the same on every rank.
            comm: All ranks of the topology that these tiers were opened with.
            options: As in `CheckpointSave.begin`, but `files`, `node_of_rank` and `local` are overridden, and `keep`
                applies to the shared folder.
            buffers: Host memory for a copy of the state. With `buffers`, the tensors may change as soon as this
                returns.
            executor: Runs the writing and copying of files; None: they run at once, in the calling thread.

        Returns:
            The save in progress; its files on node storage are being written.

        Raises:
            CheckpointError: On every rank, as in `CheckpointSave.begin`.
            UsageError: On every rank, as in `CheckpointSave.begin`.
        """
        options = options or SaveOptions()
        on_nodes = replace(
            options,
            keep=None,  # `LocalStore.prune` removes old ones
            files="node",
            node_of_rank=self.topology.node_of_rank,
            local=True,
        )
        phases_on_nodes = phases_of_save(
            state, directory=self.store.own, step=step, comm=comm, options=on_nodes, buffers=buffers,
            executor=executor,
        )  # fmt: skip
        phases = _phases_through_tiers(
            self, phases_on_nodes, on_nodes=on_nodes, step=step, comm=comm, options=options, executor=executor
        )
        return CheckpointSave(phases, step=step, comm=comm)

    def close(self) -> None:
        """Stops receiving and sending copies of checkpoint files. Not collective; may be called twice."""
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


# A save through both tiers.


def _phases_through_tiers(
    tiers: Tiers, phases_on_nodes: Phases, *, on_nodes: SaveOptions, step: int, comm: Collective,
    options: SaveOptions, executor: Executor | None,
) -> Phases:  # fmt: skip
    """Generator of the phases of a save to node storage and then to the shared folder. Collective.

    The phases are those of the save on the nodes (`phases_on_nodes`), then the copying to partner nodes and to the
    shared folder, then the commit in the shared folder. Returns the `SaveResult`.
    """
    agreed(comm, lambda: check_save_options(on_nodes, step=step, num_ranks=comm.num_ranks))
    created_unix_s = on_rank_0(comm, time.time)
    tiers.forget(from_step=step, comm=comm)
    local = yield from phases_on_nodes

    # The nodes' leaders copy their files to the partner and to a partial checkpoint in the shared folder.
    with doing(comm, f"saving checkpoint step {step}: beginning to drain"):
        partial = Path(on_rank_0(comm, lambda: str(prepare_target(tiers.shared, step=step))))

    def undo() -> None:
        if comm.rank == 0:
            discard_target(partial)

    def copy() -> str:
        if not tiers.is_leader:
            return ""
        return _copy_from_node(
            tiers, local, partial=partial, created_unix_s=created_unix_s,
            pace=Pace(limit_mb_per_s=options.limit_mb_per_s),
        )  # fmt: skip

    copying = submit(executor if tiers.is_leader else None, copy)
    yield Phase("draining to the shared folder", copying)
    warning = agreed_result(copying, comm=comm, undo=undo)
    warnings = [text for text in all_gather_json(comm, warning) if text]

    # All files are in the shared folder: rank 0 commits the checkpoint.
    def commit() -> dict[str, Any]:
        if comm.rank != 0:
            return {}
        return _commit_shared(tiers, partial, save_id=local.id, step=step, keep=retention_of(options.keep))

    committing = submit(executor if comm.rank == 0 else None, commit)
    yield Phase("committing in the shared folder", committing)
    committed = agreed_result(committing, comm=comm, undo=undo)
    of_rank_0 = on_rank_0(comm, lambda: committed)
    return replace(
        local,
        path=Path(of_rank_0["path"]),
        bytes=of_rank_0["bytes"],
        note="; ".join(filter(None, [local.note, *warnings, *of_rank_0["notes"]])),
    )


def _copy_from_node(
    tiers: Tiers, local: SaveResult, *, partial: Path, created_unix_s: float, pace: Pace
) -> str:
    """Copies this node's file of a checkpoint to the partner node and to the shared folder. Returns a warning, or "".

    `partial` is the checkpoint in the shared folder, which is not complete yet. Not collective: the lowest rank of each
    node runs this in the background, and communicates only with the partner node.
    """

    def raise_if_stopped(num_bytes: int) -> None:
        if tiers.stopping.is_set():
            raise CheckpointError(
                f"the run ended while step {local.step} was being copied from {store.own}; the next start recovers it"
            )

    store, path = tiers.store, own_file(local.path)
    with explained(action="read", path=path):
        num_bytes = path.stat().st_size
    offer = Offer(
        step=local.step, save_id=local.id, file=tiers.node, num_files=tiers.topology.num_nodes,
        num_bytes=num_bytes, created_unix_s=created_unix_s,
    )  # fmt: skip
    store.note_own(path, offer=offer)
    digest, warning = "", ""
    if tiers.partner is not None:
        try:
            sent = send_file(
                path, offer=offer, partner=tiers.partner, token=tiers.token, pace=pace,
                timeout_s=tiers.timeout_s, on_bytes=raise_if_stopped,
            )  # fmt: skip
            digest = sent.digest
            store.note_own(path, offer=offer, digest=digest)
        except PartnerError as error:
            warning = f"WARNING: {error}"
    copy_file(path, part_path(partial, tiers.node), expected=digest, pace=pace, on_bytes=raise_if_stopped)
    flush_folder(partial)
    store.prune(OWN)
    return warning


def _commit_shared(
    tiers: Tiers, partial: Path, *, save_id: str, step: int, keep: Retention
) -> dict[str, Any]:
    """Finishes a checkpoint that was copied to the shared folder: verifies it, renames it, deletes old checkpoints.

    Returns a dict with its path, its size in bytes, and messages for the user.
    """
    committed = commit_target(partial, step=step, save_id=save_id)
    if committed.path is None:
        raise CheckpointError(f"the drained copy of step {step} is damaged: {committed.reason}")
    notes = retain(tiers.shared, saved=committed.path, retention=keep)
    return {"path": str(committed.path), "bytes": committed.num_bytes, "notes": notes}


def saving_through(
    tiers: Tiers, *, comm: Collective, options: SaveOptions | None = None
) -> Callable[..., CheckpointSave]:
    """Returns the function that a `Saver` calls to start saves to node storage and then to the shared folder.

    This function is not collective, but the returned function is.

    Args:
        tiers: The two locations; checkpoints are committed in `tiers.shared`.
        comm: All ranks of the topology that `tiers` was opened with.
        options: Options of each save, as in `Tiers.begin_save`; None: the defaults.
    """
    return functools.partial(tiers.begin_save, comm=comm, options=options)


class OldTwoTier:
    """Deprecated `TwoTier`, whose `begin` starts a save to node storage; `Tiers.begin_save` replaces it."""

    @staticmethod
    def begin(state: State, *, tiers: Tiers, **arguments: Any) -> CheckpointSave:
        return tiers.begin_save(state, **arguments)


# The identity of a run, which connects its directory with the checkpoints on its nodes.
#
# The file `run-id` in the run directory contains the identity and, in a second line, the path of the directory. A
# directory that is moved keeps its identity, a copy gets another one, and the identity is removed with the directory.


RUN_ID = "run-id"
_VALID = re.compile(r"[A-Za-z0-9_-]{1,100}")
# Files of a run that has begun, by which a run of an earlier version is recognized: those wrote no identity.
_OF_A_RUN = ("starts.jsonl", "recipe.toml")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """Identity of a run, which connects the run's directory with its checkpoints on node storage.

    `id` is the name of the run's folder on node storage. `is_new` is True if the run directory had no identity
    before.
    """

    id: str
    is_new: bool


def identify_run(directory: Path, *, checkpoints: Path, comm: Collective) -> RunIdentity:
    """Returns the identity of the run in the existing `directory`; a run without an identity gets one. Collective.

    `checkpoints` is the directory to which the run saves; runs of earlier versions are identified by the path of
    `checkpoints`. Raises LaunchError on every rank if the file with the identity cannot be read or written.
    """
    found = on_rank_0(comm, lambda: _identify(directory, checkpoints=checkpoints))
    return RunIdentity(id=found[0], is_new=found[1])


def _identify(directory: Path, *, checkpoints: Path) -> tuple[str, bool]:
    path = directory / RUN_ID
    here = os.path.realpath(directory)
    found = _read(path)
    if found is not None:
        known, where = found
        if where == here:
            return known, False
        if not _is_copied(known, where=where, directory=directory):
            _write(path, known, here=here)
            return known, False
    elif any((directory / name).exists() for name in _OF_A_RUN):
        known = run_key(checkpoints)
        _write(path, known, here=here)
        return known, False
    label = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(here).name).strip("-")[:60] or "run"
    new = f"{label}-{secrets.token_hex(8)}"
    _write(path, new, here=here)
    return new, True


def _is_copied(known: str, *, where: str, directory: Path) -> bool:
    """Returns True if `directory` is a copy of the run directory `where`, which still has the identity `known`."""
    if not where:
        return False
    try:
        other = _read(Path(where) / RUN_ID)
        return other is not None and other[0] == known and not os.path.samefile(where, directory)
    except (OSError, LaunchError):
        return False


def _read(path: Path) -> tuple[str, str] | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise LaunchError(f"{path}, which holds the run's identity, cannot be read: {error}") from error
    known = lines[0].strip() if lines else ""
    if not _VALID.fullmatch(known):
        raise LaunchError(
            f"{path} must hold the run's identity in its first line (letters, digits, - and _), not {known!r:.60}: "
            "delete the file to get a new identity; checkpoints that are only on nodes are then not recovered"
        )
    return known, lines[1].strip() if len(lines) > 1 else ""


def _write(path: Path, known: str, *, here: str) -> None:
    try:
        replace_file(
            path, f"{known}\n{here}\n".encode(), partial=path.with_name(f".{RUN_ID}.{secrets.token_hex(8)}")
        )
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror}") from error
