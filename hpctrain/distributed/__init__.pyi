from .blocks import name_blocks as name_blocks, repeated_blocks as repeated_blocks
from .fully_sharded import (
    ShardedPasses as ShardedPasses,
    kept_whole as kept_whole,
    start_group_sum as start_group_sum,
    sum_gradients_by as sum_gradients_by,
)
from .open_groups import (
    group_traffic as group_traffic,
    open_process_group as open_process_group,
    two_level_sums as two_level_sums,
)
from .operations import (
    all_gather as all_gather,
    all_reduce as all_reduce,
    all_reduce_sparse as all_reduce_sparse,
    as_bytes as as_bytes,
    exchange as exchange,
    reduce_scatter as reduce_scatter,
)
from .pipeline import (
    Pipeline as Pipeline,
    Stages as Stages,
    divide_into_stages as divide_into_stages,
    pipeline_of as pipeline_of,
)
from .plan import (
    ParallelPlan as ParallelPlan,
    PipelineSchedule as PipelineSchedule,
    Recomputation as Recomputation,
    ShardKind as ShardKind,
    TensorPlan as TensorPlan,
    Within as Within,
)
from .process_group import CommunicatorGroup as CommunicatorGroup
from .sharded_tensors import (
    Box as Box,
    ElementShard as ElementShard,
    box_of as box_of,
    device_of as device_of,
    element_shard as element_shard,
    flat_view as flat_view,
    forget_elements as forget_elements,
    hold_elements as hold_elements,
    is_dense as is_dense,
    is_first_replica as is_first_replica,
    is_sharded as is_sharded,
    is_sharded_tensor as is_sharded_tensor,
    local_part as local_part,
    memory_order as memory_order,
    shard_like as shard_like,
    shard_mesh_of as shard_mesh_of,
    shard_of as shard_of,
    sharded_as as sharded_as,
)
from .split_model import (
    broadcast_model as broadcast_model,
    check_plan as check_plan,
    checkpoint_activations as checkpoint_activations,
    end_process_group as end_process_group,
    parallelize as parallelize,
)
from .stage_placement import put_in_pipeline as put_in_pipeline
from .tensor_parallel import (
    TensorSplit as TensorSplit,
    replicated_over_tensor_ranks as replicated_over_tensor_ranks,
    split_of as split_of,
    tensor_styles as tensor_styles,
)
from .work import CollectiveWork as CollectiveWork, OperationThread as OperationThread

# Public. The other names are for the other packages of hpctrain.
__all__ = [
    "ParallelPlan",
    "TensorPlan",
    "parallelize",
]
