from .divergence import Divergence as Divergence, DivergenceLimits as DivergenceLimits
from .host_memory import (
    OUT_OF_MEMORY_VARIABLE as OUT_OF_MEMORY_VARIABLE,
    GroupLimit as GroupLimit,
    give_back_freed_memory as give_back_freed_memory,
    give_back_large_pieces as give_back_large_pieces,
    give_back_once as give_back_once,
    keep_freed_memory as keep_freed_memory,
    limit_own_memory as limit_own_memory,
    read_group_limit as read_group_limit,
)
from .out_of_memory import (
    free_memory as free_memory,
    in_binary_units as in_binary_units,
    num_parts as num_parts,
    shortage as shortage,
)
from .peer_watch import (
    ELASTIC_VARIABLE as ELASTIC_VARIABLE,
    NOTICES_VARIABLE as NOTICES_VARIABLE,
    PeerWatch as PeerWatch,
    RankProcess as RankProcess,
    print_notice as print_notice,
)
from .stop import StopRequest as StopRequest
from .stop_signals import (
    DEFAULT_STOP_SIGNALS as DEFAULT_STOP_SIGNALS,
    CheckpointSignal as CheckpointSignal,
    SignalName as SignalName,
    hold_signals as hold_signals,
    ignore_signals as ignore_signals,
    let_interrupts_end as let_interrupts_end,
    let_stop_end as let_stop_end,
    release_signals as release_signals,
)
from .wall_clock import (
    EndTime as EndTime,
    RecentTimes as RecentTimes,
    TimeToStop as TimeToStop,
    WallClock as WallClock,
    job_to_ask_about as job_to_ask_about,
)
