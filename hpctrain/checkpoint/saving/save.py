"""A save is a transaction: afterwards the checkpoint is complete and verified, or it does not exist.

The function `phases_of_save` is the whole save, from top to bottom: the ranks agree on the layout and compare
replicated tensors, every rank writes its bytes and flushes them, rank 0 writes the metadata, and a rename commits
the checkpoint.

During a phase every rank works on files without communicating, in the calling thread or in another thread. Between
phases all ranks exchange their results and start the next phase. So only the calling thread communicates, and training
can continue while files are written: the exchanges are small and happen at step boundaries.

In `local` mode the leader of each file creates and renames a separate folder, on the storage of its node. The file
operations of a rank are in `rank_file_work`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar, final

from hpctrain.checkpoint.engines.engine_choice import EngineChoice, choose_engine
from hpctrain.checkpoint.engines.engine_name import Engine
from hpctrain.checkpoint.files.checkpoint_names import file_name, folder_name
from hpctrain.checkpoint.files.direct_io import Staging
from hpctrain.checkpoint.files.lustre_striping import alignment_of
from hpctrain.checkpoint.format.metadata import Metadata, collector_paused
from hpctrain.checkpoint.format.state import Item, State, encode_document
from hpctrain.checkpoint.planning.file_layout import FileLayout, layout_for
from hpctrain.checkpoint.planning.rank_extents import content_of
from hpctrain.checkpoint.planning.replicas import ON_MISMATCH, ReplicaMismatch, compare_replicas
from hpctrain.checkpoint.retention.policy import Retention
from hpctrain.checkpoint.saving.background import HostBuffers, content_copied, submit
from hpctrain.checkpoint.saving.rank_file_work import FileWork, create_partial
from hpctrain.checkpoint.saving.save_options import SaveOptions, check_save_options, file_of_rank
from hpctrain.comm import Collective, agreed, doing, on_rank_0
from hpctrain.errors import CheckpointError, HpctrainError
from hpctrain.public_names import warn_of_old_name
from hpctrain.version import __version__

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """What a save wrote, where, and how long it took.

    Attributes:
        path: The finished checkpoint, a file or a folder.
        bytes: Total length of the checkpoint's files.
        seconds: Time from the start of the save to its commit, on this rank.
        stall_s: The part of `seconds` in which the save blocked the calling thread, and so the training.
        own_write_s: Time in which this rank wrote and flushed its bytes, in seconds. With the engine `mpio` this time
            includes waiting for other ranks.
        engine: The engine that wrote the files.
        note: Why this engine was chosen, and any warnings.
        id: Identifier of the save, 16 hex digits, as in the metadata.
        step: Step of the checkpoint.
    """

    path: Path
    bytes: int
    seconds: float = 0.0
    stall_s: float = 0.0
    own_write_s: float
    engine: Engine
    note: str
    id: str
    step: int

    @property
    def mb_per_s(self) -> float:
        return self.bytes / 1e6 / self.seconds if self.seconds > 0 else 0.0

    @property
    def result(self) -> SaveResult:
        """Deprecated: returns this object.

        Earlier versions passed an object with this attribute to `on_saved`.
        """
        warn_of_old_name("Saved.result", use="the SaveResult that on_saved is called with")
        return self

    @property
    def write_s(self) -> float:
        """Deprecated name of `seconds`."""
        warn_of_old_name("Saved.write_s", use="SaveResult.seconds")
        return self.seconds


class Phase(NamedTuple):
    """A part of a save in which every rank works without communicating.

    Attributes:
        name: What the ranks do, for the message that is printed if they wait too long for each other.
        work: This rank's work, which may run in another thread.
    """

    name: str
    work: Future[Any]


# A save as a generator: it yields each phase when this rank's work has been submitted, and is resumed, on all ranks
# at the same point of the program, to wait for the work of all ranks. Its times are filled in by `CheckpointSave`.
Phases: TypeAlias = Generator[Phase, None, SaveResult]


@final
class CheckpointSave:
    """A save in progress. Create it with `begin`, then call `advance` on every rank until it returns the result."""

    def __init__(self, phases: Phases, *, step: int, comm: Collective) -> None:
        """Do not call this; use `begin`. Runs the generator `phases` up to its first phase. Collective."""
        self.step = step
        self._comm = comm
        self._phases = phases
        self._phase: Phase | None = None  # None: the save has ended
        self._begin_s = time.perf_counter()
        self._stall_s = 0.0
        self._resume("beginning")

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
    ) -> CheckpointSave:
        """Starts a save: plans it with all ranks, allocates the files, copies the state, starts writing. Collective.

        Only one save at a time may write to a directory.

        Args:
            state: This rank's part of the content.
            directory: Directory of the checkpoints, created if necessary; the same on every rank.
            step: Step of the checkpoint, which its name contains; the same on every rank.
            comm: The ranks that save together.
            options: Options of the save, the same on every rank.
            buffers: Host memory for a copy of the state. With `buffers`, the tensors may change as soon as this
                returns; without, they must not change until the save is finished.
            executor: Runs the file operations, which do not communicate. None: the file operations run in the
                calling thread, in this call and in `advance`.

        Returns:
            The save in progress, in its first phase (writing).

        Raises:
            CheckpointError: On every rank, if the ranks' states are inconsistent, if replicated tensors differ, or if
                the directory cannot be written to. The incomplete checkpoint is removed; older checkpoints are
                untouched.
            UsageError: On every rank, for an invalid argument.
        """
        phases = phases_of_save(
            state, directory=Path(directory), step=step, comm=comm, options=options, buffers=buffers,
            executor=executor,
        )  # fmt: skip
        return cls(phases, step=step, comm=comm)

    def ready(self) -> bool:
        """Returns True if `advance` would not wait for this rank's work of the current phase. Not collective."""
        return self._phase is None or self._phase.work.done()

    def advance(self) -> SaveResult | None:
        """Ends the current phase and starts the next one. Collective.

        Waits until this rank's work is done (see `ready`).

        Returns:
            The result once the checkpoint is committed, until then None.

        Raises:
            CheckpointError: On every rank, if any rank fails. The incomplete checkpoint is removed; older checkpoints
                are untouched.
        """
        if self._phase is None:
            raise RuntimeError(f"the save of step {self.step} has ended already")
        return self._resume(self._phase.name)

    def finish(self) -> SaveResult:
        """Calls `advance` until the checkpoint is committed, and returns the result. Collective.

        Raises the errors of `advance`.
        """
        while True:
            result = self.advance()
            if result is not None:
                return result

    def _resume(self, what: str) -> SaveResult | None:
        resumed_s = time.perf_counter()
        self._phase = None  # if the next line raises, the save has ended
        result: SaveResult | None = None
        with doing(self._comm, f"saving checkpoint step {self.step}: {what}"), collector_paused():
            try:
                self._phase = next(self._phases)
            except StopIteration as ended:
                result = ended.value
        now_s = time.perf_counter()
        self._stall_s += now_s - resumed_s
        if result is None:
            return None
        return replace(result, seconds=now_s - self._begin_s, stall_s=self._stall_s)


def phases_of_save(
    state: State,
    *,
    directory: Path,
    step: int,
    comm: Collective,
    options: SaveOptions,
    buffers: HostBuffers | None,
    executor: Executor | None,
) -> Phases:
    """Generator that plans, writes and commits a checkpoint of `state`. Collective.

    Yields each phase (`Phase`), in which the ranks work without communicating, and at the end returns the `SaveResult`.
    The arguments are those of `CheckpointSave.begin`.
    """
    # Which rank writes which bytes, and where: the ranks agree, and rank 0 or each file's leader creates the files.
    requested = agreed(comm, lambda: check_save_options(options, step=step, num_ranks=comm.num_ranks))
    choice = choose_engine(requested, directory=directory, comm=comm, in_background=executor is not None)
    sources, header, layout, warning = _agree_on_layout(
        state, step=step, comm=comm, options=options, choice=choice
    )
    final = directory / (file_name(step) if options.files == 1 else folder_name(step))
    partial, save_id, note = create_partial(
        directory, final.name, layout=layout, choice=choice, comm=comm, options=options
    )
    if executor is not None:
        header = _with_copied_document(header)
    files = FileWork(
        final=final, partial=partial, comm=comm, layout=layout, choice=choice, options=options,
        header=replace(header, id=save_id),
    )  # fmt: skip
    notes = [choice.note, "past the page cache" if files.bypasses_cache else "", note, warning]

    # Every rank writes its bytes and flushes them.
    staging = Staging()
    if buffers is not None:
        content = content_copied(sources, layout.own, buffers=buffers)
    else:
        groups = layout.own.groups if executor is None else layout.groups_unchanged(sources)
        content = content_of(sources, layout.own, groups=groups, staging=staging)
    del state, sources  # if the content is a copy, the caller may free the tensors while it is written

    def write() -> tuple[bytes, float]:
        begin_s = time.perf_counter()
        return files.write_content(content, staging=staging), time.perf_counter() - begin_s

    writing = submit(executor, write)
    yield Phase("writing", writing)
    written, own_write_s = agreed_result(writing, comm=comm, undo=lambda: files.undo(committing=False))

    # All bytes are on disk: rank 0 adds metadata and commit header, reads them back, and renames the checkpoint.
    written_by_rank = comm.all_gather_bytes(written)
    committing = submit(executor, lambda: files.commit(written_by_rank))
    yield Phase("committing", committing)
    committed = agreed_result(committing, comm=comm, undo=lambda: files.undo(committing=True))
    committed["notes"] += files.after_commit()
    of_rank_0 = on_rank_0(comm, lambda: committed)
    return SaveResult(
        path=final, bytes=of_rank_0["bytes"], own_write_s=own_write_s, engine=choice.engine,
        note="; ".join(filter(None, [*notes, *of_rank_0["notes"]])), id=save_id, step=step,
    )  # fmt: skip


def agreed_result(work: Future[T], *, comm: Collective, undo: Callable[[], None]) -> T:
    """Waits until every rank's `work` in a phase of a save has ended, and returns this rank's result. Collective.

    If the work failed on any rank, calls `undo` and raises the error on every rank.
    """
    try:
        return agreed(comm, work.result, os_error=CheckpointError)
    except HpctrainError:
        undo()
        raise


def _agree_on_layout(
    state: State, *, step: int, comm: Collective, options: SaveOptions, choice: EngineChoice
) -> tuple[list[Item], Metadata, FileLayout, str]:
    """Plans a save, and compares the ranks' copies of replicated tensors. Collective.

    Returns the items to save (this rank's tensors); the metadata without tensors, parts and hashes; the file layout
    (which bytes this rank writes, and where); and a warning or "". If copies of replicated tensors differ and the
    options allow that, the returned items save rank 0's values.
    """
    files = file_of_rank(options, num_ranks=comm.num_ranks)
    header = Metadata(
        step=step, created_unix_s=time.time(), document=state.document, parent=state.parent, tensors={},
        writer={
            "hpctrain": __version__, "num_ranks": comm.num_ranks, "engine": choice.engine.value,
            "files": max(files) + 1,
        },
    )  # fmt: skip

    def layout_of(state: State, sources: list[Item]) -> FileLayout:
        return layout_for(
            state, sources=sources, step=step, comm=comm, file_of_rank=files,
            alignment=alignment_of(choice.filesystem), header=header,
        )  # fmt: skip

    sources = state.sources()
    layout = layout_of(state, sources)
    mismatch = compare_replicas(
        layout.replicas, sources, number=next(layout.replicas.numbers), comm=comm,
        how=options.replica_check, on_mismatch=options.on_replica_mismatch,
    )  # fmt: skip
    if mismatch is None:
        return sources, header, layout, ""
    warning = _warn_or_raise(mismatch, step=step, comm=comm, options=options)
    state = state.from_rank_0()
    sources = state.sources()
    return sources, header, layout_of(state, sources), warning


def _warn_or_raise(mismatch: ReplicaMismatch, *, step: int, comm: Collective, options: SaveOptions) -> str:
    """Raises CheckpointError for replicated tensors that differ, or warns if rank 0's copies are to be saved.

    Returns the text of the warning, which becomes part of `SaveResult.note`.
    """
    if options.on_replica_mismatch == "error":
        raise CheckpointError(f"{mismatch.describe()}. {ON_MISMATCH}", agreed=True)
    if comm.rank == 0:
        print(
            f"hpctrain: WARNING: checkpoint of step {step}: {mismatch.describe()}. Rank 0's copies of all "
            "replicated tensors are saved; the other ranks keep theirs",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return "WARNING: replicated tensors differ between ranks, rank 0's are saved"


def _with_copied_document(header: Metadata) -> Metadata:
    """Returns the metadata `header` with copies of its entries `document` and `parent`.

    The caller may change the originals before the metadata is written.
    """
    copied = json.loads(encode_document({"document": header.document, "parent": header.parent}))
    return replace(header, document=copied["document"], parent=copied["parent"])


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
    checkpoints that `keep` does not retain are deleted. A checkpoint of the same step is replaced. Incomplete
    checkpoints of killed saves are removed first, so only one run at a time may save to a directory.

    Args:
        state: This rank's part of the content.
        directory: Directory of the checkpoints, created if necessary; the same on every rank.
        step: Step of the checkpoint, 0 or more; the same on every rank.
        comm: The ranks that save together, such as `session.world`.
        keep: Which checkpoints to keep: a `Retention`, the number of newest checkpoints to keep, or None for all.
        engine: How the bytes are written; every engine writes the same content.
        **options: Further fields of `SaveOptions`, such as `files` or `limit_mb_per_s`.

    Returns:
        Path, size and duration of the finished checkpoint.

    Raises:
        CheckpointError: On every rank, if the ranks' states are inconsistent, if replicated tensors differ, or if a
            rank cannot write. The incomplete checkpoint is removed; older checkpoints are untouched.
        UsageError: On every rank, for an invalid argument.
    """
    chosen = SaveOptions(keep=keep, engine=engine, **options)
    with collector_paused():  # also between the phases
        return CheckpointSave.begin(state, directory=directory, step=step, comm=comm, options=chosen).finish()
