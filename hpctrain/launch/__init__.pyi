from .command import (
    Launcher as Launcher,
    LaunchPlan as LaunchPlan,
    plan_launch as plan_launch,
    read_hosts as read_hosts,
    refuse_program_on_stdin as refuse_program_on_stdin,
)
from .cores import (
    RankCores as RankCores,
    control_groups as control_groups,
    core_share as core_share,
    cpu_share as cpu_share,
    read_cores as read_cores,
)
from .environment_archive import (
    describe_use as describe_use,
    pack_environment as pack_environment,
)
from .failure import (
    LOST_PEER as LOST_PEER,
    LOST_PEER_CODE as LOST_PEER_CODE,
    OWN_FAILURE_CODES as OWN_FAILURE_CODES,
    STEP_ENDS as STEP_ENDS,
    STOPPED as STOPPED,
    RankFailure as RankFailure,
    find_failure as find_failure,
    signal_name as signal_name,
)
from .fork_server.plan import ForkServer as ForkServer
from .forked_start import hand_over as hand_over
from .placement import (
    LocalMachine as LocalMachine,
    place_ranks as place_ranks,
    survey_machine as survey_machine,
)
from .plain_errors import print_and_exit as print_and_exit
from .process import (
    STOP_SIGNALS as STOP_SIGNALS,
    STOP_VARIABLE as STOP_VARIABLE,
    TERMINAL_VARIABLE as TERMINAL_VARIABLE,
    EndRequest as EndRequest,
    LaunchOutcome as LaunchOutcome,
    Observer as Observer,
    resolve_command as resolve_command,
    run_launch as run_launch,
    run_plan as run_plan,
)
from .rank_identity.containers import (
    read_surroundings as read_surroundings,
    why_not_alone as why_not_alone,
)
from .rank_identity.identity import (
    RankIdentity as RankIdentity,
    cross_check as cross_check,
    cure_for as cure_for,
    find_launcher as find_launcher,
    identify as identify,
)
from .rank_identity.launcher_process import (
    RANK_PID_VARIABLE as RANK_PID_VARIABLE,
    LauncherProcess as LauncherProcess,
    command_of as command_of,
    describe_outer_rank as describe_outer_rank,
    find_launcher_process as find_launcher_process,
    processes_of_ranks as processes_of_ranks,
    seconds_since_start as seconds_since_start,
    was_forked as was_forked,
)
from .slurm_commands import (
    SlurmController as SlurmController,
    SlurmRefused as SlurmRefused,
    SlurmUnavailable as SlurmUnavailable,
    ask_once as ask_once,
    parse_duration as parse_duration,
    read_config as read_config,
    read_pairs as read_pairs,
)
from .yielding import (
    YIELD_VARIABLE as YIELD_VARIABLE,
    describe_oversubscription as describe_oversubscription,
    find_yield_library as find_yield_library,
    in_effect as in_effect,
    lacks_yield_library as lacks_yield_library,
    restart_with_sleep as restart_with_sleep,
)
