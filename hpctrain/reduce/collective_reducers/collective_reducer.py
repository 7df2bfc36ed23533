"""Sums buckets by a backend's collective operations: flat, by slices, or in two levels.

These reducers work with every backend, on the backend's device. If a backend has only blocking operations, one bucket
is in flight at a time. `AllReduceReducer` makes its own schedule instead.

The bytes that collective operations send between nodes are computed for a ring over the ranks in order, in which each
rank sends only to the next rank. A backend may use another algorithm, but no algorithm sends fewer bytes per rank, so
algorithms are compared by this number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, final

import torch

from hpctrain.comm import Collective, TwoLevel, all_gather_json, check_same, to_host
from hpctrain.errors import BufferMismatch, UsageError
from hpctrain.reduce.codecs import Codec, Residuals
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import (
    Finishing,
    Numbers,
    Reduced,
    Shapes,
    StateTensor,
    check_same_plan,
)
from hpctrain.reduce.contract.step_end import StepEnd
from hpctrain.reduce.wire_formats import WIRE_FORMATS, wire_format
from hpctrain.storage import split_evenly
from hpctrain.topology import Topology


class StartAllReduce(Protocol):
    """Signature of `Collective.start_all_reduce`."""

    def __call__(self, buffer: torch.Tensor, *, number: int) -> Callable[[], None]: ...


def wire_dtype(wire: str, *, bucket: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a backend's own operation sends a bucket of dtype `bucket`.

    Raises UsageError for a wire format that no backend's own operation carries.
    """
    name = wire_format(wire).library_dtype
    if name is None:
        able = [known.name for known in WIRE_FORMATS.values() if known.library_dtype is not None]
        raise UsageError(
            f"a backend's own sum does not support the wire format {wire!r}: choose {', '.join(able)}, "
            "or the algorithm direct"
        )
    dtype: torch.dtype = bucket if name == "own" else getattr(torch, name)
    return dtype


@final
class CastSum:
    """Casts a bucket to the dtype of the wire format and lets the backend sum it in place, on the bucket's device.

    start: function that starts the sum of a buffer over all ranks, and returns another function, which waits for the
        sum; collective.
    wire: a wire format with a dtype for backends (`library_dtype`). The constructor raises UsageError if the backend
        cannot sum this dtype.
    bytes_of: function of numel and itemsize that returns the bytes that this rank sends to other nodes.
    """

    def __init__(
        self,
        start: StartAllReduce,
        *,
        wire: str,
        backend: str,
        bytes_of: Callable[[int, int], int],
    ) -> None:
        if wire_dtype(wire, bucket=torch.float32) is torch.bfloat16 and backend == "horovod":
            raise UsageError("Horovod cannot sum bfloat16: choose the algorithm direct, which sends bytes")
        self._start = start
        self._wire = wire
        self._bytes_of = bytes_of
        self._cast: list[torch.Tensor | None] = []
        self.bytes_sent = 0

    @property
    def wire(self) -> str:
        return self._wire

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> None:
        self._cast = []
        for bucket in buckets:
            dtype = wire_dtype(self._wire, bucket=bucket.dtype)
            own = dtype == bucket.dtype
            self._cast.append(None if own else torch.zeros(bucket.numel, dtype=dtype, device=device))

    def start(self, number: int, memory: torch.Tensor) -> Callable[[], None]:
        """See `BucketSum.start`."""
        cast = self._cast[number]
        travelling = memory if cast is None else cast.copy_(memory)
        wait = self._start(travelling, number=number)
        self.bytes_sent += self._bytes_of(travelling.numel(), travelling.element_size())

        def finish() -> None:
            wait()
            if cast is not None:
                memory.copy_(cast)

        return finish


def successor_is_elsewhere(rank: int, *, num_ranks: int, topology: Topology | None) -> bool:
    """Returns True if the rank after `rank` in the ring is on another node.

    topology: None means one rank per node.
    """
    following = (rank + 1) % num_ranks
    if topology is None:
        return following != rank
    return topology.node_of(following) != topology.node_of(rank)


def num_ranks_elsewhere(rank: int, *, num_ranks: int, topology: Topology | None) -> int:
    """Returns the number of ranks that are on other nodes than `rank`. topology: None means one rank per node."""
    if topology is None:
        return num_ranks - 1
    return num_ranks - len(topology.ranks_by_node[topology.node_of(rank)])


def all_reduce_bytes(num_bytes: int, *, num_ranks: int) -> int:
    """Returns the bytes that each of N ranks sends in a ring all-reduce of `num_bytes`: 2 (N-1)/N times `num_bytes`."""
    return 2 * num_bytes * (num_ranks - 1) // num_ranks


def all_gather_bytes(counts: Sequence[int], *, rank: int) -> int:
    """Returns the bytes that `rank` sends in a ring all-gather: all parts except the part of the next rank.

    counts: bytes of each rank's part.
    """
    return sum(counts) - counts[(rank + 1) % len(counts)]


# Maximum number of elements of a piece: limits the memory for encoded slices, and their number of bytes, which
# backends count in 32 bits.
PIECE_ELEMS = 2**26
ALIGNMENT = 8  # bytes, of every encoded slice; codecs require it


@dataclass(frozen=True, slots=True)
class BucketPiece:
    """A run of a bucket's elements, split over the ranks: rank r owns the elements offsets[r] to offsets[r + 1] - 1."""

    offsets: tuple[int, ...]

    def numel(self, owner: int) -> int:
        return self.offsets[owner + 1] - self.offsets[owner]

    def slice(self, values: torch.Tensor, owner: int) -> torch.Tensor:
        return values[self.offsets[owner] : self.offsets[owner + 1]]

    def num_bytes(self, codec: Codec, *, dtype: torch.dtype) -> list[int]:
        """Returns the size of each owner's encoded slice, in bytes."""
        owners = range(len(self.offsets) - 1)
        return [codec.num_bytes(self.numel(owner), dtype=dtype) for owner in owners]


def split_bucket(numel: int, *, num_ranks: int, piece_elems: int = PIECE_ELEMS) -> list[BucketPiece]:
    """Splits a bucket into pieces of at most `piece_elems` elements; an empty bucket has no pieces. Pure."""
    pieces = []
    for begin in range(0, numel, piece_elems):
        counts = split_evenly(min(piece_elems, numel - begin), num_parts=num_ranks)
        pieces.append(BucketPiece(tuple(accumulate(counts, initial=begin))))
    return pieces


def padded(num_bytes: int) -> int:
    """Returns `num_bytes` rounded up to a multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@final
class SliceSum:
    """`BucketSum` by slices over `comm`, for any codec and any backend, with error feedback if `residuals` are given.

    A bucket is cut into pieces, and each piece into slices; each rank owns one slice of each piece. Each rank encodes
    its values of the other ranks' slices, and an all-to-all sends them to the owners. The owner adds up the values of
    its slice in rank order (float32 or float64) and encodes the sum once; an all-gather distributes the sums. So each
    value is rounded twice, whatever the number of ranks. The backend only transports bytes, so that bfloat16 and int8
    work over Horovod, which can sum neither. Source: Thakur et al. 2005, section 4.5.

    Error feedback: a rank keeps the rounding errors of the values that it sent and, for its own slice, the rounding
    errors of the sum. The rank's own values of its own slice are not rounded, so one residual per element is enough.

    The sum is computed in host memory: a CUDA bucket is copied there and back. `bytes_sent` counts the bytes that the
    all-to-all sends to ranks of other nodes; the bytes of the all-gather are computed for a ring.
    """

    def __init__(
        self,
        comm: Collective,
        *,
        codec: Codec,
        topology: Topology,
        residuals: Residuals | None = None,
        piece_elems: int = PIECE_ELEMS,
    ) -> None:
        self._comm = comm
        self._codec = codec
        self._residuals = residuals
        self._piece_elems = piece_elems
        node = topology.node_of(comm.rank)
        self._elsewhere = [topology.node_of(rank) != node for rank in range(comm.num_ranks)]
        self._next_elsewhere = successor_is_elsewhere(comm.rank, num_ranks=comm.num_ranks, topology=topology)
        self._buckets: Sequence[Bucket] = ()
        self.bytes_sent = 0

    @property
    def wire(self) -> str:
        return self._codec.name

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> None:
        self._buckets = buckets
        if self._residuals is not None:
            self._residuals.plan(buckets, device=torch.device("cpu"))

    def start(self, number: int, memory: torch.Tensor) -> Callable[[], None]:
        """See `BucketSum.start`. Runs the whole sum before it returns. Collective."""
        self.sum(number, memory)
        return lambda: None

    def sum(self, number: int, memory: torch.Tensor) -> None:
        """Sums `memory` over all ranks, in place, with two blocking operations per piece. Collective."""
        bucket = self._buckets[number]
        host = to_host(memory)
        lost = None
        if self._residuals is not None:
            self._residuals.add_to(host, bucket)
            lost = torch.empty_like(host)
        for piece in split_bucket(
            bucket.numel, num_ranks=self._comm.num_ranks, piece_elems=self._piece_elems
        ):
            self._sum_piece(piece, host, lost=lost)
        if host is not memory:
            memory.copy_(host)
        if self._residuals is not None and lost is not None:
            for slot in bucket.slots:
                self._residuals.left(slot).copy_(lost[slot.offset : slot.offset + slot.numel])

    def _sum_piece(self, piece: BucketPiece, values: torch.Tensor, *, lost: torch.Tensor | None) -> None:
        mine, num_ranks = self._comm.rank, self._comm.num_ranks
        sizes = piece.num_bytes(self._codec, dtype=values.dtype)
        padded_sizes = [padded(size) for size in sizes]
        to_owners = [0 if owner == mine else part for owner, part in enumerate(padded_sizes)]
        leaving = torch.zeros(sum(to_owners), dtype=torch.uint8)
        for owner, part in enumerate(leaving.split(to_owners)):
            if owner != mine:
                self._encode(piece, owner, values, out=part[: sizes[owner]], lost=lost)
        arrived = self._comm.all_to_all(
            leaving,
            send_counts=to_owners,
            receive_counts=[0 if rank == mine else padded_sizes[mine] for rank in range(num_ranks)],
        )
        self.bytes_sent += sum(n for n, far in zip(to_owners, self._elsewhere, strict=True) if far)
        others = [part[: sizes[mine]] for part in arrived.view(num_ranks - 1, padded_sizes[mine])]
        own = piece.slice(values, mine)
        if own.numel():
            _sum_in_order(own, before=others[:mine], after=others[mine:], codec=self._codec)
        packet = torch.zeros(padded_sizes[mine], dtype=torch.uint8)
        self._encode(piece, mine, values, out=packet[: sizes[mine]], lost=lost)
        whole = self._comm.all_gather(packet, counts=padded_sizes)
        if self._next_elsewhere:
            self.bytes_sent += all_gather_bytes(padded_sizes, rank=mine)
        for owner, part in enumerate(whole.split(padded_sizes)):
            self._codec.decode(part[: sizes[owner]], out=piece.slice(values, owner))

    def _encode(
        self,
        piece: BucketPiece,
        owner: int,
        values: torch.Tensor,
        *,
        out: torch.Tensor,
        lost: torch.Tensor | None,
    ) -> None:
        """Encodes the owner's slice of `values` into `out`, and writes the rounding error into its slice of `lost`."""
        own = piece.slice(values, owner)
        self._codec.encode(own, out=out)
        if lost is not None:
            missing = piece.slice(lost, owner)
            self._codec.decode(out, out=missing)
            torch.sub(own, missing, out=missing)


def _sum_in_order(
    own: torch.Tensor, *, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], codec: Codec
) -> None:
    """Adds the encoded slices of the other ranks to `own`, this rank's slice, in rank order.

    before, after: slices of the lower and of the higher ranks, in rank order.
    """
    if before:
        total = torch.empty_like(own)
        codec.decode(before[0], out=total)
        for data in before[1:]:
            codec.add(data, out=total)
        own.add_(total)  # float addition commutes: (sum of earlier ranks) + own
    for data in after:
        codec.add(data, out=own)


# Total size of the buckets up to which each rank computes the norm of the sums alone, faster than a collective.
MAX_NORM_ALONE_BYTES = 16 << 20


class BucketSum(Protocol):
    """A method of summing a bucket over all ranks. `start` is collective, `plan` is not.

    `start(number, memory)` starts the sum of bucket `number` in place in `memory`, shape (n,), n > 0, and returns a
    function that waits for the sum.

    bytes_sent: bytes that this rank has sent to other nodes so far.
    """

    bytes_sent: int

    @property
    def wire(self) -> str: ...

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> None: ...

    def start(self, number: int, memory: torch.Tensor) -> Callable[[], None]: ...


@final
class CollectiveReducer(StepEnd):
    """`BucketReducer` over the collective operations of `comm`, which no other object may use.

    Create it with `flat`, `direct` or `hierarchical`.
    """

    def __init__(
        self,
        comm: Collective,
        *,
        algorithm: str,
        sums: BucketSum,
        residuals: Residuals | None = None,
        in_background: bool = False,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        """Creates the reducer; use `flat`, `direct` or `hierarchical` instead.

        in_background: see `InBackground`.
        on_close: function that releases `comm`; collective, called by `close`.
        """
        self._comm = comm
        self._in_background = in_background
        self._on_close: Callable[[], object] | None = on_close
        self._algorithm = algorithm
        self._sums = sums
        self._residuals = residuals
        self._memory: list[torch.Tensor] = []
        self._norm_alone = False

    @classmethod
    def flat(
        cls,
        comm: Collective,
        *,
        topology: Topology,
        wire: str = "fp32",
        name: str = "flat",
        on_close: Callable[[], object] = lambda: None,
    ) -> CollectiveReducer:
        """Returns a reducer that uses the backend's all-reduce of the whole bucket. Not collective.

        name: name of the algorithm that the reducer reports, such as `nccl-torus` if the backend is configured for it.
        wire: wire format. Horovod sums fp16 in float16; the other backends sum it in float32, by slices.

        `bytes_sent` is computed for a ring, or for the sum by slices (see `SliceSum`). Raises UsageError if the
        backend cannot sum this wire format.
        """
        num_ranks = comm.num_ranks
        elsewhere = successor_is_elsewhere(comm.rank, num_ranks=num_ranks, topology=topology)
        far = num_ranks_elsewhere(comm.rank, num_ranks=num_ranks, topology=topology)

        def bytes_of(numel: int, itemsize: int) -> int:
            if itemsize < 4 and comm.backend != "horovod":
                return 2 * numel * itemsize * far // num_ranks
            return all_reduce_bytes(numel * itemsize, num_ranks=num_ranks) if elsewhere else 0

        sums = CastSum(comm.start_all_reduce, wire=wire, backend=comm.backend, bytes_of=bytes_of)
        # Horovod's thread continues sums that have been started; the other backends' operations only block.
        return cls(
            comm, algorithm=name, sums=sums, in_background=comm.backend == "horovod", on_close=on_close
        )

    @classmethod
    def hierarchical(
        cls,
        comm: Collective,
        *,
        levels: TwoLevel,
        topology: Topology,
        wire: str = "fp32",
        on_close: Callable[[], object] = lambda: None,
    ) -> CollectiveReducer:
        """Returns a two-level reducer that uses the backend's operations within the node and between nodes.

        levels: communicators of `topology`, used by this reducer only.

        `bytes_sent` is computed for a ring over the nodes with this rank's slice. Not collective. Raises UsageError if
        the backend cannot sum this wire format.
        """

        def bytes_of(numel: int, itemsize: int) -> int:
            return itemsize * levels.elements_between_nodes(numel)

        def start(buffer: torch.Tensor, *, number: int) -> Callable[[], None]:
            levels.all_reduce(buffer)
            return lambda: None

        sums = CastSum(start, wire=wire, backend=comm.backend, bytes_of=bytes_of)
        return cls(comm, algorithm="hierarchical-flat", sums=sums, on_close=on_close)

    @classmethod
    def direct(
        cls,
        comm: Collective,
        *,
        topology: Topology,
        codec: Codec,
        feedback: bool = False,
        piece_elems: int = PIECE_ELEMS,
    ) -> CollectiveReducer:
        """Returns a reducer that sums by slices. Not collective. feedback: error feedback for a lossy codec."""
        residuals = None
        if feedback and not codec.exact and comm.num_ranks > 1:
            residuals = Residuals(rank=comm.rank, num_ranks=comm.num_ranks)
        sums = SliceSum(comm, codec=codec, topology=topology, residuals=residuals, piece_elems=piece_elems)
        return cls(comm, algorithm="direct", sums=sums, residuals=residuals)

    @property
    def algorithm(self) -> str:
        return self._algorithm

    @property
    def wire(self) -> str:
        return self._sums.wire

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        how = f"{self._algorithm}, {self.wire}{', fed back' if self._residuals is not None else ''}"
        check_same_plan(self._comm, buckets, how=how)
        self._sums.plan(buckets, device=device)
        self._memory = [torch.zeros(b.numel, dtype=b.dtype, device=device) for b in buckets]
        self._will_finish(buckets, self._memory)
        small = sum(b.numel * b.dtype.itemsize for b in buckets) <= MAX_NORM_ALONE_BYTES
        self._norm_alone = self._in_background and device.type == "cpu" and small
        if self._norm_alone:  # other instructions may give other bits
            capabilities = all_gather_json(self._comm, torch.backends.cpu.get_cpu_capability())
            self._norm_alone = len(set(capabilities)) == 1
        return list(self._memory)

    def finish(self, numbers: Numbers, *, comm: Collective) -> Finishing:
        """See `BucketReducer.finish`.

        With Horovod, Horovod's thread sums the numbers as one more tensor, and each rank computes the norm of small
        buckets itself.
        """
        if not self._norm_alone or not len(numbers):
            return super().finish(numbers, comm=comm)
        wait = self._comm.start_all_reduce(torch.from_numpy(numbers), number=len(self._memory))
        return self._finish_alone(numbers, wait, comm=comm)

    def _finish_alone(self, numbers: Numbers, wait: Callable[[], None], *, comm: Collective) -> Finishing:
        try:
            wait()
        except BufferMismatch:  # Horovod reports it on every rank, but not which rank differs
            check_same(comm, name="how many numbers a step sums", value=len(numbers), error=BufferMismatch)
            raise
        square = self._squares.of_share(0, num_shares=1)
        yield True
        return Reduced(square, numbers)

    def in_background(self, number: int) -> bool:
        return self._in_background

    def reduce(self, number: int) -> Iterator[bool]:
        if not 0 <= number < len(self._memory):
            raise UsageError(f"no bucket {number} to reduce: {len(self._memory)} are planned")
        return self._reduce(number)

    def _reduce(self, number: int) -> Iterator[bool]:
        """Starts the sum in the first `next`, and waits for the sum in the second.

        Backends match the operations of different ranks by their order, and only the first `next` calls of the
        reductions have the same order on every rank.
        """
        finish = None
        if self._comm.num_ranks > 1 and self._memory[number].numel():
            finish = self._sums.start(number, self._memory[number])
        yield True
        if finish is not None:
            finish()

    def end_step(self, *, applied: bool, rescale: float) -> None:
        if self._residuals is not None:
            self._residuals.end_step(applied=applied, rescale=rescale)

    def bytes_sent(self) -> int:
        return self._sums.bytes_sent

    def state(self) -> list[StateTensor]:
        return self._residuals.state() if self._residuals is not None else []

    def rows_to_load(self, shapes: Shapes) -> dict[str, list[range]]:
        return self._residuals.rows_to_load(shapes) if self._residuals is not None else {}

    def load_state(self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None = None) -> None:
        if self._residuals is not None:
            self._residuals.load_state(tensors, shapes)

    def close(self) -> None:
        """Frees the memory and the communicator. Collective; a second call does nothing."""
        self._memory = []
        if self._on_close is not None:
            close, self._on_close = self._on_close, None
            close()
