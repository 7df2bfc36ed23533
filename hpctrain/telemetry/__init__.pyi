from .energy import (
    ENERGY as ENERGY,
    EnergyMeter as EnergyMeter,
    open_counters as open_counters,
    total_j as total_j,
)
from .exposition.catalogue import (
    CATALOGUE as CATALOGUE,
    INFO_LABELS as INFO_LABELS,
    METRICS as METRICS,
    Metric as Metric,
    MetricType as MetricType,
    Scope as Scope,
)
from .exposition.otlp import OtlpSink as OtlpSink
from .exposition.prometheus import (
    PrometheusEndpoint as PrometheusEndpoint,
    PrometheusTextFile as PrometheusTextFile,
    TargetsFile as TargetsFile,
    missing_prometheus_client as missing_prometheus_client,
)
from .exposition.run_metrics import (
    SCALING_STOP as SCALING_STOP,
    Probe as Probe,
    RunMetrics as RunMetrics,
    Series as Series,
    Value as Value,
    stop_reason as stop_reason,
)
from .records import (
    STEP as STEP,
    RecordWriter as RecordWriter,
    read_records as read_records,
    tell as tell,
    write_json as write_json,
)
from .run_directory import RunDirectory as RunDirectory
from .sinks import (
    Record as Record,
    Sink as Sink,
    Sinks as Sinks,
    TensorBoardSink as TensorBoardSink,
    scalars_of as scalars_of,
)
from .step_clock import (
    CLOCK_KEYS as CLOCK_KEYS,
    OPTIONAL_KEYS as OPTIONAL_KEYS,
    PART_KEYS as PART_KEYS,
    PART_NAMES as PART_NAMES,
    STEP_PARTS as STEP_PARTS,
    Observer as Observer,
    PartKind as PartKind,
    StepClock as StepClock,
    StepPart as StepPart,
    in_words as in_words,
)
