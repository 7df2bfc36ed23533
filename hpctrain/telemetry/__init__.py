"""Spans and counters of a run, written per rank. Nothing here communicates."""

from hpctrain.telemetry.console import tell
from hpctrain.telemetry.records import RecordWriter, read_records, write_json
from hpctrain.telemetry.step_clock import StepClock

__all__ = ["RecordWriter", "StepClock", "read_records", "tell", "write_json"]
