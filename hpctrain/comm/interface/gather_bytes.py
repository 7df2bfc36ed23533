"""Byte strings of any length over an all-gather of numbers: for backends that only send typed buffers."""

from __future__ import annotations

import torch

from hpctrain.comm.interface.communicator import Collective


def gather_bytes(comm: Collective, data: bytes) -> list[bytes]:
    """Every rank's `data`, in rank order: first the lengths, then the bytes. Collective."""
    length = torch.tensor([len(data)], dtype=torch.int64)
    lengths = comm.all_gather(length, counts=[1] * comm.num_ranks).tolist()
    # frombuffer refuses an empty buffer, and wants one that may be written.
    part = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
    whole = comm.all_gather(part, counts=lengths)
    return [bytes(piece.numpy()) for piece in whole.split(lengths)]
