from .link_watch import LinkWatch as LinkWatch
from .node_probe import Links as Links, measure_links as measure_links, measure_ranks as measure_ranks
from .probe_findings import (
    Finding as Finding,
    NodeLink as NodeLink,
    Quantity as Quantity,
    RankSpeeds as RankSpeeds,
    SlowPair as SlowPair,
    document as document,
    slow_links as slow_links,
    slow_speeds as slow_speeds,
)
from .slow_ranks import Limits as Limits, SlowRanks as SlowRanks, lower_median as lower_median
from .slowness import Cause as Cause, Change as Change, Slow as Slow, lines_of as lines_of
from .window_times import COLUMNS as COLUMNS, NUM_OWN as NUM_OWN, WindowTimes as WindowTimes
