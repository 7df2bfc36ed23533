from .classify import (
    AttemptEnd as AttemptEnd,
    Diagnosis as Diagnosis,
    Evidence as Evidence,
    classify as classify,
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
