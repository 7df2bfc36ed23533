from .loop.checkpointing import Checkpointing as Checkpointing
from .loop.evaluate import agreed_batches as agreed_batches, evaluate as evaluate
from .loop.guards import (
    MICRO_BATCH as MICRO_BATCH,
    DataBalance as DataBalance,
    Guards as Guards,
    MemoryGuard as MemoryGuard,
    largest_micro_batch as largest_micro_batch,
)
from .loop.recorder import RunRecorder as RunRecorder
from .loop.settings import (
    CheckpointPolicy as CheckpointPolicy,
    LoopSettings as LoopSettings,
    Totals as Totals,
)
from .loop.shared_batches import SharedBatches as SharedBatches
from .loop.state_keeper import StateKeeper as StateKeeper, why_not_kept as why_not_kept
from .loop.stopping import EarlyEnd as EarlyEnd, EndReason as EndReason
from .loop.training import (
    LIMITS_FILE as LIMITS_FILE,
    SectionTimes as SectionTimes,
    Training as Training,
    read_slowest as read_slowest,
)
from .state.also import Stateful as Stateful, check_also as check_also
from .state.ema import Ema as Ema
from .state.optimizer_state import options_of as options_of
from .state.seeds import (
    capture_generators as capture_generators,
    derive_seed as derive_seed,
    restore_generators as restore_generators,
    seed_generators as seed_generators,
)
from .state.training_state import (
    FiniteCheck as FiniteCheck,
    Position as Position,
    Resumed as Resumed,
    TrainingState as TrainingState,
    resume as resume,
)
from .state.trainings import (
    SessionUpdater as SessionUpdater,
    TrainingParts as TrainingParts,
    Trainings as Trainings,
    data_identity as data_identity,
)
from .task.loss_weights import LOSS_WEIGHT as LOSS_WEIGHT
from .task.pipeline_runner import PipelineRunner as PipelineRunner
from .task.schedule import LR_SCALE as LR_SCALE, Decay as Decay, Schedule as Schedule, scaled_lr as scaled_lr
from .task.sync_batch_norm import (
    communicates_in_forward as communicates_in_forward,
    convert_sync_batch_norm as convert_sync_batch_norm,
)
from .task.task import (
    Fields as Fields,
    Task as Task,
    TensorParallelTask as TensorParallelTask,
    check_call as check_call,
    import_named as import_named,
    import_task as import_task,
)
from .task.task_runner import Runner as Runner, TaskRunner as TaskRunner
from .watch import (
    SLOW_FILE as SLOW_FILE,
    EfficiencyWatch as EfficiencyWatch,
    StepTracer as StepTracer,
    StragglerWatch as StragglerWatch,
)
