"""`python -m benchmarks.start`."""

from benchmarks.harness import command
from benchmarks.start.suite import SUITE

command(SUITE)
