"""What the ranks do for the figure of checkpoints: each layout loads what each other has saved, and DCP both ways."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.parallel.cases import BATCH
from benchmarks.parallel.layouts import LAYOUTS
from benchmarks.parallel.training import Training
from benchmarks.parallel.workloads import WORKLOADS
from hpctrain.checkpoint import export_dcp, finished_newest_first, import_dcp, open_checkpoint
from hpctrain.comm import SerialWorld, broadcast_json
from hpctrain.run import Session

Settings = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]
STEPS = 3  # before the checkpoint
NEXT = 2  # after it: the first loss depends on the parameters, the second one on the optimizer's moments too
FROM = "parameters"  # the layout that DCP saves: FSDP2


def save(session: Session, settings: Settings) -> dict[str, list[float]]:
    """Trains and saves each layout; returns the losses of the next steps. Collective. settings: `layouts`, `folder`."""
    found = {}
    for name in settings["layouts"]:
        training = _made(session, name)
        for number in range(STEPS):
            training.step(number)
        training.save(Path(settings["folder"]) / name, step=STEPS)
        found[name] = _next_losses(training)
        training.close()
    return found


def load(session: Session, settings: Settings) -> dict[str, dict[str, Any]]:
    """Loads what each of `settings["saved"]` has saved in each of `settings["layouts"]`. Collective.

    Returns by `SAVED/LOADED`: `different`, the number of tensors of model and optimizer whose bits differ in a
    checkpoint that the loading layout saves at once, and the `losses` of the next steps.
    """
    folder = Path(settings["folder"])
    found = {}
    for saved in settings["saved"]:
        for loaded in settings["layouts"]:
            training = _made(session, loaded, model_seed=1)
            if training.load(folder / saved) != STEPS:
                raise RuntimeError(f"{loaded} did not begin where {saved} has ended")
            again = training.save(folder / f"{saved}-{loaded}-{session.world_size}", step=STEPS)
            differ = _on_rank_0(
                session, lambda again=again, saved=saved: _differ(again, _newest(folder / saved))
            )
            found[f"{saved}/{loaded}"] = {"different": differ, "losses": _next_losses(training)}
            training.close()
    return found


def dcp(session: Session, settings: Settings) -> dict[str, int]:
    """Exports each layout's checkpoint to DCP, where `dcp.load` reads it; imports what `dcp.save` wrote. Collective.

    Returns the number of tensors whose bits differ, by `to/LAYOUT` and `from/LAYOUT`.
    """
    import torch.distributed.checkpoint as torch_dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    folder = Path(settings["folder"])
    training = _made(session, FROM)  # opens torch.distributed
    found = {}
    for name in settings["layouts"]:
        checkpoint, exported = _newest(folder / name), folder / f"dcp-{name}"
        export_dcp(checkpoint, exported, comm=session.world)
        expected = _tensors(checkpoint)
        state = _state_dict({key: torch.full_like(tensor, -1) for key, tensor in expected.items()})
        torch_dcp.load(state, checkpoint_id=exported)
        found[f"to/{name}"] = _count_different(_flat(state), expected)

    training.load(folder / FROM)
    model, optimizer = get_state_dict(training.model, training.optimizer)
    torch_dcp.save({"model": model, "optim": optimizer}, checkpoint_id=folder / "from-dcp")
    import_dcp(folder / "from-dcp", folder / "imported", comm=session.world, step=STEPS)
    found[f"from/{FROM}"] = _on_rank_0(
        session, lambda: _differ(_newest(folder / "imported"), _newest(folder / FROM))
    )
    training.close()
    return found


def _made(session: Session, layout: str, *, model_seed: int = 0) -> Training:
    return Training(
        session,
        WORKLOADS["saved"],
        LAYOUTS[layout],
        batch=BATCH,
        dtype=torch.float64,
        model_seed=model_seed,
    )


def _next_losses(training: Training) -> list[float]:
    return [training.step(STEPS + number) for number in range(NEXT)]


def _newest(directory: Path) -> Path:
    return finished_newest_first(directory)[0]


def _tensors(checkpoint: Path) -> Tensors:
    """Returns the tensors of model and optimizer, whole."""
    every = open_checkpoint(checkpoint, comm=SerialWorld()).read_all()
    return {name: tensor for name, tensor in every.items() if name.startswith(("model/", "optimizer/"))}


def _differ(one: Path, other: Path) -> int:
    return _count_different(_tensors(one), _tensors(other))


def _count_different(found: Tensors, expected: Tensors) -> int:
    """Returns the number of tensors that only one of both has, or whose bits differ."""
    return len(found.keys() ^ expected.keys()) + sum(
        not torch.equal(found[name], tensor) for name, tensor in expected.items() if name in found
    )


def _on_rank_0(session: Session, count: Any) -> int:
    """Returns what `count` returns on rank 0. Collective."""
    found: int = broadcast_json(session.world, count() if session.rank == 0 else None)
    return found


def _state_dict(tensors: Tensors) -> dict[str, Any]:
    """Returns the state dict of DCP for tensors by the names of our checkpoints."""
    state: dict[str, Any] = {"model": {}, "optim": {"state": {}}}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "model":
            state["model"][rest] = tensor
        else:
            parameter, _, key = rest.rpartition("::")
            state["optim"]["state"].setdefault(parameter, {})[key] = tensor
    return state


def _flat(state: dict[str, Any]) -> Tensors:
    """Returns the tensors of a state dict of `_state_dict` by our names."""
    moments = state["optim"]["state"]
    return {
        **{f"model/{name}": tensor for name, tensor in state["model"].items()},
        **{f"optimizer/{name}::{key}": tensor for name, of in moments.items() for key, tensor in of.items()},
    }
