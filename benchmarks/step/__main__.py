"""`python -m benchmarks.step`."""

from benchmarks.harness import command
from benchmarks.step.suite import SUITE

command(SUITE)
