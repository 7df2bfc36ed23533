"""A wrapper that adds a deadline to any communicator: no rank waits forever, and the missing ranks are named.

Results are unchanged. `Monitored` wraps a world; files, messages and transports that are opened through a `Monitored`
are wrapped too. `hpctrain.comm.watchdog.watcher` implements what happens when an operation is late.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import final

import torch

from hpctrain.comm.collectives.activity import Section
from hpctrain.comm.collectives.agreement import (
    agreed,
    all_gather_distinct,
    check_same,
    describe_ranks,
    make_shared_folder,
)
from hpctrain.comm.interface.collective_files import CollectiveFiles
from hpctrain.comm.interface.communicator import Attributes, Collective, Forwarding, ReduceOp, World
from hpctrain.comm.interface.remote_memory import RemoteMemory
from hpctrain.comm.interface.transport import PeerMessages, Transport
from hpctrain.comm.watchdog.board.node_files import WatchFolders, local_folder, local_parent, node_identity
from hpctrain.comm.watchdog.board.rank_status import nodes_of_ranks
from hpctrain.comm.watchdog.host_probe import ProbeTarget
from hpctrain.comm.watchdog.monitored_objects import (
    MonitoredFiles,
    MonitoredMessages,
    MonitoredRemoteMemory,
    MonitoredTransport,
)
from hpctrain.comm.watchdog.operation_state import InputWaits, Track
from hpctrain.comm.watchdog.section_limits import SectionLimits
from hpctrain.comm.watchdog.timeout_report import exit_now
from hpctrain.comm.watchdog.watcher import Watcher
from hpctrain.errors import BufferMismatch
from hpctrain.topology import Topology

# Longer lists of counts are compared by a checksum.
_COUNTS_SHOWN = 16


def _dtype(buffer: torch.Tensor) -> str:
    return str(buffer.dtype).removeprefix("torch.")


def _describe(buffer: torch.Tensor) -> str:
    return f"({buffer.numel()} x {_dtype(buffer)})"


def _describe_counts(counts: Sequence[int]) -> str:
    listed = ", ".join(map(str, counts))
    if len(counts) > _COUNTS_SHOWN:
        listed = f"{len(counts)}, checksum {zlib.crc32(listed.encode()):08x}"
    return f"counts {listed}"


@final
class MonitoredGroup(Attributes):
    """`Collective` whose operations have a deadline, which a watcher enforces.

    compared: True to compare the arguments of each operation between the ranks; False if the caller does so.
    """

    def __init__(self, inner: Collective, *, track: Track, watcher: Watcher, compared: bool = True) -> None:
        self._inner = inner
        self._compared = compared
        self._track = track
        self._watcher = watcher
        self._num_files = 0

    @property
    def backend(self) -> str:
        return self._inner.backend

    @cached_property
    def rank(self) -> int:
        return self._inner.rank

    @cached_property
    def num_ranks(self) -> int:
        return self._inner.num_ranks

    @property
    def members(self) -> tuple[int, ...]:
        return self._inner.members

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM) -> None:
        with self._during("all_reduce", _describe(buffer), same=op.value):
            self._inner.all_reduce(buffer, op=op)

    def start_all_reduce(self, buffer: torch.Tensor, *, number: int) -> Callable[[], None]:
        with self._during("all_reduce", _describe(buffer), same="started"):
            wait = self._inner.start_all_reduce(buffer, number=number)

        def finish() -> None:
            with self._watcher.during(self._track, "all_reduce", _describe(buffer), counted=False):
                wait()

        return finish

    def reduce_scatter(self, buffer: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        with self._during("reduce_scatter", _describe(buffer), same=_describe_counts(counts)):
            return self._inner.reduce_scatter(buffer, counts=counts)

    def all_gather(
        self, part: torch.Tensor, *, counts: Sequence[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        whole = f"({sum(counts)} x {_dtype(part)} in all)"
        with self._during("all_gather", whole, same=_describe_counts(counts)):
            return self._inner.all_gather(part, counts=counts, out=out)

    def all_to_all(
        self, buffer: torch.Tensor, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        with self._during("all_to_all", f"({_dtype(buffer)})"):
            return self._inner.all_to_all(buffer, send_counts=send_counts, receive_counts=receive_counts)

    def broadcast(self, buffer: torch.Tensor, *, root: int) -> None:
        with self._during("broadcast", _describe(buffer), same=f"from rank {root} of the group"):
            self._inner.broadcast(buffer, root=root)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        with self._during("all_gather_bytes"):
            return self._inner.all_gather_bytes(data)

    def barrier(self) -> None:
        with self._during("barrier"):
            self._inner.barrier()

    def close(self) -> None:
        self._inner.close()
        self._track.closed = True

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Labels the operations in the `with` block; see `hpctrain.comm.doing`."""
        return self._watcher.doing_this(what)

    def section(self, section: Section | None) -> AbstractContextManager[None]:
        """Applies the time limit of `section` in the `with` block; see `hpctrain.comm.in_section`."""
        return self._watcher.sections.enter(section)

    @contextlib.contextmanager
    def without_limit(self) -> Iterator[None]:
        """Suspends the deadline in the `with` block; see `hpctrain.comm.without_limit`."""
        self._track.limited = False
        try:
            yield
        finally:
            self._track.limited = True

    def collective_files(self, *, members: Sequence[int] | None = None) -> CollectiveFiles | None:
        with self._during("collective_files"):
            inner = self._inner.collective_files(members=members)
        self._num_files += 1
        if inner is None:
            return None
        ranks = self.members if members is None else tuple(members)
        name = f"files {self._num_files} of {self._track.group} ({describe_ranks(ranks)})"
        return MonitoredFiles(inner, track=self._watcher.track(group=name, members=ranks))

    @contextlib.contextmanager
    def _during(self, operation: str, detail: str = "", *, same: str = "") -> Iterator[None]:
        """Puts the `with` block, one operation, under the deadline, after a check that all ranks pass equal arguments.

        operation, detail: name and arguments of the operation, for messages.
        same: further arguments that must be the same on all ranks.
        """
        signature = " ".join(filter(None, [operation, detail, same]))
        with self._watcher.during(self._track, operation, detail, signature=signature):
            self.agree(signature)
            try:
                yield
            except BufferMismatch as error:
                # Horovod reports on every rank that buffers differ, but not on which ranks.
                if self.backend == "horovod" and not error.agreed and "Mismatched" in str(error):
                    self._name_different(signature)
                raise

    def agree(self, signature: str) -> None:
        """Raises BufferMismatch on every rank, naming the ranks that differ, unless `signature` is equal on all.

        signature: text with the name and the arguments of an operation.

        Collective. The signatures are compared only if the backend is MPI, which compares nothing itself: if the buffer
        of one rank differs, MPI returns wrong sums, hangs, or fails on some ranks. The check costs one all-reduce of 16
        bytes. See docs/adr/0015.
        """
        if not self._compared or self.backend != "mpi" or self.num_ranks == 1:
            return
        number = int.from_bytes(hashlib.blake2b(signature.encode(), digest_size=7).digest(), "big")
        header = torch.tensor([number, -number])
        self._inner.all_reduce(header, op=ReduceOp.MAX)
        if int(header[0]) != -int(header[1]):
            self._name_different(signature)

    def _name_different(self, signature: str) -> None:
        check_same(
            self._inner,
            name=f"the arguments of operation {self._track.sequence} of {self._track.group}",
            value=signature,
            error=BufferMismatch,
        )


@final
class Monitored(Forwarding):
    """A world whose operations, and those of the communicators created from it, have a deadline.

    timeout_s: time limit of an operation in seconds. If an operation takes longer, the run ends with exit code 6, and
    all ranks have exited when this time is over. The last quarter of this time, at most 5 s, is for ending the run. The
    rest must be longer than one rank may legitimately keep the others waiting (a checkpoint, an evaluation on rank 0).
    directory: run directory. If it is given, the constructor calls `publish_in`, and is therefore collective. Without
    it, messages cannot name the missing ranks.
    watcher, name: for a world that shares the watcher of another world (`open_reduction_world`): the shared watcher,
    and the name of this world in messages.

    Set the attribute `step` to show the current step in messages.
    """

    def __init__(
        self,
        world: World,
        *,
        timeout_s: float = 0.0,
        directory: Path | None = None,
        watcher: Watcher | None = None,
        name: str = "world",
    ) -> None:
        self._world = world
        self._name = name
        self._topology: Topology | None = None
        self._owns_watcher = watcher is None
        self._holds_lock = world.backend == "horovod"
        processes = world.backend in ("mpi", "horovod")
        self._watcher = watcher or Watcher(
            rank=world.rank,
            timeout_s=timeout_s,
            abort=lambda code: world.abort(code),
            leave=exit_now if processes else None,
            is_process=world.backend != "threads",
        )
        self._track = self._watcher.track(group=name, members=world.members)
        if self._holds_lock:
            self._watcher.lock_may_be_held()
        self._all = MonitoredGroup(world, track=self._track, watcher=self._watcher)
        self._group = self._all
        self._num_made = 0
        self._num_groups: Counter[tuple[int, ...]] = Counter()
        if directory is not None:
            self.publish_in(directory)

    def place(self, topology: Topology) -> None:
        """Makes `publish_in` use the nodes of `topology`, including emulated ones, instead of one node per host."""
        self._topology = topology

    def publish_in(self, directory: Path) -> None:
        """Starts to publish in `directory` what the ranks are doing, with one file per node. Collective.

        directory: folder that all ranks see; it is created if it does not exist.

        The ranks of a node also create a folder in the memory of the node (/dev/shm), or otherwise in its temporary
        directory, and remove this folder at the end. Each rank receives 8 bytes per rank, and some 80 bytes per host:
        the address at which the host can be probed. Raises LaunchError on all ranks if one rank cannot use the folders.
        """
        make_shared_folder(directory, comm=self)
        parent, target = agreed(self, lambda: (local_parent(), self._watcher.own_target()))
        host, run = socket.gethostname(), secrets.token_hex(8) if self.rank == 0 else ""
        # Ranks of a host that see another directory, as in containers, are of another node.
        offered, host_of_rank = all_gather_distinct(
            self,
            [host, None if target is None else asdict(target), run],
            key=f"{host} {node_identity(parent)}",
        )
        placement = nodes_of_ranks(
            host_of_rank, names=[name for name, _, _ in offered], topology=self._topology
        )
        leader = placement.ranks_on(placement.node_of_rank[self.rank])[0]
        folders = WatchFolders(
            rank=self.rank,
            shared=directory,
            local=local_folder(parent, run=str(offered[0][2]), leader=leader),
            placement=placement,
        )
        agreed(self, lambda: self._watcher.prepare(folders))
        agreed(self, lambda: self._watcher.publish_in(folders))
        self._watcher.know_hosts(
            ProbeTarget(host=found["host"], addresses=tuple(found["addresses"]), port=found["port"])
            for _, found, _ in offered
            if found is not None
        )

    @property
    def step(self) -> int | None:
        return self._watcher.step

    @step.setter
    def step(self, step: int | None) -> None:
        self._watcher.step = step

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Labels the operations in the `with` block; see `hpctrain.comm.doing`."""
        return self._watcher.doing_this(what)

    def section(self, section: Section | None) -> AbstractContextManager[None]:
        """Applies the time limit of `section` in the `with` block; see `hpctrain.comm.in_section`."""
        return self._watcher.sections.enter(section)

    def without_limit(self) -> AbstractContextManager[None]:
        """Suspends the deadline in the `with` block; see `hpctrain.comm.without_limit`."""
        return self._all.without_limit()

    @property
    def inputs(self) -> InputWaits:
        """Record of this rank's waits for its own input. The time limit of the section applies to these waits."""
        return self._watcher.inputs

    @property
    def limits(self) -> SectionLimits:
        """Time limits of the run's sections. All limits are `timeout_s` until they are configured."""
        return self._watcher.sections

    def last_ended(self) -> float | None:
        """Returns when this rank's last operation on any communicator ended, in seconds since 1970.

        Returns None before the first operation has ended.
        """
        ended = [track.ended for track in self._watcher.tracks if track.ended is not None]
        return max(ended, default=None)

    @property
    def reduction_backend(self) -> str:
        return self._world.reduction_backend

    def open_reduction_world(self) -> Monitored:
        with self._watcher.during(self._track, "open_reduction_world", signature="open_reduction_world"):
            self._all.agree("open_reduction_world")
            inner = self._world.open_reduction_world()
        self._num_made += 1
        return Monitored(inner, watcher=self._watcher, name=f"reductions {self._num_made}")

    def split(self, groups: Sequence[Sequence[int]]) -> Collective | None:
        signature = f"split {[list(group) for group in groups]}"
        with self._watcher.during(self._track, "split", signature=signature):
            self._all.agree(signature)
            inner = self._world.split(groups)
        self._num_made += 1  # on every rank, so that all members use the same name for the group
        if inner is None:
            return None
        name = self._within(f"split {self._num_made} ({describe_ranks(inner.members)})")
        return self._monitored(inner, name=name)

    def open_group(
        self, members: Sequence[int], *, compared: bool = True
    ) -> tuple[Collective, PeerMessages | None] | None:
        """Creates a communicator for the world ranks `members`, with a deadline; see `World.open_group`.

        compared: False if the caller checks itself that all ranks pass equal arguments to each operation.
        """
        # A track of its own: the world's is the same on all ranks, and only some take part.
        self._num_groups[tuple(members)] += 1
        name = self._within(f"group {self._num_groups[tuple(members)]} of {describe_ranks(members)}")
        track = self._watcher.track(group=name, members=tuple(members))
        with self._watcher.during(track, "open_group"):
            inner = self._world.open_group(members)
        if inner is None:
            return None
        collective, messages = inner
        group = MonitoredGroup(collective, track=track, watcher=self._watcher, compared=compared)
        if messages is None:
            return group, None
        track = self._watcher.track(group=f"messages of {name}", members=tuple(members))
        return group, MonitoredMessages(messages, track=track)

    def duplicate(self) -> Collective:
        with self._watcher.during(self._track, "duplicate", signature="duplicate"):
            self._all.agree("duplicate")
            inner = self._world.duplicate()
        self._num_made += 1
        return self._monitored(inner, name=self._within(f"duplicate {self._num_made}"))

    def _within(self, name: str) -> str:
        """Returns a communicator's name, with this world's name appended if the run has several worlds."""
        return name if self._owns_watcher else f"{name} of {self._name}"

    def _monitored(self, inner: Collective, *, name: str) -> Collective:
        track = self._watcher.track(group=name, members=inner.members)
        return MonitoredGroup(inner, track=track, watcher=self._watcher)

    def transport(self, topology: Topology) -> Transport | None:
        with self._watcher.during(self._track, "transport", signature="transport"):
            self._all.agree("transport")
            inner = self._world.transport(topology)
        self._num_made += 1
        if inner is None:
            return None
        name = f"messages {self._num_made}"
        return MonitoredTransport(inner, track=self._watcher.track(group=name, members=self.members))

    def remote_memory(self, num_bytes: int) -> RemoteMemory | None:
        """Returns memory that all ranks can read; see `World.remote_memory`. Collective.

        The deadline applies to the creation of the memory, and to the waits of which the caller says so (`waits`). It
        does not apply to reads and writes, since no other rank takes part in them.
        """
        with self._watcher.during(self._track, "remote_memory", signature="remote_memory"):
            self._all.agree("remote_memory")
            inner = self._world.remote_memory(num_bytes)
        self._num_made += 1
        if inner is None:
            return None
        track = self._watcher.track(group=f"remote memory {self._num_made}", members=self.members)
        return MonitoredRemoteMemory(inner, track=track)

    def abort(self, exit_code: int) -> None:
        self._watcher.end()
        self._world.abort(exit_code)

    def close(self) -> None:
        """Finishes communication, still under the deadline, and then stops the watcher, if it is not shared.

        Collective.
        """
        with self._watcher.during(self._track, "close", signature="close"):
            self._world.close()
        if self._owns_watcher:
            self._watcher.end()
        elif self._holds_lock:
            self._watcher.lock_is_free()
