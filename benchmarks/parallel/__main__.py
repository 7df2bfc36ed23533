"""`python -m benchmarks.parallel`."""

from benchmarks.harness import command
from benchmarks.parallel.suite import SUITE

command(SUITE)
