"""Writes a whole checkpoint from one rank alone to its node's storage: after a loss, when no rank can communicate."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpctrain.checkpoint.engines.engine_name import Engine
from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.format.state import State
from hpctrain.checkpoint.saving.save import SaveResult, save
from hpctrain.checkpoint.tiers.node_store import LocalStore, own_file
from hpctrain.checkpoint.tiers.partner_copy import Offer
from hpctrain.comm import Collective, SerialWorld
from hpctrain.storage import release_lease


def keep_state(store: LocalStore, state: State, *, step: int, comm: Collective | None = None) -> Path:
    """Writes the whole state of a run as a checkpoint of `step`, from which `recover` can continue the run.

    Not collective: one rank calls it, from any thread. The checkpoint counts once its note is written, so a rank that
    is killed meanwhile leaves nothing that could be taken for a checkpoint.

    Args:
        store: The node's storage.
        state: The whole content, none of it split over ranks. The tensors must not change until this returns.
        step: The step after which the run has this state.
        comm: A communicator of one rank. The layout of the file is computed once for each communicator; None: for this
            call.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: If the storage cannot be written.
    """
    created_unix_s = time.time()
    with _written(store, state, step=step, comm=comm or SerialWorld()) as saved:
        with explained(action="read", path=saved.path):
            num_bytes = own_file(saved.path).stat().st_size
        offer = Offer(
            step=step, save_id=saved.id, file=0, num_files=1, num_bytes=num_bytes, created_unix_s=created_unix_s
        )  # fmt: skip
        store.keep_whole(saved.path, offer=offer)
    return store.kept


def rehearse_keeping(store: LocalStore, state: State, *, step: int, comm: Collective) -> None:
    """Writes `state` as `keep_state` does, and removes it, so that a later call with the same `comm` is faster.

    Not collective. The tensors may change meanwhile. Raises CheckpointError if the storage cannot be written.
    """
    with _written(store, state, step=step, comm=comm):
        pass


@contextmanager
def _written(store: LocalStore, state: State, *, step: int, comm: Collective) -> Iterator[SaveResult]:
    """Writes a checkpoint to a folder that is removed at the end of the `with` block."""
    taking = store.kept / f".taking-{secrets.token_hex(8)}"
    with explained(action="keep the state in", path=taking):
        taking.mkdir(parents=True)
    try:
        yield save(
            state, directory=taking, step=step, comm=comm, keep=None, engine=Engine.DIRECT, files="node",
            node_of_rank=(0,), local=True, replica_check="off",
        )  # fmt: skip
    finally:
        release_lease(taking, in_parent=True)
        with suppress(OSError):
            shutil.rmtree(taking)
