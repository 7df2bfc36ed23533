"""Which device a rank takes, and who is refused one."""

from __future__ import annotations

import torch

from benchmarks.gpu.compare import require
from benchmarks.gpu.outcome import CheckFailed, Found, Setting
from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.errors import LaunchError
from hpctrain.run.compute.device import Proposal, choose_device, decide, propose


def device_choice(setting: Setting) -> Found:
    chosen, note = _choose("cpu")
    require(chosen == torch.device("cpu") and note is None, f"'cpu' became {chosen} ({note})")
    pair = [Proposal(host="here", index=0, uuid="one"), Proposal(host="here", index=0, uuid="one")]
    require("have the same GPU" in str(decide(pair, asked="auto")), "two ranks on one GPU were not noticed")
    require(decide(pair, asked="cuda:0") is None, "two ranks may not share the GPU that was named")
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
    identity = propose(host="here", host_rank=0).uuid
    require(
        bool(identity) and identity == propose(host="here", host_rank=0).uuid,
        f"the device is known by {identity!r}",
    )
    return Found(text=f"auto, cuda and cuda:0 are {torch.cuda.get_device_name(0)}; a missing one is refused")


def _choose(asked: str) -> tuple[torch.device, str | None]:
    return choose_device(asked, comm=SerialWorld(), host="here", host_rank=0)


def _refused(asked: str) -> None:
    try:
        chosen, _ = _choose(asked)
    except LaunchError:
        return
    raise CheckFailed(f"{asked!r} became {chosen} instead of being refused")
