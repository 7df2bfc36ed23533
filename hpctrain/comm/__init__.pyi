from .backends.horovod_environment import (
    NCCL_VARIABLES as NCCL_VARIABLES,
    HorovodBuild as HorovodBuild,
    nccl_in_effect as nccl_in_effect,
    why_no_nccl as why_no_nccl,
)
from .backends.library_probe import (
    probe_horovod as probe_horovod,
    probe_mpi4py as probe_mpi4py,
    probe_mpi_alone as probe_mpi_alone,
    probe_started_mpi as probe_started_mpi,
)
from .backends.mpi_process.exit_status import end_all_on_error as end_all_on_error
from .backends.open_world import OpenedWorld as OpenedWorld, open_world as open_world
from .backends.serial_world import SerialWorld as SerialWorld
from .backends.threads_world import run_threads as run_threads
from .collectives.activity import (
    Section as Section,
    doing as doing,
    in_section as in_section,
    without_limit as without_limit,
)
from .collectives.agreement import (
    agreed as agreed,
    all_gather_distinct as all_gather_distinct,
    all_gather_json as all_gather_json,
    broadcast_json as broadcast_json,
    check_same as check_same,
    check_same_buffer as check_same_buffer,
    describe_ranks as describe_ranks,
    is_true_everywhere as is_true_everywhere,
    on_rank_0 as on_rank_0,
    raise_together as raise_together,
)
from .collectives.broadcast_tensors import (
    MESSAGE_BYTES as MESSAGE_BYTES,
    broadcast_tensors as broadcast_tensors,
)
from .collectives.messages import receive_message as receive_message, send_message as send_message
from .collectives.reduce_values import Operation as Operation, all_reduce_values as all_reduce_values
from .collectives.shared_folder import (
    VISIBLE_WITHIN_S as VISIBLE_WITHIN_S,
    is_seen as is_seen,
    make_shared_folder as make_shared_folder,
)
from .collectives.traffic import Traffic as Traffic
from .collectives.two_level import (
    TwoLevel as TwoLevel,
    all_reduce_hierarchical as all_reduce_hierarchical,
    make_two_level as make_two_level,
)
from .interface.collective_files import CollectiveFiles as CollectiveFiles
from .interface.collective_writer import CollectiveWriter as CollectiveWriter
from .interface.communicator import Collective as Collective, ReduceOp as ReduceOp, World as World
from .interface.host_copies import to_host as to_host
from .interface.peer_messages import PeerMessages as PeerMessages
from .interface.remote_memory import RemoteMemory as RemoteMemory
from .interface.transport import NUM_TAGS as NUM_TAGS, Pending as Pending, Transport as Transport
from .lifetime.starting import starting as starting
from .watchdog.host_probe import host_addresses as host_addresses
from .watchdog.monitored_world import Monitored as Monitored
from .watchdog.section_limits import (
    RULES as RULES,
    LimitSettings as LimitSettings,
    SectionLimits as SectionLimits,
)
from .watchdog.tcp_probe import ProbeTarget as ProbeTarget, probe_hosts as probe_hosts
