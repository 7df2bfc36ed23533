"""`python -m benchmarks.asynchronous`."""

from benchmarks.asynchronous.suite import SUITE
from benchmarks.harness import command

command(SUITE)
