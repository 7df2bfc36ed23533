"""A lease on a directory, so that only one run at a time writes to it."""

from __future__ import annotations

import atexit
import errno
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, final

from hpctrain.storage.full_io import replace_file

# The process that holds a lease, and whether it still runs.


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process that holds a lease, described so that other processes can tell whether it still runs.

    Attributes:
        id: Random identifier of this holder.
        host: Name of the machine on which the process runs.
        pid: Process id.
        boot: Identifier of the machine's boot, since process ids are used again after a reboot.
        namespace: PID namespace of the process.
        ticks: Start time of the process, in clock ticks since the boot, since process ids are used again.
        job: Id of the Slurm job of the process, or "".
        restart: How often Slurm has requeued the job.
        attempt: Number of the attempt of `hpctrain supervise` to which the process belongs, or 0.
        since: Unix time at which the process took the lease, by the clock of its machine; only for messages.
    """

    id: str
    host: str
    pid: int
    boot: str
    namespace: str
    ticks: int
    job: str
    restart: int
    attempt: int
    since: float

    @classmethod
    def of_this_process(cls, id: str, *, environ: Mapping[str, str] = os.environ) -> Holder:
        return cls(
            id=id,
            host=socket.gethostname(),
            pid=os.getpid(),
            boot=_text("/proc/sys/kernel/random/boot_id"),
            namespace=_namespace("self"),
            ticks=_state_and_ticks(os.getpid())[1],
            job=environ.get("SLURM_JOB_ID", ""),
            restart=_number(environ.get("SLURM_RESTART_COUNT")),
            attempt=_number(environ.get("HPCTRAIN_ATTEMPT")),
            since=time.time(),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Holder:
        """Decodes the description of a process that holds a lease.

        Raises KeyError, TypeError or ValueError if `value` is not such a description.
        """
        return cls(**{f.name: type_of(value[f.name]) for f, type_of in zip(fields(cls), _TYPES, strict=True)})

    def has_ended(self, *, seen_by: Holder) -> bool | None:
        """Returns whether the process that this object describes has ended; None if `seen_by`, which asks, cannot tell.

        If both processes belong to the same Slurm job, but to different starts of the job (which Slurm has
        requeued) or to different attempts of the supervisor, the process of the earlier start or attempt has ended, and
        the process of the later one has not. Otherwise, if both are on the same machine, this process has ended if the
        machine no longer has such a process.
        """
        if self.job and self.job == seen_by.job:
            if self.restart != seen_by.restart:
                return self.restart < seen_by.restart
            if self.attempt and seen_by.attempt and self.attempt != seen_by.attempt:
                return self.attempt < seen_by.attempt
        if not self.shares_machine(seen_by):
            # Another machine, perhaps of the same name, or the same one after it was started again.
            return None
        state, ticks = _state_and_ticks(self.pid)
        if not state:
            # /proc may hide the processes of other users (`hidepid`).
            return None if _exists(self.pid) else True
        return state in ("Z", "X") or ticks != self.ticks

    @property
    def process(self) -> tuple[str, str, str, int, int]:
        """Values that together identify the process: host, boot, namespace, process id and start time."""
        return self.host, self.boot, self.namespace, self.pid, self.ticks

    def shares_machine(self, other: Holder) -> bool:
        """Returns whether both processes are on the same boot of the same machine, in the same PID namespace."""
        return self.process[:3] == other.process[:3]

    def describe(self) -> str:
        """Returns text such as `process 4711 on node3 (Slurm job 12), since 2026-01-31 12:00:00`."""
        job = f" (Slurm job {self.job})" if self.job else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}{job}, since {since}"


_TYPES = (str, str, int, str, str, int, str, int, int, float)


def _state_and_ticks(pid: int) -> tuple[str, int]:
    """Returns the state of a process, a letter as in /proc, and its start time in clock ticks since the boot.

    Returns ("", 0) if there is no such process.
    """
    text = _text(f"/proc/{pid}/stat")
    after_name = text.rpartition(")")[2].split()
    return (after_name[0], int(after_name[19])) if len(after_name) > 19 else ("", 0)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True


def _namespace(process: str) -> str:
    try:
        return os.readlink(f"/proc/{process}/ns/pid")
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


# A lease on a directory: a file that names the process that writes there, created so that only one process succeeds.
#
#     DIRECTORY/.lease-00000003                 for the directory of a run
#     PARENT/.checkpoints.lease-00000003        for a directory whose content users list: in its parent
#
# The file with the highest number is valid. A process takes a lease over by creating the file with the next number, in
# which only one process succeeds (link(2) or O_EXCL, atomic on NFS and Lustre; clocks and locks are not used). So the
# previous holder sees that it has lost the lease. A thread of the holder rewrites its file every `RENEW_S` seconds, so
# that processes on other machines see that it still runs. A lease that was taken over from a process that may still
# run is never removed, but marked as given back: otherwise that process would not see that it has lost its lease.


RENEW_S = 60.0
# Seconds of this process's clock. Longer than two renewals and the time for which a network filesystem may cache them.
LOST_AFTER_S = 200.0
# For a lease file without content: its process ended between creating and writing it, on a filesystem without hard
# links. A process that was only slow notices in `check` that it has lost the lease.
EMPTY_AFTER_S = 20.0
_RENEWAL_MAY_TAKE_S = 5.0  # on a filesystem that hangs

# Holders that did not renew their lease while they were watched: their other leases are taken over at once.
_lost: set[tuple[object, ...]] = set()


@dataclass(frozen=True, slots=True)
class LeaseLocation:
    """Where the files are that record who may write to a directory (leases): their folder, the prefix of their names.

    `subject` is the directory itself, for messages.
    """

    folder: Path
    prefix: str
    subject: Path

    @classmethod
    def within(cls, directory: Path) -> LeaseLocation:
        return cls(directory, ".lease-", directory)

    @classmethod
    def in_parent_of(cls, directory: Path) -> LeaseLocation:
        """Returns a location of lease files in the parent of `directory`.

        If the parent cannot be read and written, the location is in `directory` itself.
        """
        folder = directory.parent
        if folder == directory or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return cls.within(directory)
        return cls(folder, f".{directory.name}.lease-", directory)

    def path(self, number: int) -> Path:
        return self.folder / f"{self.prefix}{number:08d}"

    def newest(self) -> int:
        """Returns the number of the newest lease on the directory; 0 if there is no lease.

        Leases are numbered from 1.
        """
        return max((number for number, partial in self._files().values() if not partial), default=0)

    def remove_older(self, number: int) -> None:
        """Removes the files of leases before `number`, including partial files of processes that were killed."""
        for path, (other, _) in self._files().items():
            if other < number:
                with suppress(OSError):
                    path.unlink()

    def _files(self) -> dict[Path, tuple[int, bool]]:
        """Returns for each lease file the number of the lease, and True if the file is still being written."""
        pattern = re.compile(re.escape(self.prefix) + r"(\d{8})(\.[0-9a-f]{16})?")
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            matches = [match for entry in entries if (match := pattern.fullmatch(entry.name))]
            return {self.folder / match[0]: (int(match[1]), match[2] is not None) for match in matches}
        return {}


class InUseError(Exception):
    """Raised if another process has the lease on a directory. The message says which process, and what to do."""


@final
class Lease:
    """A lease on a directory that this process holds, and renews in a thread. Create it with `take`.

    While a process holds the lease, no other process writes to the directory.
    """

    def __init__(self, place: LeaseLocation, number: int, holder: Holder, *, keeps_number: bool) -> None:
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
        place: LeaseLocation,
        *,
        say: Callable[[str], object] = lambda text: None,
        lost_after_s: float = LOST_AFTER_S,
        poll_s: float = 2.0,
        environ: Mapping[str, str] = os.environ,
    ) -> Lease:
        """Takes and returns the lease on `place`, whose folder must exist, unless another process holds it.

        If another process holds the lease and runs on this machine, or belongs to another start of this Slurm job, it
        is known whether that process still runs. Any other holder is watched for `lost_after_s` seconds, to see whether
        this holder renews the lease; before that, `say` is called with a line that announces the wait. Raises
        InUseError if another process holds the lease, and OSError if the directory cannot be written to.
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
        """Raises InUseError if another process has taken over the lease from this process.

        This looks up two files. If somebody has deleted the file of this lease, the file is created again.
        """
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
            f"{self._place.subject} was taken over by {who}, because this process has not renewed its lease for a "
            "while (was it suspended?). This process saves nothing more: only one run may write there"
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
    """Creates the lease file `path` together with its content, which describes `holder`.

    Returns False if another process has already created the file.
    """
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


def _refusal(place: LeaseLocation, number: int, other: Holder) -> str:
    return (
        f"{place.subject} is in use by another run: {other.describe()}. Two runs in one directory would mix their "
        "records and checkpoints: wait for that one or end it, or use another directory. If that process is certainly "
        "gone, "
        f"delete {place.path(number)}"
    )


# The leases of this process, which end with it: one for each directory that it writes to.


_leases: dict[tuple[str, bool], Lease] = {}
_lock = threading.Lock()


def take_lease(
    directory: Path, *, in_parent: bool = False, say: Callable[[str], object] = lambda text: None
) -> None:
    """Takes the lease on an existing directory, or checks that this process still holds it.

    While a process holds the lease, no other run writes to the directory.

    With `in_parent`, the lease file lies in the parent of the directory. This is for directories whose content
    users list. Looks up two files if this process already holds the lease. Raises InUseError if another process
    holds the lease, and OSError.
    """
    key = _key(directory, in_parent=in_parent)
    with _lock:
        lease = _leases.get(key)
        if lease is None:
            path = Path(key[0])
            _leases[key] = Lease.take(
                LeaseLocation.in_parent_of(path) if in_parent else LeaseLocation.within(path), say=say
            )
        else:
            lease.check()


def check_lease(directory: Path, *, in_parent: bool = False) -> None:
    """Raises InUseError if this process held the lease on `directory` and another process has taken it over."""
    lease = _leases.get(_key(directory, in_parent=in_parent))
    if lease is not None:
        lease.check()


def release_lease(directory: Path, *, in_parent: bool = False) -> None:
    """Gives back the lease on `directory`, if this process holds it."""
    with _lock:
        lease = _leases.pop(_key(directory, in_parent=in_parent), None)
    if lease is not None:
        lease.release()


@atexit.register
def release_all() -> None:
    """Gives back all leases of this process."""
    while _leases:
        _leases.popitem()[1].release()


def _key(directory: Path, *, in_parent: bool) -> tuple[str, bool]:
    return os.path.realpath(directory), in_parent
