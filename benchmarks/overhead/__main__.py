"""`python -m benchmarks.overhead`."""

from benchmarks.harness import command
from benchmarks.overhead.suite import SUITE

command(SUITE)
