from .backends.library_probe import (
    probe_horovod as probe_horovod,
    probe_mpi4py as probe_mpi4py,
    probe_mpi_alone as probe_mpi_alone,
    probe_started_mpi as probe_started_mpi,
)
from .backends.mpi_process.exit_status import end_all_on_error as end_all_on_error
from .backends.open_world import OpenedWorld as OpenedWorld, open_world as open_world
from .backends.running_horovod import (
    NCCL_VARIABLES as NCCL_VARIABLES,
    HorovodBuild as HorovodBuild,
    nccl_in_effect as nccl_in_effect,
    why_no_nccl as why_no_nccl,
)
from .backends.serial_world import SerialWorld as SerialWorld
from .backends.threads_world import run_threads as run_threads
from .collectives.activity import (
    Section as Section,
    doing as doing,
    in_section as in_section,
    without_limit as without_limit,
)
from .collectives.agreement import (
    VISIBLE_WITHIN_S as VISIBLE_WITHIN_S,
    agreed as agreed,
    all_gather_distinct as all_gather_distinct,
    all_gather_json as all_gather_json,
    broadcast_json as broadcast_json,
    check_same as check_same,
    check_same_buffer as check_same_buffer,
    describe_ranks as describe_ranks,
    is_seen as is_seen,
    is_true_everywhere as is_true_everywhere,
    make_shared_folder as make_shared_folder,
    on_rank_0 as on_rank_0,
    raise_together as raise_together,
)
from .collectives.two_level import (
    Traffic as Traffic,
    TwoLevel as TwoLevel,
    all_reduce_hierarchical as all_reduce_hierarchical,
    make_two_level as make_two_level,
)
from .collectives.values import (
    MESSAGE_BYTES as MESSAGE_BYTES,
    Operation as Operation,
    all_reduce_values as all_reduce_values,
    broadcast_tensors as broadcast_tensors,
    receive_message as receive_message,
    send_message as send_message,
    sum_one_by_one as sum_one_by_one,
)
from .interface.buffer_checks import to_host as to_host
from .interface.collective_files import (
    CollectiveFiles as CollectiveFiles,
    CollectiveWriter as CollectiveWriter,
)
from .interface.communicator import Collective as Collective, ReduceOp as ReduceOp, World as World
from .interface.remote_memory import RemoteMemory as RemoteMemory
from .interface.transport import (
    NUM_TAGS as NUM_TAGS,
    PeerMessages as PeerMessages,
    Pending as Pending,
    Transport as Transport,
)
from .lifetime.starting import starting as starting
from .watchdog.host_probe import (
    ProbeTarget as ProbeTarget,
    host_addresses as host_addresses,
    probe_hosts as probe_hosts,
)
from .watchdog.monitored_world import Monitored as Monitored
from .watchdog.section_limits import (
    RULES as RULES,
    LimitSettings as LimitSettings,
    SectionLimits as SectionLimits,
)
