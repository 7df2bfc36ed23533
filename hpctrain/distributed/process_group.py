"""A process group of torch.distributed over one of hpctrain's communicators, for tensors in host memory.

PyTorch calls the methods under the names of `torch.distributed.ProcessGroup`; the aliases are the names of other
PyTorch releases. Each method returns a work (PyTorch's name for the handle of an operation). Without `opts.asyncOp` the
operation has ended when the method returns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from hpctrain.comm import Collective, PeerMessages
from hpctrain.distributed import operations
from hpctrain.distributed.work import (
    MessageThread,
    MessageWork,
    OperationThread,
    barrier_with_timeout,
    finished_work,
)
from hpctrain.errors import UsageError

Tensors = Sequence[torch.Tensor]
# The largest tag that MPI guarantees. Barriers with a timeout use it.
_BARRIER_TAG = (1 << 15) - 1
# Messages of up to this size are copied when they are sent.
_COPIED_BYTES = 1 << 16


@final
class CommunicatorGroup(dist.ProcessGroup):
    """A process group of the backend `hpctrain`, which `init_process_group` registers.

    Args:
        comm: The communicator of the group's ranks. Only this object uses it, and this object closes it.
        messages: The messages between the ranks, which only this object uses and closes; None for a group of one rank.
        sums: A function that sums a tensor of shape (n,) over the ranks in place, used instead of `comm.all_reduce`,
            for example in two levels.
        timeout_s: The time limit of a barrier in seconds, after which the barrier raises CommunicationError. None if
            only the time limit of the session applies.
    """

    def __init__(
        self,
        comm: Collective,
        *,
        messages: PeerMessages | None,
        name: str,
        sums: Callable[[torch.Tensor], None] | None = None,
        timeout_s: float | None = None,
        on_shutdown: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(comm.rank, comm.num_ranks)  # type: ignore[call-arg,arg-type]
        self._comm = comm
        self._messages = messages
        self._sums = sums
        self._name = name
        self._description = "hpctrain"
        self._timeout_s = timeout_s
        self._on_shutdown = on_shutdown
        self._closed = False
        self._thread = OperationThread(f"hpctrain-group-{name}")
        self._moving = MessageThread(f"hpctrain-messages-{name}")

    def sum_by(self, make: Callable[[Collective], Callable[[torch.Tensor], None]]) -> None:
        """Sums with the function `make(comm)` from now on, where comm is the group's communicator.

        Call it on every rank.

        The function sums a tensor of shape (n,), float32 or float64, over the ranks in place.
        """
        self._sums = make(self._comm)

    # ------------------------------------------------------------------ what PyTorch asks of any group

    def getBackendName(self) -> str:  # noqa: N802
        return "hpctrain"

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def getSize(self) -> int:  # noqa: N802
        return self._comm.num_ranks

    def getRank(self) -> int:  # noqa: N802
        return self._comm.rank

    def size(self) -> int:
        return self._comm.num_ranks

    def rank(self) -> int:
        return self._comm.rank

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> dist.ProcessGroup:
        return self

    def shutdown(self) -> None:
        """Ends the group and frees its communicators. `destroy_process_group` calls it on every rank of the group."""
        if self._closed:
            return
        self._closed = True
        self._thread.close()
        self._moving.close()
        self._comm.close()
        if self._messages is not None:
            self._messages.close()
        if self._on_shutdown is not None:
            self._on_shutdown()

    def _start_coalescing(self, device: torch.device) -> None:
        """Does nothing, since operations run one after another in any case."""

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """Returns a work that ends after all operations that were started before."""
        return self._thread.run(lambda: None, [], behind=True)

    # ------------------------------------------------------------------ reductions

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self.allreduce_coalesced(tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        op = _op_of(opts)

        def reduce() -> None:
            for tensor in tensors:
                if tensor.layout == torch.sparse_coo:
                    tensor.copy_(operations.all_reduce_sparse(self._comm, tensor, op=op))
                    continue
                flat = _flat(tensor)
                operations.all_reduce(self._comm, flat, op=op, sums=self._sums)
                _give_back(flat, tensor)

        return self._start(reduce, tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        op, root = _op_of(opts), opts.rootRank

        def reduce() -> None:
            for tensor in tensors:
                flat = _flat(tensor)
                # On the other ranks the tensor stays as it is.
                flat = flat if self._comm.rank == root else flat.clone()
                operations.all_reduce(self._comm, flat, op=op, sums=self._sums)
                if self._comm.rank == root:
                    _give_back(flat, tensor)

        return self._start(reduce, tensors, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> dist.Work:
        op = _op_of(opts)

        def reduce() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                whole = _concatenated(parts)
                counts = [part.numel() for part in parts]
                _fill(output, operations.reduce_scatter(self._comm, whole, counts=counts, op=op))

        return self._start(reduce, outputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        op, size = _op_of(opts), self._comm.num_ranks
        for output, whole in zip(outputs, inputs, strict=True):
            operations.check_sizes(
                size * output.numel(), whole.numel(), operation="reduce_scatter", num_ranks=size
            )

        def reduce() -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                counts = [output.numel()] * size
                _fill(output, operations.reduce_scatter(self._comm, _flat(whole), counts=counts, op=op))

        return self._start(reduce, outputs, opts)

    # ------------------------------------------------------------------ gathering and distributing

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        root = opts.rootRank

        def send() -> None:
            for tensor in tensors:
                flat = _flat(tensor)
                self._comm.broadcast(operations.as_bytes(flat), root=root)
                _give_back(flat, tensor)

        return self._start(send, tensors, opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._gather_lists(outputs, inputs, opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        # Here there is a list per rank, in `_gather_lists` a list per tensor.
        return self._gather_lists(list(zip(*output_lists, strict=True)), inputs, opts)

    def _gather_lists(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        def gather() -> None:
            for parts, tensor in zip(outputs, inputs, strict=True):
                counts = [part.numel() for part in parts]
                whole = operations.all_gather(self._comm, _flat(tensor), counts=counts)
                _distribute(whole, parts)

        return self._start(gather, list(itertools.chain(*outputs)), opts)

    def all_gather_single(self, output: torch.Tensor, part: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [part], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        size = self._comm.num_ranks
        for output, part in zip(outputs, inputs, strict=True):
            operations.check_sizes(
                output.numel(), size * part.numel(), operation="all_gather", num_ranks=size
            )

        def gather() -> None:
            for output, part in zip(outputs, inputs, strict=True):
                flat = _flat(output)
                operations.all_gather(self._comm, _flat(part), counts=[part.numel()] * size, out=flat)
                _give_back(flat, output)

        return self._start(gather, outputs, opts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        root, rank, size = opts.rootRank, self._comm.rank, self._comm.num_ranks
        parts = outputs[0] if rank == root else []

        def gather() -> None:
            flat = _flat(inputs[0])
            send = [flat.numel() if other == root else 0 for other in range(size)]
            receive = [part.numel() for part in parts] if rank == root else [0] * size
            received = operations.exchange(self._comm, flat, send_counts=send, receive_counts=receive)
            _distribute(received, parts)

        return self._start(gather, parts, opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        root, rank, size = opts.rootRank, self._comm.rank, self._comm.num_ranks
        output, parts = outputs[0], inputs[0] if rank == root else []

        def scatter() -> None:
            flat = _concatenated(parts) if rank == root else output.new_empty(0)
            send = [part.numel() for part in parts] if rank == root else [0] * size
            receive = [output.numel() if other == root else 0 for other in range(size)]
            _fill(output, operations.exchange(self._comm, flat, send_counts=send, receive_counts=receive))

        return self._start(scatter, outputs, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        def exchange() -> None:
            received = operations.exchange(
                self._comm,
                _concatenated(inputs),
                send_counts=[part.numel() for part in inputs],
                receive_counts=[part.numel() for part in outputs],
            )
            _distribute(received, outputs)

        return self._start(exchange, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        whole: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        receive = operations.elements_of_ranks(output, output_split_sizes, num_ranks=self._comm.num_ranks)
        send = operations.elements_of_ranks(whole, input_split_sizes, num_ranks=self._comm.num_ranks)

        def exchange() -> None:
            received = operations.exchange(self._comm, _flat(whole), send_counts=send, receive_counts=receive)
            _fill(output, received)

        return self._start(exchange, [output], opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        timeout_s = self._timeout_s
        if opts is not None and opts.timeout > timedelta(0):
            timeout_s = opts.timeout.total_seconds()
        messages = self._messages
        if messages is None or timeout_s is None:
            return self._start(self._comm.barrier, [], opts)
        rank, size, limit_s = self._comm.rank, self._comm.num_ranks, timeout_s
        return self._start(
            lambda: barrier_with_timeout(messages, rank=rank, num_ranks=size, tag=_BARRIER_TAG, timeout_s=limit_s),
            [], opts,
        )  # fmt: skip

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ------------------------------------------------------------------ messages

    def send(self, tensors: Tensors, to: int, tag: int) -> dist.Work:
        buffer = operations.as_bytes(_flat(tensors[0]))
        copied = buffer.numel() <= _COPIED_BYTES
        pending = self._peers.send(buffer.clone() if copied else buffer, to=to, tag=_checked(tag))
        work = MessageWork(self._peers, pending, what=f"({buffer.numel()} bytes to rank {to} of the group)")
        self._moving.watch(work)
        # A copy is being sent: the caller may change the tensor at once, whatever the receiver does.
        return finished_work([]) if copied else work

    def recv(self, tensors: Tensors, source: int, tag: int) -> dist.Work:
        return self._receive(tensors[0], source=source, tag=tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        return self._receive(tensors[0], source=None, tag=tag)

    def _receive(self, tensor: torch.Tensor, *, source: int | None, tag: int) -> dist.Work:
        flat = _flat(tensor)
        buffer = operations.as_bytes(flat)
        pending = self._peers.receive(buffer, source=source, tag=_checked(tag))
        what = (
            f"({buffer.numel()} bytes from {'any rank' if source is None else f'rank {source}'} of the group)"
        )
        work = MessageWork(self._peers, pending, what=what, received=lambda: _give_back(flat, tensor))
        self._moving.watch(work)
        return work

    @property
    def _peers(self) -> PeerMessages:
        if self._messages is None:
            raise UsageError("a group of one rank has no other rank to send messages to")
        return self._messages

    # ------------------------------------------------------------------ details

    def _start(self, operation: Callable[[], None], outputs: Tensors, opts: Any) -> dist.Work:
        return self._thread.run(operation, outputs, behind=bool(getattr(opts, "asyncOp", False)))


def _op_of(opts: Any) -> str:
    return operations.op_name(opts.reduceOp) if opts is not None else "sum"


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements as a contiguous tensor of shape (n,): a view if the tensor is contiguous, else a copy.

    Raises UsageError if the tensor is not in host memory.
    """
    if tensor.device.type != "cpu":
        raise UsageError(
            f"the process group of hpctrain takes tensors in host memory, not on {tensor.device}: "
            'hpctrain.init_process_group(device="cuda") makes one over NCCL'
        )
    return tensor.detach().contiguous().view(-1)


def _give_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copies `flat` into `tensor`, unless `flat` is a view of `tensor`."""
    if flat.data_ptr() != tensor.data_ptr():
        _fill(tensor, flat)


def _fill(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    tensor.detach().copy_(flat.view(tensor.shape))


def _concatenated(parts: Tensors) -> torch.Tensor:
    return torch.cat([_flat(part) for part in parts])


def _distribute(whole: torch.Tensor, parts: Tensors) -> None:
    for part, received in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
        _fill(part, received)


def _checked(tag: int) -> int:
    if not 0 <= tag < _BARRIER_TAG:
        raise UsageError(f"the tag of a message is {tag}: give a tag from 0 to {_BARRIER_TAG - 1}")
    return tag
