from .doctor.exit_notice import LastWords as LastWords
from .doctor.findings import (
    Finding as Finding,
    Severity as Severity,
    judge_rank as judge_rank,
    worst_severity as worst_severity,
)
from .doctor.merge_findings import merge_findings as merge_findings
from .doctor.probes import identity_of as identity_of, inspect_rank as inspect_rank
from .recipe.load import load_recipe as load_recipe, parse_recipe as parse_recipe, to_toml as to_toml
from .recipe.schema import Recipe as Recipe
from .record import (
    environment_record as environment_record,
    machine_record as machine_record,
    versions_record as versions_record,
    working_commit as working_commit,
)
from .reduction import (
    AUTO_WIRES as AUTO_WIRES,
    ReductionPlan as ReductionPlan,
    make_reduction as make_reduction,
)
from .session import Session as Session, start as start
from .training import Resume as Resume, train as train
