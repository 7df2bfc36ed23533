from .checkpoint import (
    FromRank0 as FromRank0,
    Replicated as Replicated,
    SaveOptions as SaveOptions,
    Shard as Shard,
    State as State,
    load_newest_good as load_newest_good,
    model_items as model_items,
    open_checkpoint as open_checkpoint,
    save as save,
)
from .data import Batch as Batch, Dataset as Dataset, Loader as Loader, pack_arrays as pack_arrays
from .distributed import ParallelPlan as ParallelPlan
from .errors import HpctrainError as HpctrainError
from .reduce import Compression as Compression, Updater as Updater
from .run import (
    Session as Session,
    init_process_group as init_process_group,
    load_recipe as load_recipe,
    start as start,
)
from .train import (
    Ema as Ema,
    Position as Position,
    Task as Task,
    TrainingState as TrainingState,
    resume as resume,
)
from .version import __version__ as __version__
