from .loop.agreed_batches import agreed_batches as agreed_batches
from .loop.checkpointing import Checkpointing as Checkpointing
from .loop.recorder import RunRecorder as RunRecorder
from .loop.settings import (
    CheckpointPolicy as CheckpointPolicy,
    LoopSettings as LoopSettings,
    Totals as Totals,
)
from .loop.training import Training as Training
from .state.resumption import Resumed as Resumed, resume as resume
from .state.seeds import derive_seed as derive_seed, seed_generators as seed_generators
from .state.training_state import (
    Position as Position,
    TrainingState as TrainingState,
    data_identity as data_identity,
)
from .task.named_object import check_call as check_call, import_named as import_named
from .task.schedule import LR_SCALE as LR_SCALE, Decay as Decay, Schedule as Schedule, scaled_lr as scaled_lr
from .task.sync_batch_norm import (
    communicates_in_forward as communicates_in_forward,
    convert_sync_batch_norm as convert_sync_batch_norm,
)
from .task.task import Fields as Fields, Task as Task, import_task as import_task
from .task.task_runner import TaskRunner as TaskRunner
