"""A real filesystem that fails when told to: FUSE in a process of its own, passing everything on to a folder.

Run as `python faulty_filesystem.py FOLDER MOUNT_POINT`. It says `ready` and then answers each line of JSON on its
standard input with one on its standard output; when its input ends (whoever started it is gone) it unmounts
and leaves. `SIGKILL` of it is what the death of a node's mount is: every call ends with ENOTCONN.

Requests: {"fault": {...} or null} sets the fault and counts anew, {"count": true} tells the operations since,
{"trace": true} tells them with all their data, for a replay. A fault is {"kind": ..., "at": n, ...}:
the n-th operation that changes anything (0: every one) meets it.

    error        `errno` instead of the operation; with `sticky` all later ones but removals meet it too
    short        a write takes only a part of its data
    kill-before, kill-after   SIGKILL to the processes in `victims`, then an error, or after the operation
    die-before, die-after     SIGKILL to this process
    hang         it takes until the process `until_gone` has ended, and nothing else goes on meanwhile
    vanish       the folder `directory` of the filesystem is moved away
    slow         it takes `delay_s` longer

Reads of files whose path holds TEXT are counted too, and may meet the fault, with `"reads": TEXT`. With the further
argument `direct-io` the kernel keeps nothing of what was read, so every read arrives here.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mfusepy  # type: ignore[import-untyped]

_DETACH = 2  # MNT_DETACH
REMOVALS = ("unlink", "rmdir")
STAT_FIELDS = (
    "st_mode", "st_ino", "st_dev", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks",
)  # fmt: skip


def unmount(place: str) -> None:
    """Take the mount away at once, also when whoever served it is dead or it is still in use."""
    if ctypes.CDLL(None).umount2(os.fsencode(place), _DETACH) != 0:
        subprocess.run(["fusermount3", "-u", "-z", place], capture_output=True, timeout=300)


@dataclass
class Control:
    """Which fault is asked for, and what has been done since."""

    root: str
    fault: dict[str, Any] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)
    failing: bool = False
    tracing: bool = False

    def request(self, line: str) -> dict[str, Any]:
        asked = json.loads(line)
        if "fault" in asked:
            self.fault, self.done, self.failing = asked["fault"] or {}, [], False
            self.trace, self.tracing = [], bool(self.fault.get("trace"))
            return {}
        if "count" in asked:
            return {"operations": list(self.done)}
        return {"trace": self.trace}

    def begin(self, operation: str) -> str:
        """Count the operation; the kind of fault that is left for it to do, or "". Raises OSError."""
        if not self.fault:
            return ""
        self.done.append(operation)
        at, kind = self.fault.get("at", -1), self.fault.get("kind", "")
        due = at in (0, len(self.done))
        if kind == "error" and (due or self.failing):
            self.failing = bool(self.fault.get("sticky"))
            if due or operation not in REMOVALS:
                raise OSError(self.fault["errno"], os.strerror(self.fault["errno"]))
        if not due:
            return ""
        if kind == "kill-before":
            self._kill()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if kind == "die-before":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "slow":
            time.sleep(self.fault["delay_s"])
        if kind == "hang":
            end_s = time.monotonic() + 300
            while os.path.exists(f"/proc/{self.fault['until_gone']}") and time.monotonic() < end_s:
                time.sleep(0.05)
        if kind == "vanish":
            place = os.path.join(self.root, self.fault["directory"])
            os.rename(place, place + ".away")
        return str(kind)

    def end(self, kind: str) -> None:
        if kind == "kill-after":
            self._kill()
        if kind == "die-after":
            os.kill(os.getpid(), signal.SIGKILL)

    def record(self, operation: str, **what: Any) -> None:
        if self.tracing:
            self.trace.append({"operation": operation, **what})

    def _kill(self) -> None:
        for pid in self.fault["victims"]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def changing(method: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that changes something: counted, and a fault may meet it."""

    @functools.wraps(method)
    def faulty(self: Passthrough, *arguments: Any) -> Any:
        kind = self.control.begin(method.__name__)
        self.kind = kind
        result = method(self, *arguments)
        self.control.end(kind)
        return result

    return faulty


class Passthrough(mfusepy.Operations):
    """Every call goes to the same path under `control.root`."""

    use_ns = True
    # Calls on an open file come without a path: it may have been removed or renamed.
    flag_nopath = flag_nullpath_ok = True

    def __init__(self, control: Control) -> None:
        self.control = control
        self.kind = ""
        self.writable: set[int] = set()
        self.paths: dict[int, str] = {}  # of open files, as they were called then

    def _real(self, path: str) -> str:
        return self.control.root + path

    def init_with_config(self, connection: Any, settings: Any) -> None:
        print("ready", flush=True)

    # What only looks.

    def access(self, path: str, amode: int) -> int:
        if not os.access(self._real(path), amode):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return 0

    def getattr(self, path: str | None, fh: int | None = None) -> dict[str, Any]:
        found = os.fstat(fh) if fh is not None else os.lstat(self._real(path or "/"))
        times = {
            "st_atime": found.st_atime_ns, "st_mtime": found.st_mtime_ns, "st_ctime": found.st_ctime_ns
        }  # fmt: skip
        return {**{name: getattr(found, name) for name in STAT_FIELDS}, **times}

    def opendir(self, path: str) -> int:
        return os.open(self._real(path), os.O_RDONLY | os.O_DIRECTORY)

    def readdir(self, path: None, fh: int) -> Iterator[tuple[str, dict[str, Any], int]]:
        for name in [".", "..", *os.listdir(fh)]:
            yield name, {}, 0

    def releasedir(self, path: None, fh: int) -> int:
        os.close(fh)
        return 0

    def readlink(self, path: str) -> str:
        return os.readlink(self._real(path))

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._real(path))
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}

    def read(self, path: None, size: int, offset: int, fh: int) -> bytes:
        within = self.control.fault.get("reads")
        if within is not None and within in self.paths[fh]:
            self.control.begin("read")
        return os.pread(fh, size, offset)

    def release(self, path: None, fh: int) -> int:
        self.writable.discard(fh)
        os.close(fh)
        return 0

    def flush(self, path: None, fh: int) -> int:
        return int(self.close(fh)) if fh in self.writable else 0

    def open(self, path: str, flags: int) -> int:
        # Whoever opens it past the cache has aligned memory; what arrives here has not.
        fh = os.open(self._real(path), flags & ~(os.O_CREAT | os.O_DIRECT))
        self.paths[fh] = path
        if flags & os.O_ACCMODE != os.O_RDONLY:
            self.writable.add(fh)
        return fh

    # What changes something.

    @changing
    def close(self, fh: int) -> int:
        return 0

    @changing
    def create(self, path: str, mode: int, flags: Any = None) -> int:
        fh = os.open(self._real(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)
        self.paths[fh] = path
        self.writable.add(fh)
        self.control.record("create", path=path, inode=os.fstat(fh).st_ino)
        return fh

    @changing
    def write(self, path: None, data: bytes, offset: int, fh: int) -> int:
        if self.kind == "short" and len(data) > 3:
            data = data[: 65537 if len(data) > 70000 else len(data) // 2 + 1]
        text = base64.b64encode(data).decode()
        self.control.record("write", inode=os.fstat(fh).st_ino, offset=offset, data=text)
        return os.pwrite(fh, data, offset)

    @changing
    def truncate(self, path: str | None, length: int, fh: int | None = None) -> int:
        place: str | int = self._real(path or "") if fh is None else fh
        self.control.record("truncate", inode=os.stat(place).st_ino, length=length)
        os.truncate(place, length)
        return 0

    @changing
    def fallocate(self, path: None, mode: int, offset: int, size: int, fh: int) -> int:
        if mode:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        length = max(os.fstat(fh).st_size, offset + size)
        self.control.record("truncate", inode=os.fstat(fh).st_ino, length=length)
        os.posix_fallocate(fh, offset, size)
        return 0

    @changing
    def fsync(self, path: None, datasync: int, fh: int) -> int:
        self.control.record("fsync", inode=os.fstat(fh).st_ino)
        return 0  # the folder below is only ever lost together with the machine

    @changing
    def fsyncdir(self, path: None, datasync: int, fh: int) -> int:
        self.control.record("fsyncdir", inode=os.fstat(fh).st_ino)
        return 0

    @changing
    def rename(self, old: str, new: str) -> int:
        os.rename(self._real(old), self._real(new))
        self.control.record("rename", path=old, to=new)
        return 0

    @changing
    def unlink(self, path: str) -> int:
        os.unlink(self._real(path))
        self.control.record("unlink", path=path)
        return 0

    @changing
    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._real(path), mode)
        self.control.record("mkdir", path=path, inode=os.stat(self._real(path)).st_ino)
        return 0

    @changing
    def rmdir(self, path: str) -> int:
        os.rmdir(self._real(path))
        self.control.record("rmdir", path=path)
        return 0

    # Owners, modes and times: nothing that a checkpoint depends on. mfusepy has no path of an open file's.

    def chmod(self, path: str | None, mode: int) -> int:
        if path is not None:
            os.chmod(self._real(path), mode)
        return 0

    def chown(self, path: str | None, uid: int, gid: int) -> int:
        if path is not None:
            os.chown(self._real(path), uid, gid, follow_symlinks=False)
        return 0

    def utimens(self, path: str | None, times: tuple[int, int] | None = None) -> int:
        if path is not None and times is not None:
            os.utime(self._real(path), ns=times)
        return 0


class Served(mfusepy.FUSE):
    """mfusepy's, which forgets the open file of an ftruncate, and so has neither that nor a path."""

    def truncate_fuse_3(self, path: bytes | None, length: int, fip: Any) -> int:
        fh = fip.contents.fh if fip else None
        return int(self.operations.truncate(None if path is None else os.fsdecode(path), length, fh))


def answer_requests(control: Control, mount_point: str) -> None:
    for line in sys.stdin:
        print(json.dumps(control.request(line)), flush=True)
    unmount(mount_point)
    os._exit(0)


def main(folder: str, mount_point: str, *options: str) -> None:
    control = Control(root=os.path.realpath(folder))
    threading.Thread(target=answer_requests, args=(control, mount_point), daemon=True).start()
    # One thread: operations are counted in one order. Nothing is remembered by the kernel for longer than a
    # call: two mounts of one folder see each other's changes.
    Served(
        Passthrough(control), mount_point, foreground=True, nothreads=True, attr_timeout=0, entry_timeout=0,
        negative_timeout=0, hard_remove=True, fsname="hpctrain-faulty", direct_io="direct-io" in options,
    )  # fmt: skip
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
