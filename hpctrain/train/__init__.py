"""The flow of training: task, state, schedule, loop."""

from hpctrain.train.agreed_batches import agreed_batches
from hpctrain.train.loop import Training
from hpctrain.train.resumption import Resumed, resume
from hpctrain.train.schedule import Decay, Schedule, scaled_lr
from hpctrain.train.seeds import derive_seed, seed_generators
from hpctrain.train.settings import CheckpointPolicy, LoopSettings, Totals
from hpctrain.train.state import Position, TrainingState
from hpctrain.train.task import Fields, Task, import_task

__all__ = [
    "CheckpointPolicy", "Decay", "Fields", "LoopSettings", "Position", "Resumed", "Schedule", "Task", "Totals",
    "Training", "TrainingState", "agreed_batches", "derive_seed", "import_task", "resume", "scaled_lr",
    "seed_generators",
]  # fmt: skip
