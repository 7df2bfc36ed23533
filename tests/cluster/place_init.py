"""The first process of a place: it holds the namespaces, and takes in processes whose parents ended.

`python -I -S place_init.py SOCKET HOST_NAME COMMANDS`, in new process, UTS, network and mount namespaces;
COMMANDS is a JSON list of argument lists. It reports on SOCKET, where the kernel tells its process id, and
ends unless it is told that this has been recorded: so there is no moment at which the death of the owner
leaves a place that nobody can find. Told `tied`, it ends when its owner does; told `kept`, only when it is
killed. When it ends, the kernel ends every process of the place.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys


def main() -> int:
    path, host_name, commands = sys.argv[1:]
    socket.sethostname(host_name)
    report = "ready"
    for command in json.loads(commands):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            report = f"`{' '.join(command)}`: {done.stderr.strip()}"
            break
    owner = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner.connect(path)
    owner.send(json.dumps({"place": host_name, "report": report}).encode())
    answer = owner.recv(16)
    if answer not in (b"tied", b"kept"):
        return 1
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    watched = [reader, owner] if answer == b"tied" else [reader]
    while True:
        ready = select.select(watched, [], [])[0]
        if owner in ready:  # nothing more is ever sent: the owner is gone
            return 0
        os.read(reader, 4096)
        reap()


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    sys.exit(main())
