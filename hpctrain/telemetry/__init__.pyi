from .records import (
    RecordWriter as RecordWriter,
    read_records as read_records,
    tell as tell,
    write_json as write_json,
)
from .step_clock import StepClock as StepClock
