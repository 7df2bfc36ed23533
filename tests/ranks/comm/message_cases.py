"""What ranks do in test_messages: messages that are longer than one of MPI may be."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from hpctrain.comm import PeerMessages, World
from hpctrain.comm.backends.mpi_world import MpiWorld
from hpctrain.errors import CommunicationError
from hpctrain.run import init_process_group

MOST = 7  # bytes of a message of MPI
LENGTHS = [0, 1, 6, 7, 8, 14, 15, 100]


def in_pieces(world: World) -> None:
    """On three ranks. A buffer's values tell its sender and number, so that mixed pieces are noticed."""
    opened = MpiWorld.open(chunk_elems=MOST).open_group(range(world.num_ranks))
    messages = opened[1]
    assert messages is not None
    for case in (_in_order, _from_any, _held_back, _of_two_threads, _of_another_length):
        case(messages, world.rank)
        world.barrier()
    messages.close()


def _filled(length: int, value: int) -> torch.Tensor:
    return torch.full((length,), value, dtype=torch.uint8)


def _wait(messages: PeerMessages, *pending: object) -> None:
    for one in pending:
        messages.wait(one, what="test")


def _in_order(messages: PeerMessages, rank: int) -> None:
    """All lengths, with two tags, sent before anything is waited for; received from the last tag on."""
    to, source = (rank + 1) % 3, (rank - 1) % 3
    sent = [
        messages.send(_filled(length, 10 * tag + number), to=to, tag=tag)
        for tag in (1, 2)
        for number, length in enumerate(LENGTHS)
    ]
    buffers = {tag: [_filled(length, 255) for length in LENGTHS] for tag in (2, 1)}
    received = [
        messages.receive(buffer, source=source, tag=tag)
        for tag, of_tag in buffers.items()
        for buffer in of_tag
    ]
    _wait(messages, *received, *sent)
    for tag, of_tag in buffers.items():
        for number, (length, buffer) in enumerate(zip(LENGTHS, of_tag, strict=True)):
            assert buffer.tolist() == [10 * tag + number] * length
    assert all(messages.source_of(one) == source for one in received)


def _from_any(messages: PeerMessages, rank: int) -> None:
    """Rank 0 receives four long messages of two ranks; the sizes do not say from whom they come."""
    if rank != 0:
        _wait(messages, *[messages.send(_filled(20, 10 * rank + n), to=0, tag=3) for n in range(2)])
        return
    buffers = [_filled(20, 255) for _ in range(4)]
    received = [messages.receive(buffer, source=None, tag=3) for buffer in buffers]
    _wait(messages, *reversed(received))
    for buffer, one in zip(buffers, received, strict=True):
        assert len(set(buffer.tolist())) == 1
        assert int(buffer[0]) // 10 == messages.source_of(one)
    assert sorted(int(buffer[0]) for buffer in buffers) == [10, 11, 20, 21]


def _held_back(messages: PeerMessages, rank: int) -> None:
    """A receive from a named rank after one from any, of the same tag; and short ones between long ones."""
    if rank == 1:
        _wait(messages, *[messages.send(_filled(length, length), to=0, tag=4) for length in (30, 3, 31)])
    if rank == 0:
        buffers = [_filled(length, 255) for length in (30, 3, 31)]
        received = [
            messages.receive(buffer, source=source, tag=4)
            for buffer, source in zip(buffers, (None, 1, None), strict=True)
        ]
        while not messages.finished(received[2]):
            pass
        _wait(messages, *received)
        assert [buffer.tolist() for buffer in buffers] == [[30] * 30, [3] * 3, [31] * 31]
        assert [messages.source_of(one) for one in received] == [1, 1, 1]


def _of_two_threads(messages: PeerMessages, rank: int) -> None:
    def send(value: int) -> None:
        for _ in range(20):
            _wait(messages, messages.send(_filled(50, value), to=0, tag=5))

    if rank == 1:
        threads = [threading.Thread(target=send, args=(value,)) for value in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if rank == 0:
        for _ in range(40):
            buffer = _filled(50, 255)
            _wait(messages, messages.receive(buffer, source=1, tag=5))
            assert buffer.tolist() in ([1] * 50, [2] * 50)


def _of_another_length(messages: PeerMessages, rank: int) -> None:
    """The receiver's error says both lengths; the next message is received as usual."""
    if rank == 1:
        _wait(messages, messages.send(_filled(17, 1), to=0, tag=6))
        _wait(
            messages, messages.send(_filled(40, 2), to=0, tag=7), messages.send(_filled(25, 3), to=0, tag=6)
        )
    if rank == 0:
        wrong = messages.receive(_filled(40, 255), source=1, tag=6)
        with pytest.raises(CommunicationError, match="message of 17 bytes instead of the 40"):
            _wait(messages, wrong)
        with pytest.raises(CommunicationError, match="17 bytes"):
            messages.finished(wrong)
        long, next_one = _filled(40, 255), _filled(25, 255)
        _wait(messages, messages.receive(long, source=1, tag=7))
        _wait(messages, messages.receive(next_one, source=1, tag=6))
        assert long.tolist() == [2] * 40
        assert next_one.tolist() == [3] * 25


def over_two_gib(world: World) -> None:
    """On two ranks: messages of a process group that MPI's counts cannot hold."""
    init_process_group()
    num_bytes = 2**31 + 4096
    if world.rank == 0:
        whole = torch.empty(num_bytes, dtype=torch.uint8)
        for begin in range(0, num_bytes, 1 << 24):
            whole[begin : begin + (1 << 24)] = (begin >> 24) % 251
        dist.send(whole, 1)
        dist.isend(whole.view(torch.int16), 1, tag=3).wait()
    else:
        whole = torch.zeros(num_bytes, dtype=torch.uint8)
        for source, tag in ((None, 0), (0, 3)):
            whole.zero_()
            target = whole.view(torch.int16) if tag else whole
            assert dist.recv(target, source, tag=tag) == 0
            for begin in range(0, num_bytes, 1 << 24):
                part = whole[begin : begin + (1 << 24)]
                assert int(part.min()) == int(part.max()) == (begin >> 24) % 251, begin
    # The collective operations that send one tensor to one rank.
    received = torch.zeros(num_bytes if world.rank == 1 else 0, dtype=torch.uint8)
    sent = whole if world.rank == 0 else whole[:0]
    counts = [[0, num_bytes], [0, 0]]  # of rank 0, of rank 1
    dist.all_to_all_single(
        received, sent, [counts[other][world.rank] for other in range(2)], counts[world.rank]
    )
    if world.rank == 1:
        assert torch.equal(received, whole)
        whole.zero_()
    dist.broadcast(whole, 0)
    received.zero_()
    batch = dist.P2POp(dist.isend, whole, 1) if world.rank == 0 else dist.P2POp(dist.irecv, received, 0)
    for work in dist.batch_isend_irecv([batch]):
        work.wait()
    if world.rank == 1:
        assert torch.equal(received, whole)
        assert int(whole[-1]) == ((num_bytes - 1) >> 24) % 251
    dist.destroy_process_group()
