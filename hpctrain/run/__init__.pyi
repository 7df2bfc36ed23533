from .check import check_recipe as check_recipe
from .compute.uncaught_errors import uncaught_as_message as uncaught_as_message
from .doctor.environment import sample_clock as sample_clock
from .doctor.exit_notice import ExitNotice as ExitNotice
from .doctor.finding import (
    Finding as Finding,
    Severity as Severity,
    worst_severity as worst_severity,
)
from .doctor.merge_findings import judge_rank as judge_rank, merge_findings as merge_findings
from .doctor.probes import identity_from as identity_from, inspect_rank as inspect_rank
from .doctor.run_directory import look_for_rank_0s_file as look_for_rank_0s_file
from .doctor.slurm_settings import ask_slurm as ask_slurm
from .experiments.causes.findings import CheckReport as CheckReport
from .experiments.own_loop import OwnLoop as OwnLoop
from .memory.calculate import MemoryEstimates as MemoryEstimates, plan_memory as plan_memory
from .memory.report import (
    memory_document as memory_document,
    memory_lines as memory_lines,
    memory_table as memory_table,
)
from .probe import Probe as Probe, probe_nodes as probe_nodes
from .recipe.load import (
    load_recipe as load_recipe,
    parse_recipe as parse_recipe,
    read_recipe_document as read_recipe_document,
    to_toml as to_toml,
)
from .recipe.schema import Recipe as Recipe
from .recipe.slurm_schema import SlurmSection as SlurmSection
from .record import (
    environment_record as environment_record,
    machine_record as machine_record,
    versions_record as versions_record,
    working_commit as working_commit,
)
from .session import Session as Session, init as init
from .torch_distributed import init_process_group as init_process_group
from .training import Resume as Resume, train as train
