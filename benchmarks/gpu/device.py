"""Checks which device a rank gets, and when it is refused one."""

from __future__ import annotations

import torch

from benchmarks.gpu.compare import require
from benchmarks.gpu.outcome import CheckFailed, Found, Setting
from hpctrain.comm import run_threads
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.errors import LaunchError
from hpctrain.run.compute.device import Proposal, agree_on_gpus, choose_device, propose


def device_choice(setting: Setting) -> Found:
    chosen, note = _choose("cpu")
    require(chosen == torch.device("cpu") and note is None, f"'cpu' became {chosen} ({note})")
    require("has the same GPU" in str(_pair_on_one_gpu("auto")), "two ranks on one GPU were not noticed")
    require(_pair_on_one_gpu("cuda:0") is None, "two ranks may not share the GPU that was named")
    if not setting.has_gpu:
        require(_choose("auto")[0] == torch.device("cpu"), "'auto' is not the CPU where there is no GPU")
        for asked in ("cuda", "cuda:0"):
            _refused(asked)
        return Found(text="auto is the CPU, cuda is refused", needs_gpu=("taking a GPU",))
    for asked in ("auto", "cuda", "cuda:0"):
        chosen, note = _choose(asked)
        require(chosen == torch.device("cuda", 0) and note is None, f"{asked!r} became {chosen} ({note})")
        require(torch.cuda.current_device() == 0, "the device that was chosen is not the current one")
    _refused(f"cuda:{torch.cuda.device_count()}")
    identity = propose(host_rank=0).uuid
    require(
        bool(identity) and identity == propose(host_rank=0).uuid,
        f"the device is known by {identity!r}",
    )
    return Found(text=f"auto, cuda and cuda:0 are {torch.cuda.get_device_name(0)}; a missing one is refused")


def _choose(asked: str) -> tuple[torch.device, str | None]:
    return choose_device(asked, comm=SerialWorld(), hosts=["here"])


def _pair_on_one_gpu(asked: str) -> str | None:
    mine = Proposal(index=0, uuid="one")
    first, _ = run_threads(
        2, lambda world: agree_on_gpus(mine, asked=asked, comm=world, host="here", host_ranks=[0, 1])
    )
    return first


def _refused(asked: str) -> None:
    try:
        chosen, _ = _choose(asked)
    except LaunchError:
        return
    raise CheckFailed(f"{asked!r} became {chosen} instead of being refused")
