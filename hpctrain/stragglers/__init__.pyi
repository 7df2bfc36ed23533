from .node_probe import (
    Links as Links,
    LinkWatch as LinkWatch,
    measure_links as measure_links,
    measure_ranks as measure_ranks,
)
from .probe_findings import (
    NodeLink as NodeLink,
    ProbeFinding as ProbeFinding,
    Quantity as Quantity,
    RankSpeeds as RankSpeeds,
    SlowPair as SlowPair,
    document as document,
    slow_links as slow_links,
    slow_speeds as slow_speeds,
)
from .slow_ranks import (
    COLUMNS as COLUMNS,
    NUM_OWN as NUM_OWN,
    Change as Change,
    Slow as Slow,
    SlowCause as SlowCause,
    SlowRankLimits as SlowRankLimits,
    SlowRanks as SlowRanks,
    WindowTimes as WindowTimes,
    lines_of as lines_of,
    lower_median as lower_median,
)
