"""`python -m benchmarks.checkpoint`."""

from benchmarks.checkpoint.suite import SUITE
from benchmarks.harness import command

command(SUITE)
