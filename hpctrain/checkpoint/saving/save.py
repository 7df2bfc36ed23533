"""A save is a transaction: afterwards the checkpoint is complete and verified, or it does not exist.

It runs in phases. During a phase every rank works on files without communicating, in this thread or in another one.
Between phases all ranks exchange their results and start the next phase. So only the calling thread communicates,
and training can continue while files are written: the exchanges are small and happen at step boundaries.

1. Begin: the ranks agree on the layout and compare replicated tensors; the partial checkpoint is created, and the
   state is copied if requested.
2. Content: every rank writes its bytes and flushes them to disk.
3. Commit: rank 0 writes metadata and commit header, flushes, reads back, renames, and deletes checkpoints that are
no
   longer kept.

In `local` mode the leader of each file creates and renames a separate folder, on the storage of its node. The file
operations of a rank are in `rank_file_work`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, final

from hpctrain.checkpoint.engines.engine_choice import choose_engine
from hpctrain.checkpoint.engines.engine_name import Engine
from hpctrain.checkpoint.files.checkpoint_names import file_name, folder_name
from hpctrain.checkpoint.files.direct_io import Staging
from hpctrain.checkpoint.files.lustre_striping import alignment_of
from hpctrain.checkpoint.format.metadata import Metadata, collector_paused
from hpctrain.checkpoint.format.state import State, encode_document
from hpctrain.checkpoint.planning.file_layout import distrust, layout_for
from hpctrain.checkpoint.planning.rank_extents import content_of
from hpctrain.checkpoint.planning.replicas import ON_MISMATCH, ReplicaMismatch, compare_replicas
from hpctrain.checkpoint.retention.policy import Retention
from hpctrain.checkpoint.saving.background import HostBuffers, content_copied, submit
from hpctrain.checkpoint.saving.rank_file_work import NOT_AS_PLANNED, FileWork, begin_partial
from hpctrain.checkpoint.saving.save_options import SaveOptions, check_options, file_of_rank
from hpctrain.comm import Collective, agreed, doing, on_rank_0
from hpctrain.errors import CheckpointError, HpctrainError
from hpctrain.version import __version__


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """What a save wrote, where, and how long it took.

    Attributes:
        path: The finished checkpoint, a file or a folder.
        bytes: Total length of the checkpoint's files.
        seconds: Time from the start of the save to its commit, on this rank.
        own_write_s: Time in which this rank wrote and flushed its bytes, in seconds. With the engine `mpio` it
            includes waiting for other ranks.
        engine: The engine that wrote the files.
        note: Why this engine was chosen, and any warnings.
        id: Identifier of the save, 16 hex digits, as in the metadata.
        step: Step of the checkpoint.
    """

    path: Path
    bytes: int
    seconds: float
    own_write_s: float
    engine: Engine
    note: str
    id: str
    step: int


class _Phase(Enum):
    CONTENT = "writing"
    COMMIT = "committing"
    DONE = "done"


@final
class Saving:
    """A save in progress. Create it with `begin`, then call `advance` on every rank until it returns the result."""

    def __init__(
        self,
        *,
        directory: Path,
        step: int,
        comm: Collective,
        options: SaveOptions,
        buffers: HostBuffers | None,
        executor: Executor | None,
    ) -> None:
        """Do not call this; use `begin`."""
        self.step = step
        self.path: Path  # the finished checkpoint
        self._directory = directory
        self._comm = comm
        self._options = options
        self._buffers = buffers
        self._executor = executor
        self._begin_s = time.perf_counter()
        self._phase = _Phase.CONTENT
        self._own_write_s = 0.0
        self._work: Future[Any] = Future()
        self._files: FileWork
        self._notes: Sequence[str] = ()
        # Kept to restart the save if it reused the layout of the save before, but dtypes or shapes have changed.
        self._state: State | None = None
        self._sample: int | None = None  # number of the sample of replicated tensors

    @classmethod
    def begin(
        cls,
        state: State,
        *,
        directory: Path | str,
        step: int,
        comm: Collective,
        options: SaveOptions = SaveOptions(),
        buffers: HostBuffers | None = None,
        executor: Executor | None = None,
    ) -> Saving:
        """Starts a save: agrees on the layout, allocates the files, copies the state, and starts writing. Collective.

        Only one save at a time may write to a directory.

        Args:
            state: This rank's part of the content.
            directory: Directory of the checkpoints, created if necessary; the same on every rank.
            step: Step of the checkpoint, which its name contains; the same on every rank.
            comm: The ranks that save together.
            options: Options of the save, the same on every rank.
            buffers: Host memory for a copy of the state. With it, the tensors may change as soon as this returns;
                without it, they must not change until the save is finished.
            executor: Runs the file operations, which do not communicate. None: they run in the calling thread, here
                and in `advance`.

        Returns:
            The save, whose bytes are being written.

        Raises:
            CheckpointError: On every rank, if the ranks' states are inconsistent, if replicated tensors differ, or
                if the directory cannot be written to. The partial checkpoint is removed; older checkpoints are
                untouched. Without `buffers` and `executor`, an inconsistent state may be reported by `advance`
                instead.
            UsageError: On every rank, for an invalid argument.
        """
        with doing(comm, f"saving checkpoint step {step}: beginning"), collector_paused():
            saving = cls(
                directory=Path(directory), step=step, comm=comm, options=options, buffers=buffers,
                executor=executor,
            )  # fmt: skip
            saving._begin(state, trusting=buffers is None and executor is None)
            return saving

    def _begin(self, state: State, *, trusting: bool, warning: str = "") -> None:
        """Begins the save, or begins it again after a failed assumption about the state. Collective.

        `trusting` assumes the dtypes and shapes of the previous save, which are then checked while writing.
        `warning` is added to the note of the result.
        """
        comm, options, step, directory = self._comm, self._options, self.step, self._directory
        requested = agreed(comm, lambda: check_options(options, step=step, num_ranks=comm.num_ranks))
        files = file_of_rank(options, num_ranks=comm.num_ranks)
        choice = choose_engine(
            requested, directory=directory, comm=comm, in_background=self._executor is not None
        )
        self.path = directory / (file_name(step) if options.files == 1 else folder_name(step))
        sources = state.sources()
        header = Metadata(
            step=step, created_unix_s=time.time(), document=state.document, parent=state.parent, tensors={},
            writer={
                "hpctrain": __version__, "num_ranks": comm.num_ranks, "engine": choice.engine.value,
                "files": max(files) + 1,
            },
        )  # fmt: skip
        layout = layout_for(
            state, sources=sources, step=step, comm=comm, file_of_rank=files,
            alignment=alignment_of(choice.filesystem), header=header, trusting=trusting,
        )  # fmt: skip
        if self._sample is None:  # a restarted save compares the same sample
            self._sample = next(layout.replicas.numbers)
        try:
            mismatch = compare_replicas(
                layout.replicas, sources, number=self._sample, comm=comm, how=options.replica_check,
                on_mismatch=options.on_replica_mismatch,
            )  # fmt: skip
        except CheckpointError:
            if not trusting:
                raise
            distrust(comm)
            self._begin(state, trusting=False)
            return
        if mismatch is not None:
            if trusting:  # perhaps because dtypes or shapes changed: planning again reports that
                self._begin(state, trusting=False)
            else:
                self._begin(state.from_rank_0(), trusting=False, warning=self._warn_or_raise(mismatch))
            return
        partial, unique, note = begin_partial(
            directory, self.path.name, layout=layout, choice=choice, comm=comm, options=options
        )
        if self._executor is not None:
            # Copy the document: it is written later, and the caller may change it before.
            frozen = json.loads(encode_document({"document": state.document, "parent": state.parent}))
            header = replace(header, document=frozen["document"], parent=frozen["parent"])
        self._files = work = FileWork(
            final=self.path, partial=partial, comm=comm, layout=layout, choice=choice, options=options,
            header=replace(header, id=unique),
        )  # fmt: skip
        self._notes = [choice.note, "past the page cache" if work.bypasses_cache else "", note, warning]
        self._state = state if trusting else None
        staging = Staging()
        if self._buffers is None:
            groups = layout.groups(sources, staging=staging)
            content = content_of(sources, layout.own, groups=groups, staging=staging)
        else:
            content = content_copied(sources, layout.own, buffers=self._buffers)

        def write() -> bytes:
            began_s = time.perf_counter()
            hashes = work.write_content(content, staging=staging)
            self._own_write_s = time.perf_counter() - began_s
            return hashes

        self._start(write)

    def _warn_or_raise(self, mismatch: ReplicaMismatch) -> str:
        """Raises CheckpointError for replicated tensors that differ, or warns if rank 0's copies are to be saved.

        Returns the warning's text for the note of the result.
        """
        if self._options.on_replica_mismatch == "error":
            raise CheckpointError(f"{mismatch.describe()}. {ON_MISMATCH}", agreed=True)
        if self._comm.rank == 0:
            print(
                f"hpctrain: WARNING: checkpoint of step {self.step}: {mismatch.describe()}. Rank 0's copies of all "
                "replicated tensors are saved; the other ranks keep theirs",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        return "WARNING: replicated tensors differ between ranks, rank 0's are saved"

    def ready(self) -> bool:
        """Returns True if `advance` would not wait for this rank's work of the current phase. Not collective."""
        return self._phase is _Phase.DONE or self._work.done()

    def advance(self) -> SaveResult | None:
        """Ends the current phase and starts the next one, or restarts the save. Collective.

        Waits until this rank's work is done (see `ready`).

        Returns:
            The result once the checkpoint is committed, until then None.

        Raises:
            CheckpointError: On every rank, if any rank fails. The partial checkpoint is removed; older ones are
                untouched.
        """
        with (
            doing(self._comm, f"saving checkpoint step {self.step}: {self._phase.value}"),
            collector_paused(),
        ):
            if self._phase is _Phase.CONTENT:
                self._end_content()
                return None
            return self._end_commit()

    def finish(self) -> SaveResult:
        """Calls `advance` until the checkpoint is committed, and returns the result. Collective.

        Raises as `advance`.
        """
        while True:
            result = self.advance()
            if result is not None:
                return result

    # ------------------------------------------------------------------ phases

    def _end_content(self) -> None:
        results = self._comm.all_gather_bytes(self._agreed_work())
        state, self._state = self._state, None
        if NOT_AS_PLANNED not in results:
            self._phase = _Phase.COMMIT
            self._start(lambda: self._files.commit(results))
            return
        self._undo()
        distrust(self._comm)
        if state is None:  # the layout was planned for this state, so the state changed since
            raise CheckpointError("a tensor's dtype or shape changed during the save", agreed=True)
        self._begin(state, trusting=False)
        self._phase = _Phase.CONTENT

    def _end_commit(self) -> SaveResult:
        done = self._agreed_work()
        done["notes"] += self._files.after_commit()
        summary = on_rank_0(self._comm, lambda: done)
        self._phase = _Phase.DONE
        return SaveResult(
            path=self.path, bytes=summary["bytes"], seconds=time.perf_counter() - self._begin_s,
            own_write_s=self._own_write_s,
            engine=self._files.choice.engine, note="; ".join(filter(None, [*self._notes, *summary["notes"]])),
            id=self._files.header.id, step=self.step,
        )  # fmt: skip

    def _agreed_work(self) -> Any:
        """Waits for all ranks' work of this phase and returns this rank's result. Collective.

        If any rank failed, removes the partial checkpoint and raises on every rank.
        """
        try:
            return agreed(self._comm, self._work.result, os_error=CheckpointError)
        except HpctrainError:
            self._state = None
            self._undo()
            raise

    def _undo(self) -> None:
        committing, self._phase = self._phase is _Phase.COMMIT, _Phase.DONE
        self._files.undo(committing=committing)

    def _start(self, work: Callable[[], Any]) -> None:
        self._work = submit(self._executor, work)


def save(
    state: State,
    *,
    directory: Path | str,
    step: int,
    comm: Collective,
    keep: Retention | int | None = 3,
    engine: Engine | str = Engine.AUTO,
    **options: Any,
) -> SaveResult:
    """Writes a checkpoint of all ranks' `state` to `directory`. Collective.

    When this returns, the checkpoint is on disk under its final name, its structure has been read back, and older
    checkpoints that `keep` does not retain are deleted. A checkpoint of the same step is replaced. Partial
    checkpoints of killed saves are removed first, so only one run at a time may save to a directory.

    Args:
        state: This rank's part of the content.
        directory: Directory of the checkpoints, created if necessary; the same on every rank.
        step: Step of the checkpoint, 0 or more; the same on every rank.
        comm: The ranks that save together, such as `session.world`.
        keep: Which checkpoints to keep: a `Retention`, the number of the newest ones to keep, or None for all.
        engine: How the bytes are written; the content of the files does not depend on it.
        **options: Further fields of `SaveOptions`, such as `files` or `limit_mb_per_s`.

    Returns:
        Path, size and duration of the finished checkpoint.

    Raises:
        CheckpointError: On every rank, if the ranks' states are inconsistent, if replicated tensors differ, or if a
            rank cannot write. The partial checkpoint is removed; older ones are untouched.
        UsageError: On every rank, for an invalid argument.
    """
    chosen = SaveOptions(keep=keep, engine=engine, **options)
    with collector_paused():  # also between the phases
        return Saving.begin(state, directory=directory, step=step, comm=comm, options=chosen).finish()
