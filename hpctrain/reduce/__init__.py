"""Gradients in, updated parameters out."""

from hpctrain.reduce.contract.updater import StepOutcome, Updater
from hpctrain.reduce.data_parallel.all_reduce_updater import AllReduceUpdater
from hpctrain.reduce.data_parallel.loss_scale import LossScale
from hpctrain.reduce.horovod_compression.compressors import Compression

__all__ = ["AllReduceUpdater", "Compression", "LossScale", "StepOutcome", "Updater"]
