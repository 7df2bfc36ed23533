from .efficiency.attribution import (
    StepTimes as StepTimes,
    attribute as attribute,
    document_of as document_of,
    efficiency_of as efficiency_of,
    own_times as own_times,
)
from .efficiency.pop import (
    PARTS as PARTS,
    RECORDED as RECORDED,
    Efficiency as Efficiency,
    Factors as Factors,
    Scaling as Scaling,
    against as against,
    efficiency_from as efficiency_from,
)
from .efficiency.read_steps import read_efficiency as read_efficiency, read_step_times as read_step_times
from .model.advice import Advice as Advice, advice as advice
from .model.calibrate import (
    Calibration as Calibration,
    calibrate as calibrate,
    calibration_record as calibration_record,
    interval as interval,
    relative_error as relative_error,
)
from .model.costs import ALGORITHMS as ALGORITHMS, Cost as Cost, cost_of as cost_of
from .model.fit import (
    Fit as Fit,
    Timed as Timed,
    fit_machine as fit_machine,
    machine_of as machine_of,
    timed_of as timed_of,
)
from .model.machine import (
    Layout as Layout,
    Link as Link,
    Machine as Machine,
    Node as Node,
    parse_nodes as parse_nodes,
    parse_rate as parse_rate,
)
from .model.overlap_slowdown import MeasuredStep as MeasuredStep, overlap_slowdown as overlap_slowdown
from .model.predict import (
    Fusion as Fusion,
    Scenario as Scenario,
    Setup as Setup,
    Step as Step,
    Storage as Storage,
    binding as binding,
    predicted_efficiency as predicted_efficiency,
    step_of as step_of,
)
from .model.report import (
    PredictedRow as PredictedRow,
    plot_predictions as plot_predictions,
    predicted_rows as predicted_rows,
    prediction_document as prediction_document,
    prediction_table as prediction_table,
)
from .model.stragglers import slowest_factor as slowest_factor, spread_of_times as spread_of_times
from .model.workload import (
    ReadyBucket as ReadyBucket,
    Workload as Workload,
    even_buckets as even_buckets,
    rebucketed as rebucketed,
)
from .simulate.failures import Job as Job, Outcome as Outcome, simulate_job as simulate_job, sweep as sweep
from .simulate.intervals import (
    daly_interval as daly_interval,
    expected_share as expected_share,
    young_interval as young_interval,
)
from .simulate.rounds import simulate_reduction as simulate_reduction
from .statistics.comparison import (
    ALL_FIGURES as ALL_FIGURES,
    Comparison as Comparison,
    FigureComparison as FigureComparison,
    compare_rounds as compare_rounds,
)
from .statistics.fits import (
    FitChoice as FitChoice,
    FittedParameter as FittedParameter,
    LawFit as LawFit,
    fit_laws as fit_laws,
)
from .statistics.intervals import (
    RatioEstimate as RatioEstimate,
    paired_ratio as paired_ratio,
    unpaired_ratio as unpaired_ratio,
)
from .statistics.laws import Parameter as Parameter, ScalingLaw as ScalingLaw, laws_of as laws_of
from .statistics.need_scipy import check_scipy as check_scipy
from .statistics.permutation import (
    PermutationTest as PermutationTest,
    paired_decrease as paired_decrease,
    unpaired_decrease as unpaired_decrease,
)
from .trace.chrome_trace import chrome_trace as chrome_trace
from .trace.clock_offset import ClockOffset as ClockOffset, measure_clock_offset as measure_clock_offset
from .trace.horovod_timeline import read_horovod_timeline as read_horovod_timeline
from .trace.read_trace import RankTrace as RankTrace, read_traces as read_traces
from .trace.trace_steps import TRACE_FOLDER as TRACE_FOLDER, parse_trace_steps as parse_trace_steps
