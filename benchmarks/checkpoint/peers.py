"""Saving and loading of the same tensors by peers: torch.save, torch DCP, safetensors, h5py's mpio driver; and the time
that this disk needs to write their bytes, by the fastest method that we have found.

Each peer is used as its documentation shows, with its defaults. If only rank 0 saves, the other ranks sleep.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.checkpoint.suite import LIMIT
from hpctrain.bench.checkpoint.methods import (
    RAW_READ,
    RAW_WRITE,
    BenchState,
    MethodTime,
    RawShare,
    begin,
    make_cold,
    own_seconds,
    remove_and_sync,
    slowest_since,
)
from hpctrain.checkpoint.files.direct_io import BLOCK_BYTES, in_large_pages, open_uncached
from hpctrain.checkpoint.saving.rank_file_work import create_file
from hpctrain.comm import Collective
from hpctrain.comm.collectives.agreement import on_rank_0
from hpctrain.errors import CheckpointError
from hpctrain.storage import sync_directory

Tensors = Mapping[str, torch.Tensor]


class PeerFailed(RuntimeError):
    """A peer did not save or load the state that it was given, so its time is not valid."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """How another program saves and loads tensors. Both functions are called on every rank.

    save: writes tensors to a path that does not exist. load: reads tensors of the given names, shapes and dtypes from
    it into newly allocated memory. folder: whether the path is a folder.
    """

    name: str
    save: Callable[[Tensors, Path], None]
    load: Callable[[Tensors, Path], Tensors]
    folder: bool = False


@final
class PeerSaving:
    """A peer's save as a TimedMethod: to a new path each time, whose removal is not timed."""

    engine, raw = None, RAW_WRITE

    def __init__(self, peer: Peer, state: BenchState, *, comm: Collective, directory: Path) -> None:
        self.name = peer.name
        self._peer, self._comm, self._path = peer, comm, directory / f"peer-{peer.name}"
        self._tensors, self._num_bytes = named(state), state.num_bytes

    def turn(self) -> MethodTime:
        begin_s = begin(self._comm)
        self._peer.save(self._tensors, self._path)
        seconds = slowest_since(self._comm, begin_s)
        on_rank_0(self._comm, lambda: check_saved(self._path, num_bytes=self._num_bytes))
        remove_and_sync(self._path, comm=self._comm)
        return MethodTime(seconds=seconds)


@final
class PeerLoading:
    """A peer's load on every rank, as a TimedMethod. Its first turn saves what it reads."""

    engine, raw = None, RAW_READ

    def __init__(
        self, peer: Peer, state: BenchState, *, comm: Collective, directory: Path, cold: bool
    ) -> None:
        self.name = peer.name
        self._peer, self._comm, self._cold = peer, comm, cold
        self._path, self._tensors = directory / f"load-{peer.name}", named(state)
        self._is_there = False

    def turn(self) -> MethodTime:
        first, self._is_there = not self._is_there, True
        if first:
            self._peer.save(self._tensors, self._path)
        make_cold(self._path, comm=self._comm, cold=self._cold)
        begin_s = begin(self._comm)
        loaded = self._peer.load(self._tensors, self._path)
        seconds = slowest_since(self._comm, begin_s)
        if first and any(not same_bits(loaded[name], tensor) for name, tensor in self._tensors.items()):
            raise PeerFailed(f"{self.name}: the loaded tensors are not those that it saved")
        return MethodTime(seconds=seconds)


def named(state: BenchState) -> dict[str, torch.Tensor]:
    return {item.name: item.tensor for item in state.state.items}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares the bits of two tensors of shape (n,) or more, float32: random bits may be NaN, which equals nothing."""
    return torch.equal(one.reshape(-1).view(torch.int32), other.reshape(-1).view(torch.int32))


def check_saved(path: Path, *, num_bytes: int) -> None:
    """Raises PeerFailed if the file or folder has fewer than `num_bytes` bytes."""
    found = sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")))
    if found < num_bytes:
        raise PeerFailed(f"{path} has {found} bytes, fewer than the {num_bytes} bytes of the state")


def peers(comm: Collective, *, names: Sequence[str]) -> list[Peer]:
    """Returns the peers with these names, in that order. DCP needs the process group of torch."""
    made = {
        "torch.save": Peer(
            name="torch.save", save=_by_rank_0(comm, lambda tensors, path: torch.save(dict(tensors), path)),
            load=lambda tensors, path: torch.load(path, weights_only=True),
        ),
        "safetensors": Peer(
            name="safetensors", save=_by_rank_0(comm, _safetensors_save), load=_safetensors_load
        ),
        "dcp": Peer(name="dcp", save=_dcp_save, load=_dcp_load, folder=True),
        "dcp, no fsync": Peer(name="dcp, no fsync", save=_dcp_save_without_fsync, load=_dcp_load, folder=True),
        "h5py mpio": Peer(
            name="h5py mpio", save=lambda tensors, path: _h5py_save(tensors, path, comm=comm), load=_h5py_load
        ),
    }  # fmt: skip
    return [made[name] for name in names]


def _by_rank_0(comm: Collective, save: Callable[[Tensors, Path], None]) -> Callable[[Tensors, Path], None]:
    def alone(tensors: Tensors, path: Path) -> None:
        if comm.rank == 0:
            save(tensors, path)
        if comm.num_ranks > 1:
            dist.barrier()  # Gloo's waiting ranks sleep; MPI's would poll on the cores that rank 0 needs

    return alone


def _safetensors_save(tensors: Tensors, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(tensors), path)


def _safetensors_load(tensors: Tensors, path: Path) -> Tensors:
    """Loads, then reads one element of every page: safetensors maps the file and would read nothing before."""
    from safetensors.torch import load_file

    loaded = load_file(path)
    for tensor in loaded.values():
        tensor.reshape(-1)[:: 4096 // tensor.element_size()].sum()
    return loaded


def _dcp_save(tensors: Tensors, path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(dict(tensors), checkpoint_id=path)


def _dcp_save_without_fsync(tensors: Tensors, path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(path, sync_files=False))


def _dcp_load(tensors: Tensors, path: Path) -> Tensors:
    import torch.distributed.checkpoint as dcp

    loaded = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    dcp.load(loaded, checkpoint_id=path)
    return loaded


def _h5py_save(tensors: Tensors, path: Path, *, comm: Collective) -> None:
    """Saves as h5py's own example does: all ranks create the datasets, and each writes its part of each dataset."""
    import h5py
    from mpi4py import MPI

    with h5py.File(path, "w", driver="mpio", comm=MPI.COMM_WORLD) as file:
        datasets: list[Any] = [
            file.create_dataset(name, shape=tensor.shape, dtype="f4") for name, tensor in tensors.items()
        ]
        for dataset, tensor in zip(datasets, tensors.values(), strict=True):
            begin_at, end_at = (
                tensor.numel() * place // comm.num_ranks for place in (comm.rank, comm.rank + 1)
            )
            dataset[begin_at:end_at] = tensor[begin_at:end_at].numpy()


def _h5py_load(tensors: Tensors, path: Path) -> Tensors:
    import h5py

    with h5py.File(path) as file:
        return {name: torch.from_numpy(file[name][...]) for name in tensors}


# ---------------------------------------------------------------------- the disk

_PIECE_BYTES = 1 << 19
_THREADS = 8  # more, and larger or smaller pieces, took as long


def disk_limit(share: RawShare, *, comm: Collective, directory: Path) -> list[DiskLimit]:
    """Returns the method, or an empty list if the filesystem of `directory` has no O_DIRECT. Collective."""
    can = on_rank_0(comm, lambda: _takes_blocks(directory / "disk-limit-tried"), os_error=CheckpointError)
    return [DiskLimit(share, comm=comm, directory=directory)] if can else []


def _takes_blocks(path: Path) -> bool:
    path.touch()
    try:
        descriptor = open_uncached(path)
        if descriptor is None:
            return False
        try:
            return os.pwrite(descriptor, mmap.mmap(-1, BLOCK_BYTES), 0) == BLOCK_BYTES
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        finally:
            os.close(descriptor)
    finally:
        path.unlink()


@final
class DiskLimit:
    """Writes as many bytes as a rank's share with O_DIRECT from huge pages, several writes at once, then fsync.

    The file's disk blocks are allocated before the time begins. Nothing is copied, hashed or described.
    The constructor is collective.
    """

    name, engine, raw = LIMIT, None, RAW_WRITE

    def __init__(self, share: RawShare, *, comm: Collective, directory: Path) -> None:
        self._comm, self._path = comm, directory / "disk-limit"
        self._begin, self._end = share.begin, share.end - share.end % BLOCK_BYTES
        self._file_bytes = max(map(int, comm.all_gather_bytes(b"%d" % self._end)))
        num_bytes = self._end - self._begin
        memory = in_large_pages(num_bytes) or mmap.mmap(-1, num_bytes)
        self._memory = np.frombuffer(memory, dtype=np.uint8, count=num_bytes)
        self._memory[:] = np.random.default_rng(comm.rank).integers(0, 256, size=num_bytes, dtype=np.uint8)

    def turn(self) -> MethodTime:
        on_rank_0(self._comm, self._create, os_error=CheckpointError)
        seconds = own_seconds(self._comm, self._write)
        remove_and_sync(self._path, comm=self._comm)
        return MethodTime(seconds=seconds)

    def _create(self) -> None:
        create_file(self._path, file_bytes=self._file_bytes)
        sync_directory(self._path.parent)  # including the allocation of its blocks

    def _write(self) -> None:
        descriptor = open_uncached(self._path)
        if descriptor is None:
            raise OSError(
                f"{self._path} cannot be opened with O_DIRECT, although another file in its directory could"
            )

        def write(first: int) -> None:
            piece = self._memory[first : first + _PIECE_BYTES]
            if os.pwrite(descriptor, piece.data, self._begin + first) != piece.nbytes:
                raise OSError(f"a write to {self._path} wrote fewer bytes than asked")

        try:
            with ThreadPoolExecutor(_THREADS) as threads:
                for _ in threads.map(write, range(0, len(self._memory), _PIECE_BYTES)):
                    pass
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
