"""Main program of a worker process, which receives batches, transforms them, and sends them back.

The process does not use MPI, and ends when its parent ends. `hpctrain.data.transforms.worker_pool` starts it. It
imports only numpy, the user's module and the imports of that module, but not the rest of the package.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any

import numpy as np

from hpctrain.data.transforms.shared_memory import INDICES, map_arrays, receive, send, write_arrays
from hpctrain.data.transforms.transform import BatchTransform, TransformContext, find_transform
from hpctrain.errors import HpctrainError

_LONGEST_TEXT = 5000  # two such texts, with at most six bytes per character, fit into a message of 64 KiB
# Ctrl-C is sent to every process of a terminal, and Slurm's signal before a time limit to every process of a step.
# Workers ignore them: the parent decides how the run ends, and may need more batches.
_FOR_THE_PARENT = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGXCPU,
)  # fmt: skip


def main(control_descriptor: int, lifeline: int) -> int:
    """Transforms batches until the parent closes the control socket. Returns the exit code of the process.

    Both arguments are file descriptors. `lifeline` is the read end of a pipe; only the parent has the write end of the
    pipe open.
    """
    _end_with_parent(lifeline)
    for number in _FOR_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=control_descriptor)
    start = receive(control)
    if start is None:
        return 0
    sys.path[:] = start[0]["sys_path"]
    try:
        transform = find_transform(start[0]["transform"])
    except HpctrainError as error:
        send(control, {"error": str(error)[:_LONGEST_TEXT]})
        return 0
    send(control, {"ready": True})
    while (received := receive(control)) is not None:
        message, (descriptor,) = received
        _answer(control, transform, message, descriptor)
    return 0


def _end_with_parent(lifeline: int) -> None:
    """Makes the kernel end this process when the parent ends, even while user code is running.

    When the write end of the pipe is closed, the kernel sends SIGIO, which ends the process by default. A thread that
    watches the pipe would have to wait for the interpreter lock. PR_SET_PDEATHSIG is not used: that signal is sent when
    the thread that started the worker ends, and this thread may end with its epoch.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGIO})
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    closed_before = select.poll()
    closed_before.register(lifeline, select.POLLIN)
    if closed_before.poll(0):
        os._exit(0)


def _answer(
    control: socket.socket, transform: BatchTransform, message: dict[str, Any], descriptor: int
) -> None:
    try:
        arrays = map_arrays(descriptor, message["arrays"])
    finally:
        os.close(descriptor)
    indices = arrays.pop(INDICES).astype(np.int64)
    context = TransformContext(
        seed=message["seed"], epoch=message["epoch"], start=message["start"], indices=indices
    )
    try:
        made, description = write_arrays(transform(arrays, context=context))
    except HpctrainError as error:
        cause = error.__cause__
        text = "".join(traceback.format_exception(cause))[-_LONGEST_TEXT:] if cause is not None else ""
        send(control, {"error": str(error)[:_LONGEST_TEXT], "traceback": text})
        return
    try:
        send(control, {"arrays": description}, descriptors=(made,))
    finally:
        os.close(made)
