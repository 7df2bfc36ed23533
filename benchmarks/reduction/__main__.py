"""`python -m benchmarks.reduction`."""

from benchmarks.harness import command
from benchmarks.reduction.suite import SUITE

command(SUITE)
