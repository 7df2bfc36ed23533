from .all_reduce.measure import AllReduceAsked as AllReduceAsked
from .all_reduce.plot import check_plot as check_plot, plot_all_reduce as plot_all_reduce
from .all_reduce.reducers import (
    ALGORITHMS as ALGORITHMS,
    USUAL_WIRES as USUAL_WIRES,
    WIRES as WIRES,
    ReducersHere as ReducersHere,
    nccl_to_start as nccl_to_start,
    parse_names as parse_names,
)
from .all_reduce.run import (
    all_reduce_document as all_reduce_document,
    all_reduce_on as all_reduce_on,
    find_link as find_link,
    parse_link as parse_link,
)
from .all_reduce.table import all_reduce_table as all_reduce_table
from .checkpoint.measure import CheckpointAsked as CheckpointAsked, measure_checkpoint as measure_checkpoint
from .checkpoint.report import (
    checkpoint_document as checkpoint_document,
    checkpoint_table as checkpoint_table,
)
from .data.measure import DataAsked as DataAsked, measure_data as measure_data
from .data.report import data_document as data_document, data_lines as data_lines, data_table as data_table
from .document import check_writable as check_writable, write_document as write_document
from .page_cache import Cache as Cache
from .progress import MeasurementProgress as MeasurementProgress
from .sizes import parse_size as parse_size, parse_sizes as parse_sizes
from .step.plan import StepAsked as StepAsked, parse_modes as parse_modes, parse_ranks as parse_ranks
from .step.report import bench_step as bench_step
