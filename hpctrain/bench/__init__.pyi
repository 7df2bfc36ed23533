from .all_reduce.measure import AllReduceAsked as AllReduceAsked, bound_bytes as bound_bytes
from .all_reduce.run import (
    ALGORITHMS as ALGORITHMS,
    ReducersHere as ReducersHere,
    all_reduce_document as all_reduce_document,
    all_reduce_on as all_reduce_on,
    all_reduce_table as all_reduce_table,
    check_plot as check_plot,
    find_link as find_link,
    nccl_to_start as nccl_to_start,
    parse_link as parse_link,
    parse_names as parse_names,
    plot_all_reduce as plot_all_reduce,
)
from .checkpoint.measure import (
    CheckpointAsked as CheckpointAsked,
    checkpoint_document as checkpoint_document,
    checkpoint_table as checkpoint_table,
    measure_checkpoint as measure_checkpoint,
)
from .compare import (
    ComparedDocuments as ComparedDocuments,
    compare_documents as compare_documents,
    comparison_lines as comparison_lines,
    comparison_table as comparison_table,
)
from .data.measure import (
    DataAsked as DataAsked,
    data_document as data_document,
    data_lines as data_lines,
    data_table as data_table,
    measure_data as measure_data,
)
from .document import check_writable as check_writable, write_document as write_document
from .export.extrap import extrap_lines as extrap_lines, extrap_notes as extrap_notes
from .export.harness import (
    ExportedSweep as ExportedSweep,
    Harness as Harness,
    harness_file as harness_file,
)
from .figures import empty_table as empty_table, parse_size as parse_size, parse_sizes as parse_sizes
from .page_cache import Cache as Cache
from .progress import MeasurementProgress as MeasurementProgress
from .scaling.measure import SweepPlace as SweepPlace, measure_sweep as measure_sweep
from .scaling.splits import cores_to_split as cores_to_split, ranks_of_splits as ranks_of_splits
from .scaling.sweep import (
    ScalingDocument as ScalingDocument,
    SplitVerdict as SplitVerdict,
    SweepSettings as SweepSettings,
    check_settings as check_settings,
    ranks_of_nodes as ranks_of_nodes,
    read_scaling_document as read_scaling_document,
    scaling_lines as scaling_lines,
    scaling_table as scaling_table,
)
from .step.measure import bench_step as bench_step
from .step.plan import StepAsked as StepAsked, parse_modes as parse_modes, parse_ranks as parse_ranks
