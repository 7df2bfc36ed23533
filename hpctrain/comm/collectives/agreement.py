"""Agreement between ranks: an error of one rank is raised on all of them before the next collective operation.

Every function here that takes a communicator is collective over it. Values are sent as JSON, never as pickle.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash

from hpctrain import errors
from hpctrain.comm.interface.communicator import Collective, ReduceOp
from hpctrain.errors import BufferMismatch, CommunicationError, HpctrainError, LaunchError

T = TypeVar("T")

# Up to this many distinct values are broadcast one by one, which saves gathering the length of every rank's value.
MAX_BROADCASTS = 8


def all_gather_json(comm: Collective, value: Any) -> list[Any]:
    """Returns every rank's `value`, in rank order. Collective.

    Ranks with equal values share one object in the list: do not change the objects. Raises TypeError, before anything
    is sent, if `value` cannot be written as JSON.
    """
    values, value_of_rank = all_gather_distinct(comm, value)
    return [values[number] for number in value_of_rank]


def all_gather_distinct(
    comm: Collective, value: Any, *, key: str | None = None
) -> tuple[list[Any], list[int]]:
    """Returns the distinct values of all ranks, and for each rank the index of its value among them. Collective.

    Each rank receives the hash of every other rank's value (XXH3, 64 bits), and each distinct value once. The values
    are ordered by the lowest rank that has them. Raises TypeError, before anything is sent, if `value` cannot be
    written as JSON.

    key: text to compare instead of the values; either all ranks pass a key or none does. Of ranks with the same key,
    the value of the lowest rank is used.
    """
    text = json.dumps(value)
    # torch has no unsigned 64-bit integers.
    mine = torch.from_numpy(
        np.array([xxhash.xxh3_64_intdigest((text if key is None else key).encode())], dtype=np.uint64).view(
            np.int64
        )
    )
    hashes = comm.all_gather(mine, counts=[1] * comm.num_ranks).tolist()
    holders: dict[int, int] = {}  # the lowest rank with each hash
    for rank, found in enumerate(hashes):
        holders.setdefault(found, rank)
    number_of = {found: number for number, found in enumerate(holders)}
    value_of_rank = [number_of[found] for found in hashes]
    if len(holders) == 1 and key is None:
        return [json.loads(text)], value_of_rank
    if len(holders) <= MAX_BROADCASTS:
        return [broadcast_json(comm, value, root=rank) for rank in holders.values()], value_of_rank
    held = holders[hashes[comm.rank]] == comm.rank
    texts = comm.all_gather_bytes(text.encode() if held else b"")
    return [json.loads(texts[rank]) for rank in holders.values()], value_of_rank


def broadcast_json(comm: Collective, value: Any, *, root: int = 0) -> Any:
    """Returns the `value` of the group's rank `root` on every rank. The other ranks' `value` is ignored. Collective."""
    data = json.dumps(value).encode() if comm.rank == root else b""
    length = torch.tensor([len(data)], dtype=torch.int64)
    comm.broadcast(length, root=root)
    if comm.rank == root:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        buffer = torch.empty(int(length), dtype=torch.uint8)
    comm.broadcast(buffer, root=root)
    return json.loads(bytes(buffer.numpy()))


def describe_ranks(ranks: Sequence[int]) -> str:
    """Returns a text such as `rank 3`, `ranks 0-3`, `ranks 0, 2-5, 7`."""
    ordered = sorted(ranks)
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(ordered) > 1 else ''} {text}"


def raise_together(comm: Collective, error: HpctrainError | None) -> None:
    """Raises an error on every rank if any rank passes an error. Collective.

    The class is that of the lowest rank that passes an error. The message is the same on every rank: each distinct
    message once, preceded by the world ranks that passed it and their hosts ("ranks 0-2 (host): ..."). If all ranks
    passed the same message, it stands alone. The raised error has `agreed` = True.
    """
    # A single int first: this vote is frequent, and nearly always there is no error.
    flag = torch.tensor([int(error is not None)], dtype=torch.int32)
    comm.all_reduce(flag)
    if not int(flag):
        return
    mine = None
    if error is not None:
        mine = {**_to_json(error), "host": socket.gethostname()}
    found = all_gather_json(comm, mine)
    failed = {comm.members[place]: entry for place, entry in enumerate(found) if entry is not None}
    first = failed[min(failed)]
    raise _class_of(first)(_merged(failed, num_ranks=comm.num_ranks), agreed=True) from error


def _to_json(error: HpctrainError) -> dict[str, Any]:
    return {"class": type(error).__name__, "code": int(error.exit_code), "text": str(error)}


def _class_of(entry: dict[str, Any]) -> type[HpctrainError]:
    """Returns the class in `hpctrain.errors` that `entry` names, or else the class for the exit code in `entry`.

    So every rank raises the same class, even if it has not imported the module that defines the original class.

    entry: an error as JSON, from `_to_json`.
    """
    named = getattr(errors, entry["class"], None)
    if isinstance(named, type) and issubclass(named, HpctrainError) and named.exit_code == entry["code"]:
        return named
    return errors.from_exit_code(entry["code"])


def _merged(failed: dict[int, dict[str, Any]], *, num_ranks: int) -> str:
    """Returns one message for all failed ranks. `failed` maps a world rank to its text and host."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted(failed):
        by_text.setdefault(failed[rank]["text"], []).append(rank)
    if len(by_text) == 1 and (len(failed) == num_ranks):
        return next(iter(by_text))
    lines = []
    for text, ranks in by_text.items():
        hosts = sorted({failed[rank]["host"] for rank in ranks})
        lines.append(f"{describe_ranks(ranks)} ({', '.join(hosts)}): {text}")
    return "\n".join(lines)


def agreed(comm: Collective, function: Callable[[], T], *, os_error: type[HpctrainError] = LaunchError) -> T:
    """Runs `function` on each rank and returns its value; raises an error on all ranks if `function` failed on any.

    Collective. An HpctrainError is raised as by `raise_together`; an OSError becomes `os_error`. Any other exception
    is a bug and is not caught: the run must then be aborted, since the other ranks are blocked in the vote. `function`
    must not communicate over `comm`.
    """
    error: HpctrainError | None = None
    value: T | None = None
    try:
        value = function()
    except HpctrainError as caught:
        error = caught
    except OSError as caught:
        error = os_error(str(caught))
        error.__cause__ = caught
    raise_together(comm, error)
    return value  # type: ignore[return-value]  # no error: `function` has returned


def on_rank_0(
    comm: Collective, function: Callable[[], Any], *, os_error: type[HpctrainError] = LaunchError
) -> Any:
    """Runs `function` on rank 0 of the group; returns its JSON value, or raises its error, on every rank. Collective.

    Errors are caught as in `agreed`. Every rank, rank 0 included, decodes the value from JSON, so that all ranks
    continue with equal values.
    """
    outcome: dict[str, Any] = {}
    error: HpctrainError | None = None
    if comm.rank == 0:
        try:
            outcome = {"value": function()}
        except HpctrainError as caught:
            error = caught
        except OSError as caught:
            error = os_error(str(caught))
            error.__cause__ = caught
        if error is not None:
            outcome = _to_json(error)
    outcome = broadcast_json(comm, outcome)
    if "text" not in outcome:
        return outcome["value"]
    raise _class_of(outcome)(outcome["text"], agreed=True) from error


def check_same(
    comm: Collective, *, name: str, value: Any, error: type[HpctrainError] = CommunicationError
) -> None:
    """Raises `error` on every rank unless `value` is equal on all ranks. Collective.

    The message names the ranks that differ from the majority. If several values are equally frequent, the value of the
    lowest rank counts as that of the majority. `value` must be convertible to JSON.

    name: description of `value` for the message.
    """
    text = json.dumps(value, sort_keys=True)
    if _same_hash(comm, text):
        return
    values: list[str] = all_gather_json(comm, text)
    counts = Counter(values)
    usual = max(counts, key=lambda v: (counts[v], -values.index(v)))
    usual_ranks = [comm.members[place] for place, v in enumerate(values) if v == usual]
    others: dict[str, list[int]] = {}
    for place, text in enumerate(values):
        if text != usual:
            others.setdefault(text, []).append(comm.members[place])
    differing = "; ".join(f"{describe_ranks(ranks)} {text}" for text, ranks in others.items())
    raise error(
        f"{name} must be the same on every rank: {describe_ranks(usual_ranks)} {usual}, but {differing}",
        agreed=True,
    )


def _same_hash(comm: Collective, text: str) -> bool:
    """Returns True if 63 bits of the XXH3 hash of `text` are equal on all ranks. Collective: 16 bytes per rank."""
    digest = xxhash.xxh3_64_intdigest(text.encode()) >> 1
    extremes = torch.tensor([digest, -digest], dtype=torch.int64)
    comm.all_reduce(extremes, op=ReduceOp.MAX)
    return int(extremes[0]) == -int(extremes[1])


def is_true_everywhere(comm: Collective, value: bool) -> bool:
    """Returns True if `value` is true on every rank. Collective: 4 bytes from each rank."""
    flag = torch.tensor([int(not value)], dtype=torch.int32)
    comm.all_reduce(flag, op=ReduceOp.MAX)
    return not int(flag)


def check_same_buffer(comm: Collective, buffer: torch.Tensor, *, name: str) -> None:
    """Raises BufferMismatch on every rank unless `buffer` has the same dtype and number of elements on all.

    Collective. The shapes may differ.
    """
    described = f"{buffer.numel()} x {str(buffer.dtype).removeprefix('torch.')}"
    check_same(comm, name=name, value=described, error=BufferMismatch)


# Attribute caches of network filesystems hide a new file for seconds from other nodes.
VISIBLE_WITHIN_S = 20.0


def make_shared_folder(directory: Path, *, comm: Collective) -> None:
    """Creates `directory` and its parents on rank 0, unless they exist, and waits until all ranks see it. Collective.

    Only one rank creates the folder, because of dispersed GlusterFS volumes that lack a server: if all ranks create the
    folder at once, different servers keep the folder that different nodes have created, and every access to a file in
    it fails with "stale file handle" from then on.

    Raises LaunchError on all ranks if the folder cannot be created, or if a rank does not see it within
    `VISIBLE_WITHIN_S`.
    """

    def make() -> None:
        directory.mkdir(parents=True, exist_ok=True)

    def look() -> None:
        if not is_seen(directory):
            raise LaunchError(
                f"the folder {directory.absolute()} that rank 0 made is not visible here after "
                f"{VISIBLE_WITHIN_S:.0f} s: choose one on a filesystem that all nodes share"
            )

    on_rank_0(comm, make)
    agreed(comm, look)


def is_seen(path: Path) -> bool:
    """Waits until `path`, created by another rank, is visible here.

    Returns False if it is not visible within `VISIBLE_WITHIN_S`. May raise OSError.
    """
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while not _is_there(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
        with suppress(OSError, StopIteration):  # queries the server instead of the attribute cache
            os.listdir(next(above for above in path.parents if above.exists()))
    return True


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        if error.errno == errno.ESTALE:  # handle of a deleted predecessor
            return False
        raise
