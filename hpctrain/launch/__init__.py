"""Who this process is in the run, and the command line that starts a run."""

from hpctrain.launch.command import Launcher, LaunchPlan, plan_launch
from hpctrain.launch.identity import RankIdentity, cross_check, identify
from hpctrain.launch.machine import Machine, survey_machine
from hpctrain.launch.process import TERMINAL_VARIABLE, run_plan

__all__ = [
    "TERMINAL_VARIABLE",
    "LaunchPlan",
    "Launcher",
    "Machine",
    "RankIdentity",
    "cross_check",
    "identify",
    "plan_launch",
    "run_plan",
    "survey_machine",
]
