from .loop.agreed_batches import agreed_batches as agreed_batches
from .loop.checkpointing import Checkpointing as Checkpointing
from .loop.data_balance import DataBalance as DataBalance
from .loop.evaluate import evaluate as evaluate
from .loop.guards import Guards as Guards
from .loop.memory_guard import (
    MICRO_BATCH as MICRO_BATCH,
    MemoryGuard as MemoryGuard,
    largest_micro_batch as largest_micro_batch,
)
from .loop.recorder import RunRecorder as RunRecorder
from .loop.settings import (
    CheckpointPolicy as CheckpointPolicy,
    LoopSettings as LoopSettings,
    Totals as Totals,
)
from .loop.stopping import Stopped as Stopped, Stopping as Stopping
from .loop.training import Training as Training
from .state.also import Stateful as Stateful, check_also as check_also
from .state.data_identity import data_identity as data_identity
from .state.ema import Ema as Ema
from .state.finite_check import FiniteCheck as FiniteCheck
from .state.optimizer_state import options_of as options_of
from .state.resumption import Resumed as Resumed, resume as resume
from .state.section_times import (
    LIMITS_FILE as LIMITS_FILE,
    SectionTimes as SectionTimes,
    read_slowest as read_slowest,
)
from .state.seeds import (
    capture_generators as capture_generators,
    derive_seed as derive_seed,
    restore_generators as restore_generators,
    seed_generators as seed_generators,
)
from .state.training_state import (
    Position as Position,
    TrainingState as TrainingState,
)
from .state.trainings import (
    SessionUpdater as SessionUpdater,
    TrainingParts as TrainingParts,
    Trainings as Trainings,
)
from .task.mean_loss import LOSS_WEIGHT as LOSS_WEIGHT
from .task.named_object import check_call as check_call, import_named as import_named
from .task.pipeline_runner import PipelineRunner as PipelineRunner
from .task.runner import Runner as Runner
from .task.schedule import LR_SCALE as LR_SCALE, Decay as Decay, Schedule as Schedule, scaled_lr as scaled_lr
from .task.sync_batch_norm import (
    communicates_in_forward as communicates_in_forward,
    convert_sync_batch_norm as convert_sync_batch_norm,
)
from .task.task import (
    Fields as Fields,
    Task as Task,
    TensorParallelTask as TensorParallelTask,
    import_task as import_task,
)
from .task.task_runner import TaskRunner as TaskRunner
from .watch.efficiency_watch import EfficiencyWatch as EfficiencyWatch
from .watch.step_trace import StepTrace as StepTrace
from .watch.straggler_watch import SLOW_FILE as SLOW_FILE, StragglerWatch as StragglerWatch
