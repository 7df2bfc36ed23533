from . import elastic as elastic
from .asynchronous import (
    allgather_async as allgather_async,
    allreduce_async as allreduce_async,
    allreduce_async_ as allreduce_async_,
    alltoall_async as alltoall_async,
    barrier as barrier,
    broadcast_async as broadcast_async,
    broadcast_async_ as broadcast_async_,
    grouped_allgather_async as grouped_allgather_async,
    grouped_allreduce_async as grouped_allreduce_async,
    grouped_allreduce_async_ as grouped_allreduce_async_,
    grouped_reducescatter_async as grouped_reducescatter_async,
    join as join,
    reducescatter_async as reducescatter_async,
    sparse_allreduce_async as sparse_allreduce_async,
)
from .differentiable import (
    allgather as allgather,
    allreduce as allreduce,
    allreduce_ as allreduce_,
    alltoall as alltoall,
    broadcast as broadcast,
    broadcast_ as broadcast_,
    grouped_allgather as grouped_allgather,
    grouped_allreduce as grouped_allreduce,
    grouped_allreduce_ as grouped_allreduce_,
    grouped_reducescatter as grouped_reducescatter,
    reducescatter as reducescatter,
)
from .errors import (
    HorovodInternalError as HorovodInternalError,
    HostsUpdatedInterrupt as HostsUpdatedInterrupt,
)
from .group import Handle as Handle, poll as poll, synchronize as synchronize
from .objects import (
    allgather_object as allgather_object,
    broadcast_object as broadcast_object,
    broadcast_optimizer_state as broadcast_optimizer_state,
    broadcast_parameters as broadcast_parameters,
)
from .optimizer import DistributedOptimizer as DistributedOptimizer
from .reductions import (
    Adasum as Adasum,
    Average as Average,
    Compression as Compression,
    Max as Max,
    Min as Min,
    Product as Product,
    Sum as Sum,
)
from .running import (
    ProcessSet as ProcessSet,
    add_process_set as add_process_set,
    ccl_built as ccl_built,
    cross_rank as cross_rank,
    cross_size as cross_size,
    cuda_built as cuda_built,
    ddl_built as ddl_built,
    global_process_set as global_process_set,
    gloo_built as gloo_built,
    gloo_enabled as gloo_enabled,
    init as init,
    is_homogeneous as is_homogeneous,
    is_initialized as is_initialized,
    local_rank as local_rank,
    local_size as local_size,
    mpi_built as mpi_built,
    mpi_enabled as mpi_enabled,
    mpi_threads_supported as mpi_threads_supported,
    nccl_built as nccl_built,
    rank as rank,
    remove_process_set as remove_process_set,
    rocm_built as rocm_built,
    run as run,
    shutdown as shutdown,
    size as size,
    start_timeline as start_timeline,
    stop_timeline as stop_timeline,
)
from .sync_batch_norm import SyncBatchNorm as SyncBatchNorm
