"""`python -m benchmarks.data`."""

from benchmarks.data.suite import SUITE
from benchmarks.harness import command

command(SUITE)
