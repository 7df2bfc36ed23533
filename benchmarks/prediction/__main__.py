"""`python -m benchmarks.prediction`."""

from benchmarks.harness import command
from benchmarks.prediction.suite import SUITE

command(SUITE)
