from . import (
    checkpoint as checkpoint,
    data as data,
    distributed as distributed,
    errors as errors,
    hvd as hvd,
    lightning as lightning,
    testing as testing,
)
from .checkpoint import open_checkpoint as open_checkpoint, save as save
from .data import Batch as Batch, Dataset as Dataset, Loader as Loader, pack_arrays as pack_arrays
from .distributed import ParallelPlan as ParallelPlan
from .errors import HpctrainError as HpctrainError
from .reduce import (
    DistributedOptimizer as DistributedOptimizer,
    LossScale as LossScale,
    WireFormat as WireFormat,
)
from .resilience import StopRequest as StopRequest, TimeToStop as TimeToStop, WallClock as WallClock
from .run import (
    Session as Session,
    init as init,
    init_process_group as init_process_group,
    load_recipe as load_recipe,
)
from .train import Ema as Ema, Position as Position, Task as Task
from .version import __version__ as __version__
