"""Gradients in, updated parameters out."""

from hpctrain.reduce.all_reduce_updater import AllReduceUpdater
from hpctrain.reduce.scale import LossScale
from hpctrain.reduce.updater import StepOutcome, Updater

__all__ = ["AllReduceUpdater", "LossScale", "StepOutcome", "Updater"]
