"""Only the checkpoint: verified and written by all ranks together, in a script with its own training loop.

hpctrain launch -n 2 -- python examples/only_checkpoint.py checkpoints
"""

import sys
from pathlib import Path

import torch

import hpctrain
from hpctrain.checkpoint import State, model_items

with hpctrain.init() as session:
    torch.manual_seed(0)  # a save compares parameters: they are the same on all ranks
    model = torch.nn.Linear(1000, 1000)
    state = State(items=model_items(model), document={"epoch": 7})
    saved = hpctrain.save(state, directory=Path(sys.argv[1]), step=100, comm=session.world)

    checkpoint = hpctrain.open_checkpoint(saved.path, comm=session.world)
    model.load_state_dict({name: checkpoint.read(name) for name in checkpoint.tensors})
    if session.rank == 0:
        print(
            f"{saved.path}: {saved.bytes:,} bytes in {saved.seconds:.3f} s; epoch {checkpoint.document['epoch']}"
        )
