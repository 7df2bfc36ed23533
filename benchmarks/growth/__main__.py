"""`python -m benchmarks.growth`."""

from benchmarks.growth.suite import SUITE
from benchmarks.harness import command

command(SUITE)
