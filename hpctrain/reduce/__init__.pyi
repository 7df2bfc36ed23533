from .algorithms import (
    ALGORITHM_NAMES as ALGORITHM_NAMES,
    LIBRARY_ALGORITHMS as LIBRARY_ALGORITHMS,
    NCCL_ALGORITHMS as NCCL_ALGORITHMS,
    TWO_LEVELS as TWO_LEVELS,
    Algorithm as Algorithm,
    Capabilities as Capabilities,
    choose_algorithm as choose_algorithm,
    parse_algorithm as parse_algorithm,
)
from .autotune.decision import DEFAULT_BUCKET_BYTES as DEFAULT_BUCKET_BYTES
from .autotune.link_speed import Candidate as Candidate
from .autotune.tune import (
    CALIBRATION_FILE as CALIBRATION_FILE,
    CalibrationFiles as CalibrationFiles,
    find_choice as find_choice,
)
from .codecs import Codec as Codec, codec_named as codec_named
from .collective_reducers.adasum import AdasumReducer as AdasumReducer, adasum as adasum
from .collective_reducers.power_sgd import LowRankReducer as LowRankReducer
from .collective_reducers.top_k import TopKReducer as TopKReducer
from .contract.bucket_plan import (
    Bucket as Bucket,
    GradientSpec as GradientSpec,
    Slot as Slot,
    plan_buckets as plan_buckets,
)
from .contract.bucket_reducer import (
    BucketReducer as BucketReducer,
    InBackground as InBackground,
    StateTensor as StateTensor,
    result_of as result_of,
    run_to_end as run_to_end,
)
from .contract.updater import (
    BackwardTimes as BackwardTimes,
    DistributedOptimizer as DistributedOptimizer,
    Layout as Layout,
    ReductionObserver as ReductionObserver,
    StepOutcome as StepOutcome,
    check_optimizer as check_optimizer,
    takes_sparse_gradients as takes_sparse_gradients,
)
from .data_parallel.all_reduce_updater import AllReduceUpdater as AllReduceUpdater
from .data_parallel.fused_kernels import (
    keep_layouts as keep_layouts,
    use_fused_kernels as use_fused_kernels,
)
from .data_parallel.gradient_memory import (
    PendingGradient as PendingGradient,
    describe_gradient as describe_gradient,
)
from .data_parallel.loss_scale import LossScale as LossScale
from .data_parallel.sparse_updater import SparseUpdater as SparseUpdater
from .factory import (
    ReducerMaker as ReducerMaker,
    Reduction as Reduction,
    ReductionRequest as ReductionRequest,
    check_for_layouts as check_for_layouts,
    gradient_bytes as gradient_bytes,
    layouts_of as layouts_of,
    make_reduction as make_reduction,
)
from .needs import (
    ReductionNeeds as ReductionNeeds,
    Sent as Sent,
    all_sent as all_sent,
    gathered_in_a_ring as gathered_in_a_ring,
    reduction_needs as reduction_needs,
    scatter_needs as scatter_needs,
    sharded_sum as sharded_sum,
)
from .parameter_server.parameter_client import (
    OrderPart as OrderPart,
    ParameterRead as ParameterRead,
    StalenessFigures as StalenessFigures,
)
from .parameter_server.ssp_updater import SspUpdater as SspUpdater
from .schedule_factory import (
    checked_schedule as checked_schedule,
    make_scheduled as make_scheduled,
    request_of_averages as request_of_averages,
)
from .schedules.schedule import (
    METHODS as METHODS,
    Adasum as Adasum,
    Daso as Daso,
    DiLoCo as DiLoCo,
    LocalSgd as LocalSgd,
    LocalSteps as LocalSteps,
    Schedule as Schedule,
    Ssp as Ssp,
    parse_schedule as parse_schedule,
    table_of as table_of,
)
from .schedules.scheduled_updater import ScheduledUpdater as ScheduledUpdater
from .split_models.fsdp_sums import reduce_gradients_by as reduce_gradients_by
from .split_models.split_model_updater import SplitModelUpdater as SplitModelUpdater
from .watch.rank_comparison import CompareRanks as CompareRanks
from .watch.step_watch import (
    StepWatch as StepWatch,
    listed as listed,
    not_finite as not_finite,
    watch_steps as watch_steps,
)
from .wire_formats import (
    AUTO as AUTO,
    AUTO_WIRES as AUTO_WIRES,
    CODEC_WIRES as CODEC_WIRES,
    ELEMENT_BYTES as ELEMENT_BYTES,
    SPARSE_WIRES as SPARSE_WIRES,
    WIRE_FORMATS as WIRE_FORMATS,
    WireFormat as WireFormat,
    check_wire as check_wire,
    encodes_every_value as encodes_every_value,
    find_wire as find_wire,
    listed_wires as listed_wires,
    needs_feedback as needs_feedback,
    share_of_float32 as share_of_float32,
    wire_format as wire_format,
    wire_names as wire_names,
)
from .zero.choices import SHARDED_ALGORITHMS as SHARDED_ALGORITHMS
from .zero.zero_reducer import ZeroReducer as ZeroReducer
from .zero.zero_updater import ZeroUpdater as ZeroUpdater
