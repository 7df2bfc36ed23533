from .classify import (
    AttemptEnd as AttemptEnd,
    Diagnosis as Diagnosis,
    Evidence as Evidence,
    classify as classify,
)
from .elastic import (
    BatchRule as BatchRule,
    Elastic as Elastic,
    ElasticRange as ElasticRange,
    elastic_batch as elastic_batch,
    ranks_of_one_model as ranks_of_one_model,
)
from .ledger import (
    Attempt as Attempt,
    EffectiveTime as EffectiveTime,
    effective_time as effective_time,
    read_attempts as read_attempts,
)
from .nodes import Allocation as Allocation, find_allocation as find_allocation
from .rules import RestartLimits as RestartLimits
from .supervisor import SupervisedRun as SupervisedRun, Supervisor as Supervisor
