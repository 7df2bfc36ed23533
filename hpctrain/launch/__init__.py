"""Who this process is in the run, and the command line that starts a run."""

from hpctrain.launch.command import Launcher, LaunchPlan, plan_launch
from hpctrain.launch.identity import RankIdentity, cross_check, identify
from hpctrain.launch.machine import Machine, survey_machine
from hpctrain.launch.process import TERMINAL_VARIABLE, LaunchOutcome, run_launch, run_plan

__all__ = [
    "TERMINAL_VARIABLE",
    "LaunchOutcome",
    "LaunchPlan",
    "Launcher",
    "Machine",
    "RankIdentity",
    "cross_check",
    "identify",
    "plan_launch",
    "run_launch",
    "run_plan",
    "survey_machine",
]
