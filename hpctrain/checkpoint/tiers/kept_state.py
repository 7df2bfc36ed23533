"""Writes a whole checkpoint from one rank alone to its node's storage: after a loss, when no rank can communicate."""

from __future__ import annotations

import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from hpctrain.checkpoint.engines.engine_name import Engine
from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.format.state import State
from hpctrain.checkpoint.saving.save import save
from hpctrain.checkpoint.tiers.node_store import LocalStore, own_file
from hpctrain.checkpoint.tiers.partner_copy import Offer
from hpctrain.comm import SerialWorld
from hpctrain.storage import release_lease


def keep_state(store: LocalStore, state: State, *, step: int) -> Path:
    """Writes the whole state of a run as a checkpoint of `step`, from which `recover` can continue the run.

    Not collective: one rank calls it, from any thread. The checkpoint counts once its note is written, so a rank that
    is killed meanwhile leaves nothing that could be taken for a checkpoint.

    Args:
        store: The node's storage.
        state: The whole content, none of it split over ranks. The tensors must not change until this returns.
        step: The step after which the run has this state.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: If the storage cannot be written.
    """
    created_unix_s = time.time()
    taking = store.kept / f".taking-{secrets.token_hex(8)}"
    with explained(action="keep the state in", path=taking):
        taking.mkdir(parents=True)
    try:
        saved = save(
            state, directory=taking, step=step, comm=SerialWorld(), keep=None, engine=Engine.DIRECT, files="node",
            node_of_rank=(0,), local=True, replica_check="off",
        )  # fmt: skip
        with explained(action="read", path=saved.path):
            num_bytes = own_file(saved.path).stat().st_size
        offer = Offer(
            step=step,
            save_id=saved.id,
            file=0,
            num_files=1,
            num_bytes=num_bytes,
            created_unix_s=created_unix_s,
        )
        store.keep_whole(saved.path, offer=offer)
    finally:
        release_lease(taking, in_parent=True)
        with suppress(OSError):
            shutil.rmtree(taking)
    return store.kept
