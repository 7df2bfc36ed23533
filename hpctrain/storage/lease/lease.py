"""A lease on a directory: a file that names who writes there, created so that only one process can.

    DIRECTORY/.lease-00000003                 of a run's directory
    PARENT/.checkpoints.lease-00000003        of a directory whose content is listed: beside it

The highest number holds. A process takes a lease over by creating the next number, which only one can (link(2) or
O_EXCL, atomic on NFS and Lustre; clocks and locks are not used); so the one that had it sees that it has lost it. A
thread of the holder writes its file again every `RENEW_S`, so that processes on other machines see it at work. A lease
that was taken over from a process that may still run is never removed, but marked as given back: otherwise that process
would not see that it has lost its own.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from hpctrain.storage.full_io import replace_file
from hpctrain.storage.lease.holder import Holder

RENEW_S = 60.0
# Of this process's clock. Longer than two renewals and what a network filesystem may hide of them.
LOST_AFTER_S = 200.0
# A lease without content: its process ended between creating and writing it, on a filesystem without hard links. One
# that was only slow notices in `check` that it has lost the lease.
EMPTY_AFTER_S = 20.0
_RENEWAL_MAY_TAKE_S = 5.0  # on a filesystem that hangs

# Holders that were watched for `LOST_AFTER_S` and did not renew: their other leases are taken over at once.
_lost: set[tuple[object, ...]] = set()


@dataclass(frozen=True, slots=True)
class Place:
    """Where the lease files of a directory are. subject: the directory, for messages."""

    folder: Path
    prefix: str
    subject: Path

    @classmethod
    def within(cls, directory: Path) -> Place:
        return cls(directory, ".lease-", directory)

    @classmethod
    def beside(cls, directory: Path) -> Place:
        """In the parent, if this process may read and write there, else within."""
        folder = directory.parent
        if folder == directory or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return cls.within(directory)
        return cls(folder, f".{directory.name}.lease-", directory)

    def path(self, number: int) -> Path:
        return self.folder / f"{self.prefix}{number:08d}"

    def newest(self) -> int:
        """Returns the number of the lease; 0 if nobody has one."""
        return max((number for number, partial in self._files().values() if not partial), default=0)

    def remove_older(self, number: int) -> None:
        """Removes the files of leases before `number`, also partial ones of processes that were killed in between."""
        for path, (other, _) in self._files().items():
            if other < number:
                with suppress(OSError):
                    path.unlink()

    def _files(self) -> dict[Path, tuple[int, bool]]:
        """Returns the number of each lease file, and whether it is one that was being written."""
        pattern = re.compile(re.escape(self.prefix) + r"(\d{8})(\.[0-9a-f]{16})?")
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            matches = [match for entry in entries if (match := pattern.fullmatch(entry.name))]
            return {self.folder / match[0]: (int(match[1]), match[2] is not None) for match in matches}
        return {}


class InUseError(Exception):
    """Another process has the lease. The text says who, and what to do."""


@final
class Lease:
    """This process's lease at `place`, whose folder exists. Make it with `take`."""

    def __init__(self, place: Place, number: int, holder: Holder, *, keeps_number: bool) -> None:
        self._place = place
        self._number = number
        self._holder = holder
        self._keeps_number = keeps_number
        self._renewals = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="hpctrain-lease", daemon=True)
        self._thread.start()

    @classmethod
    def take(
        cls,
        place: Place,
        *,
        say: Callable[[str], object] = lambda text: None,
        lost_after_s: float = LOST_AFTER_S,
        poll_s: float = 2.0,
        environ: Mapping[str, str] = os.environ,
    ) -> Lease:
        """Returns the lease once no other process has it.

        A holder on this machine, or of an earlier life of this Slurm job, is known to run or to have ended. Others are
        watched for `lost_after_s`, after `say` was called with a line that says so. Raises InUseError if another
        process has the lease, and OSError if the directory cannot be written to.
        """
        holder = Holder.of_this_process(secrets.token_hex(8), environ=environ)
        watched: tuple[int, bytes] | None = None
        since = 0.0
        while True:
            number = place.newest()
            content = _content(place.path(number)) if number else b""
            if content is None:
                continue  # given back just now
            given_back = _is_given_back(content)
            other = _parsed(content)
            if number and not given_back:
                ended = None if other is None else other.has_ended(seen_by=holder)
                if ended is None and other is not None and other.process in _lost:
                    ended = True
                if ended is False:
                    assert other is not None
                    raise InUseError(_refusal(place, number, other))
                if ended is None:
                    limit_s = lost_after_s if content else min(lost_after_s, EMPTY_AFTER_S)
                    if watched is None:
                        who = other.describe() if other is not None else "a process that cannot be read"
                        say(
                            f"{place.subject} is in use by {who}: waiting for up to {limit_s:.0f} s to see "
                            "whether it still runs"
                        )
                    if (number, content) != watched:
                        if watched is not None and other is not None:
                            raise InUseError(_refusal(place, number, other))
                        watched, since = (number, content), time.monotonic()
                    if time.monotonic() - since < limit_s:
                        time.sleep(min(poll_s, limit_s))
                        continue
                    if other is not None:
                        _lost.add(other.process)
            if _create(place.path(number + 1), holder):
                if (
                    place.newest() != number + 1
                ):  # a listing may miss files that others create and remove meanwhile
                    place.path(number + 1).unlink(missing_ok=True)
                    continue
                place.remove_older(number + 1)
                may_run = number > 0 and (other is None or not other.shares_machine(holder))
                return cls(place, number + 1, holder, keeps_number=given_back or may_run)

    def check(self) -> None:
        """Raises InUseError if another process has taken the lease over. Asks whether two files exist. Creates its own
        again if somebody has deleted it."""
        if self._own.exists() and not self._place.path(self._number + 1).exists():
            return
        number = self._place.newest()
        if number <= self._number:
            with suppress(FileNotFoundError):  # the folder itself is gone: what writes there finds out
                _create(self._own, self._holder)
            return
        content = _content(self._place.path(number))
        other = _parsed(content) if content is not None else None
        who = other.describe() if other is not None else "another process"
        raise InUseError(
            f"{self._place.subject} was taken over by {who}, which has not seen this process work for a while: it was "
            "suspended, perhaps. It saves nothing more; only one run can write there"
        )

    def release(self) -> None:
        """Gives the lease back. May be called twice."""
        if self._ended.is_set() or os.getpid() != self._holder.pid:
            return  # also in a forked process
        self._ended.set()
        self._thread.join(_RENEWAL_MAY_TAKE_S)
        with suppress(OSError):
            if self._place.newest() != self._number:
                return
            if self._keeps_number:
                self._write(given_back=True)
            else:
                self._own.unlink()

    @property
    def _own(self) -> Path:
        return self._place.path(self._number)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            self._renewals += 1
            with suppress(OSError):
                if self._place.newest() == self._number and not self._ended.is_set():
                    self._write(given_back=False)

    def _write(self, *, given_back: bool) -> None:
        path = self._own
        content = _encoded(self._holder, renewals=self._renewals, given_back=given_back)
        replace_file(path, content, partial=path.with_name(f"{path.name}.{self._holder.id}"))


def _encoded(holder: Holder, *, renewals: int, given_back: bool = False) -> bytes:
    lease = {"holder": holder.to_json(), "renewals": renewals, "given_back": given_back}
    return json.dumps(lease).encode() + b"\n"


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _parsed(content: bytes) -> Holder | None:
    try:
        return Holder.from_json(json.loads(content)["holder"])
    except (ValueError, KeyError, TypeError):
        return None


def _is_given_back(content: bytes) -> bool:
    try:
        return json.loads(content)["given_back"] is True
    except (ValueError, KeyError, TypeError):
        return False


def _create(path: Path, holder: Holder) -> bool:
    """Creates the lease file, complete at once. Returns False if another process has."""
    partial = path.with_name(f"{path.name}.{holder.id}")
    partial.write_bytes(_encoded(holder, renewals=0))
    try:
        try:
            os.link(partial, path)
        except FileNotFoundError:  # a process that has a later lease has removed it
            return False
        except FileExistsError:
            # The answer to an NFS request that was sent twice; then the link is there.
            try:
                return partial.stat().st_nlink == 2
            except FileNotFoundError:
                return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            return _create_exclusively(path, holder)  # a filesystem without hard links
        return True
    finally:
        with suppress(OSError):
            partial.unlink()


def _create_exclusively(path: Path, holder: Holder) -> bool:
    try:
        with path.open("xb") as file:
            file.write(_encoded(holder, renewals=0))
    except FileExistsError:
        return False
    return True


def _refusal(place: Place, number: int, other: Holder) -> str:
    return (
        f"{place.subject} is in use by another run: {other.describe()}. Two runs in one directory would mix their "
        "records and checkpoints: wait for that one or end it, or use another directory. If that process is certainly "
        "gone, "
        f"delete {place.path(number)}"
    )
