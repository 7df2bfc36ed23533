"""A user's loop with a parameter server, in which one rank fails: `python -m tests.faults.ssp_program OPTIONS`.

OPTIONS are JSON: rank, how and at (which rank does what after how many of its batches or, if it only serves,
updates), staleness, servers, folder.
Each rank appends what it used to `used-RANK`, and says in `failed` when it fails.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hpctrain
from hpctrain.data import FieldSpec
from hpctrain.reduce import SspUpdater
from hpctrain.train import Position

STEPS, SAVE_EVERY, LIMIT_S = 60, 10, 8.0


class Rows:
    """Samples of five numbers, which depend on the index."""

    is_thread_safe = True
    num_samples = 1000
    fields = {"x": FieldSpec(dtype="float64", shape=(5,)), "number": FieldSpec(dtype="int64", shape=())}  # noqa: RUF012

    def gather(self, indices: Any, *, out: Any = None) -> dict[str, Any]:
        rows = np.sin(np.arange(5)[None, :] + 3.7 * np.asarray(indices)[:, None])
        found = {"x": rows, "number": np.asarray(indices, dtype=np.int64)}
        for name, values in found.items():
            if out is not None and name in out:
                out[name][...] = values
        return found


def fail(how: str, folder: Path) -> None:
    (folder / "failed").write_text(str(time.time()))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "hang":
        time.sleep(3600)
    raise ZeroDivisionError("a bug of the user's")


def main(*, folder: str, staleness: Any, servers: Any, rank: int = -1, how: str = "", at: int = 0) -> None:
    session = hpctrain.init(timeout_s=LIMIT_S)
    where = Path(folder)
    with session:
        session.world.publish_in(where / "watch")
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(5, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = {"method": "ssp", "staleness": staleness, "servers": servers}
        updater = session.distributed_optimizer(model, optimizer, schedule=schedule)
        assert isinstance(updater, SspUpdater)
        loader = session.loader(Rows(), global_batch=12, seed=3)
        position: Position = session.load_state(where / "checkpoints", updater, loader=loader)
        num_batches = 0
        if session.rank == rank and not updater.trains:  # it fails while it serves
            updater.before_update = lambda update: fail(how, where) if update == at else None
        while position.step < STEPS:
            batches = session.shared_batches(updater, loader, position=position, steps=SAVE_EVERY)
            used = []
            for batch in batches:
                time.sleep(0.01)
                num_batches += 1
                if session.rank == rank and num_batches == at:
                    fail(how, where)
                loss = model(batch["x"]).square().mean()
                updater.backward(loss, weight=batch.weight)
                updater.step()
                used += batch["number"].tolist()
            position = batches.position
            session.save_state(where / "checkpoints", updater, position, loader=loader)
            with (where / f"used-{session.rank}").open("a") as file:  # of steps that a checkpoint holds
                file.write("".join(f"{number}\n" for number in used))
        if session.rank == 0:
            (where / "finished").write_text(
                json.dumps([p.detach().flatten().tolist() for p in model.parameters()])
            )


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
