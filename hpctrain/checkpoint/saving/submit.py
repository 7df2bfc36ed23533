"""Work on files, in a thread or at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from hpctrain.errors import HpctrainError


def submit(executor: Executor | None, work: Callable[[], Any]) -> Future[Any]:
    """Run `work` in the executor, or now; an OSError or one of ours is raised by `Future.result`. What else is raised
    now is a bug, and comes at once."""
    if executor is not None:
        return executor.submit(work)
    done: Future[Any] = Future()
    try:
        done.set_result(work())
    except (OSError, HpctrainError) as error:
        done.set_exception(error)
    return done
