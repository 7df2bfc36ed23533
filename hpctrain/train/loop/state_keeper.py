"""Elastic runs: after a loss, the ranks that are left keep the state of the last finished step on their nodes.

With data-parallel ranks, each rank holds the complete state of the run after each step. If a rank is lost, the others
wait in a collective operation for it, and never return from there. So a thread of a rank that is left writes the state
to its node's storage (usually memory), as a checkpoint that the next start of the run recovers. The thread does not
communicate.

`StateKeeper` ensures that what is written is the state after a whole step: the main thread holds a lock while it
changes the state, from the moment when the sums of a step are known until the step has been counted. This part of a
step waits for no other rank. Before, forward may have changed buffers and drawn random numbers; so each rank notes its
generators, and rank 0 its buffers, in a file in the node's memory after each step (`StepNotes`). These files outlive
the process of a rank that is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.checkpoint import (
    FromRank0,
    Item,
    LocalStore,
    Replicated,
    State,
    TensorShard,
    keep_state,
    rehearse_keeping,
)
from hpctrain.comm import Collective, SerialWorld, agreed, all_gather_json
from hpctrain.distributed import device_of, is_sharded_tensor
from hpctrain.errors import CheckpointError, HpctrainError
from hpctrain.reduce import AllReduceUpdater
from hpctrain.resilience import PeerWatch, RankProcess, StopRequest, print_notice
from hpctrain.topology import Topology
from hpctrain.train.state.seeds import capture_generators
from hpctrain.train.state.training_state import GENERATORS, TrainingState

# A thread that wants the state waits at most so long for a step that is being applied.
_WAITS_S = 2.0
# Rank 0 notes its buffers after each step; larger ones would cost too much.
_MOST_BUFFER_BYTES = 16 << 20
_RANKS = "ranks"  # folder of the notes, in the node's folder
# Signals after which a rank keeps the state: mpirun sends SIGTERM before it kills the ranks, and the supervisor sends
# SIGUSR2 when a node is lost.
_KEEPS_AFTER = (signal.SIGTERM, signal.SIGUSR2)
_NO_STEP = -1
# So many ranks of a node write the state once after the first step. The ranks of a node try to keep it in the order of
# their ranks, so that one of these does.
_REHEARSE = 2
_AFTER_EACH_OTHER_S = 0.005
_ARRIVES_WITHIN_S = 0.02


def why_not_kept(state: TrainingState) -> str | None:
    """Returns why a single rank cannot keep the state of a run; None if it can. Not collective; pure."""
    if not isinstance(state.updater, AllReduceUpdater):
        return "the state of the run is split over the ranks, or differs between them"
    if state.also:
        return "the run saves further objects"
    if state.updater.state_tensors():
        return "the wire format keeps residuals on each rank"
    entries = state.model.state_dict()
    if any(is_sharded_tensor(value) for value in entries.values() if isinstance(value, torch.Tensor)):
        return "the model is split over the ranks"
    if any(not isinstance(value, torch.Tensor) for value in entries.values()):
        return "modules of the model save values that are not tensors"
    num_bytes = sum(buffer.nbytes for buffer in _saved_buffers(state.model).values())
    if num_bytes > _MOST_BUFFER_BYTES:
        return f"the model's buffers have {num_bytes >> 20} MiB, and at most {_MOST_BUFFER_BYTES >> 20} are noted"
    return None


def _saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the buffers that a checkpoint holds, by name."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in saved}


@final
class StepNotes:
    """What a rank must remember of its last finished step: its random generators, and on rank 0 the model's buffers.

    The notes are in a file of two parts, written in turn, so that one is whole whenever the process ends. Each part
    begins with the number of its step, which is written last.
    """

    def __init__(self, path: Path, *, tensors: Mapping[str, torch.Tensor]) -> None:
        """Creates the file. tensors: of the names, shapes and dtypes of all later notes. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._layout = _layout_of(tensors)
        self._memory: NDArray[np.uint8] = np.memmap(
            path, dtype=np.uint8, mode="w+", shape=(_size(self._layout),)
        )
        self._parts = _parts_of(self._memory)
        for part in self._parts:
            _step_in(part)[0] = _NO_STEP
        self._memory[0] = 0

    def write(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        part = self._parts[step % 2]
        _step_in(part)[0] = _NO_STEP
        for name, (_, _, begin, end) in self._layout.items():
            part[8 + begin : 8 + end] = _bytes_of(tensors[name])
        _step_in(part)[0] = step

    def leaves(self) -> None:
        """Notes that this rank ends the run itself, and says so: its end is not a loss that others should report."""
        self._memory[0] = 1

    @staticmethod
    def read(path: Path, *, step: int, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Returns the notes of another rank after `step`; None if it has none. like: `tensors` of the constructor."""
        layout = _layout_of(like)
        content = _content(path)
        if content is None or len(content) != _size(layout):
            return None
        part = _parts_of(content)[step % 2]
        found = {}
        for name, (shape, dtype, begin, end) in layout.items():
            found[name] = torch.empty(shape, dtype=dtype)
            if begin < end:
                flat = torch.from_numpy(part[8 + begin : 8 + end].copy())
                found[name] = flat.view(dtype).reshape(shape)
        return found if int(_step_in(part)[0]) == step else None

    @staticmethod
    def has_left(path: Path) -> bool:
        """Returns True if the rank with these notes has ended the run itself."""
        content = _content(path)
        return content is not None and len(content) > 0 and content[0] == 1


_Layout = dict[str, tuple[tuple[int, ...], torch.dtype, int, int]]


def _layout_of(tensors: Mapping[str, torch.Tensor]) -> _Layout:
    layout: _Layout = {}
    begin = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        layout[name] = (tuple(tensor.shape), tensor.dtype, begin, begin + tensor.nbytes)
        begin += -(-tensor.nbytes // 8) * 8
    return layout


def _size(layout: _Layout) -> int:
    longest = max((-(-end // 8) * 8 for _, _, _, end in layout.values()), default=0)
    return 8 + 2 * (8 + longest)


def _parts_of(memory: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    half = (len(memory) - 8) // 2
    return memory[8 : 8 + half], memory[8 + half :]


def _step_in(part: NDArray[np.uint8]) -> NDArray[np.int64]:
    return part[:8].view(np.int64)


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    flat: NDArray[np.uint8] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def _content(path: Path) -> NDArray[np.uint8] | None:
    try:
        return np.fromfile(path, dtype=np.uint8)
    except OSError:
        return None


@final
class StateKeeper:
    """Keeps the state of the last finished step on this node if a rank is lost. Create it with `open`.

    Attributes:
        store: The node's storage.
    """

    def __init__(
        self, state: TrainingState, *, store: LocalStore, comm: Collective, topology: Topology
    ) -> None:
        """Do not call this; use `open`."""
        self.store = store
        self._state = state
        self._comm = comm
        self._topology = topology
        self._local_rank = topology.local_rank_of(comm.rank)
        self._node = topology.node_names[topology.node_of(comm.rank)]
        self._device = device_of(state.model)
        self._buffers = list(_saved_buffers(state.model))
        self._notes = StepNotes(self._notes_of(comm.rank), tensors=self._to_note(comm.rank))
        self._alone_comm = SerialWorld()
        self._capture: Callable[[], State] | None = None
        self._begun_at: int | None = None  # the step from which this start trains: it is saved already
        self._step = _NO_STEP
        self._changing = threading.Lock()  # held by the main thread while it changes the state
        self._is_changing = False  # of the main thread
        self._keeping = threading.Lock()
        self._closed = threading.Event()
        self._peers: PeerWatch | None = None

    @classmethod
    def open(
        cls,
        state: TrainingState,
        *,
        store: LocalStore,
        comm: Collective,
        topology: Topology,
        stop: StopRequest,
    ) -> StateKeeper:
        """Begins to watch the other ranks of this machine, and the signals that announce the end. Collective.

        Raises CheckpointError on every rank if a node's storage cannot be written.

        state: the state of the run, for which `why_not_kept` has returned None.
        """
        keeper = agreed(
            comm, lambda: cls(state, store=store, comm=comm, topology=topology), os_error=CheckpointError
        )
        processes = all_gather_json(comm, RankProcess.of_this_process().to_json())
        keeper._peers = PeerWatch(
            {rank: RankProcess(**found) for rank, found in enumerate(processes) if rank != comm.rank},
            ended=keeper._lost,
        )
        if threading.current_thread() is threading.main_thread() and (
            signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        ):
            signal.signal(signal.SIGUSR2, lambda number, frame: None)  # only for `observer`
        stop.observer = keeper._signalled
        return keeper

    # ------------------------------------------------------------------ in the main thread

    def begins(self, capture: Callable[[], State], *, step: int) -> None:
        """Sets the function that returns the state of the last finished step. step: step from which training starts."""
        self._capture = capture
        self._begun_at = step
        self._step = step
        self._note(step)

    def changes(self) -> None:
        """Called before the state changes. Until `step_ended`, no other thread reads the state."""
        if not self._is_changing:
            self._changing.acquire()
            self._is_changing = True

    def unchanged(self) -> None:
        """Called when the step is not applied but computed again: the state is that after the last step."""
        if self._is_changing:
            self._is_changing = False
            self._changing.release()

    def step_ended(self, step: int) -> None:
        """Called when the state is that after `step`, whether or not it has changed."""
        self._note(step)
        is_first = self._step == self._begun_at != step
        self._step = step
        self.unchanged()
        if is_first and self._local_rank < _REHEARSE:  # from now on the optimizer has all of its state
            threading.Thread(target=self._rehearse, name="hpctrain-rehearse", daemon=True).start()

    @contextlib.contextmanager
    def changed_for_a_while(self) -> Iterator[None]:
        """Inside the `with` block the model holds other values than after the last step."""
        self.changes()
        try:
            yield
        finally:
            self.unchanged()

    def fails(self, error: BaseException) -> None:
        """Called when this rank is about to end because of `error`: it keeps the state, if no other rank will."""
        if isinstance(error, HpctrainError) and error.agreed:
            return  # all ranks raise it, and none is lost
        self._notes.leaves()
        if not self._is_changing:
            self._keep()

    def close(self) -> None:
        """Stops watching. Not collective; may be called twice."""
        self._closed.set()
        if self._peers is not None:
            self._peers.close()

    # ------------------------------------------------------------------ in other threads

    def _lost(self, rank: int) -> None:
        """Called when the process of another rank of this machine has ended."""
        if self._closed.is_set():
            return
        node = self._topology.node_names[self._topology.node_of(rank)]
        says = None
        if not StepNotes.has_left(self._notes_of(rank)):
            says = f"rank {rank} on {node} is gone"
        self._keep(says)

    def _signalled(self, number: int) -> None:
        if number in _KEEPS_AFTER and not self._closed.is_set():
            self._keep()

    def _rehearse(self) -> None:
        """Writes the state once and removes it. A later loss then finds the layout of the file, and costs less time."""
        with self._keeping, contextlib.suppress(HpctrainError, OSError, RuntimeError):
            if not self._closed.is_set():
                rehearse_keeping(self.store, self._alone(self._step), step=self._step, comm=self._alone_comm)

    def _keep(self, says: str | None = None) -> None:
        """Writes the state after the last step to the node's storage, unless another rank of the node has.

        says: what the rank that writes prints before.
        """
        try:
            with self._keeping, self._turn() as is_mine:
                if is_mine and self._capture is not None and self._step not in self.store.kept_steps():
                    if says is not None:
                        print_notice(says)
                    self._keep_newest()
        except OSError as error:
            print_notice(f"{self._node} cannot keep the state after step {self._step}: {error}")

    def _keep_newest(self) -> None:
        began_s = time.perf_counter()
        step, failed = _NO_STEP, ""
        while not failed and step != self._step:
            if not self._changing.acquire(timeout=_WAITS_S):
                failed = "a step is being applied"
                break
            try:
                step = self._step
                failed = self._write(step)
            finally:
                self._changing.release()
            # The lost rank may have taken part in one more step: its sums may arrive now.
            self._closed.wait(_ARRIVES_WITHIN_S)
        if failed:
            print_notice(f"{self._node} cannot keep the state after step {self._step}: {failed}")
        else:
            took_ms = 1e3 * (time.perf_counter() - began_s)
            print_notice(f"{self._node} keeps the state after step {step}, within {took_ms:.0f} ms")

    def _write(self, step: int) -> str:
        """Writes the state after `step`. Returns why it cannot be written; "" if it is written."""
        try:
            if step != self._begun_at:
                keep_state(self.store, self._alone(step), step=step, comm=self._alone_comm)
        except (HpctrainError, OSError, RuntimeError) as error:
            return str(error)
        return ""

    def _alone(self, step: int) -> State:
        """Returns the state after `step` without anything that other ranks would have to add."""
        assert self._capture is not None
        state = self._capture()
        buffers = self._noted(0, step)
        if self._buffers and buffers is None:
            raise CheckpointError("the buffers of rank 0, which a checkpoint holds, are not on this node")
        items: list[Item] = []
        for item in state.items:
            if isinstance(item, TensorShard):
                if not item.name.startswith(GENERATORS):
                    raise CheckpointError(f"{item.name} is split over the ranks")
                continue
            if isinstance(item, FromRank0):
                name = item.name.partition("/")[2]
                assert buffers is not None
                item = replace(item, tensor=buffers[f"buffer/{name}"])
            items.append(item)
        rows = [self._noted(rank, step) for rank in range(self._comm.num_ranks)]
        document: dict[str, Any] = dict(state.document)
        known = [row for row in rows if row is not None]
        if len(known) == len(rows):
            for name in (name for name in known[0] if name.startswith("generator/")):
                whole = torch.stack([row[name] for row in known])
                items.append(Replicated(name=f"{GENERATORS}{name.partition('/')[2]}", tensor=whole))
        else:
            # The generators of a lost node are lost too: the next start seeds all of them by the step.
            document |= {"num_ranks": 0, "num_drawing": 0}
        return State(items=items, document=document, parent=state.parent)

    # ------------------------------------------------------------------ notes

    def _to_note(self, rank: int) -> dict[str, torch.Tensor]:
        """Returns what `rank` notes after each step, with the values of this rank."""
        found = {f"generator/{name}": row for name, row in capture_generators(self._device).items()}
        if rank == 0:
            buffers = dict(self._state.model.named_buffers(remove_duplicate=False))
            found |= {f"buffer/{name}": buffers[name] for name in self._buffers}
        return found

    def _note(self, step: int) -> None:
        self._notes.write(step, self._to_note(self._comm.rank))

    def _noted(self, rank: int, step: int) -> dict[str, torch.Tensor] | None:
        return StepNotes.read(self._notes_of(rank), step=step, like=self._to_note(rank))

    def _notes_of(self, rank: int) -> Path:
        """Returns the path of a rank's notes, which only ranks of the same node see, or of the same machine."""
        node = self._topology.node_names[self._topology.node_of(rank)]
        return replace(self.store, node=node).root / _RANKS / f"rank-{rank:05}"

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """Waits until no other rank of the node keeps the state. Yields False if that takes too long."""
        descriptor = os.open(self.store.root / "keeping", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield self._locks(descriptor)
        finally:
            os.close(descriptor)

    def _locks(self, descriptor: int) -> bool:
        until_s = time.monotonic() + _WAITS_S
        self._closed.wait(_AFTER_EACH_OTHER_S * self._local_rank)
        while not self._closed.is_set() and time.monotonic() < until_s:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            self._closed.wait(0.02)
        return False
