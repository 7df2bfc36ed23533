from .efficiency import (
    Efficiency as Efficiency,
    Factors as Factors,
    Scaling as Scaling,
    StepTimes as StepTimes,
    against as against,
    attribute as attribute,
    divided as divided,
    document_of as document_of,
    efficiency_from as efficiency_from,
    efficiency_of as efficiency_of,
    own_times as own_times,
    read_efficiency as read_efficiency,
    read_step_times as read_step_times,
)
from .model.calibrate import (
    Fit as Fit,
    MeasuredStep as MeasuredStep,
    ModelCalibration as ModelCalibration,
    Timed as Timed,
    calibrate_model as calibrate_model,
    calibration_record as calibration_record,
    fit_machine as fit_machine,
    interval as interval,
    machine_of as machine_of,
    overlap_slowdown as overlap_slowdown,
    relative_error as relative_error,
    timed_of as timed_of,
)
from .model.costs import ALGORITHMS as ALGORITHMS, Cost as Cost, cost_of as cost_of
from .model.machine import (
    Layout as Layout,
    Link as Link,
    Machine as Machine,
    Node as Node,
    parse_nodes as parse_nodes,
    parse_rate as parse_rate,
)
from .model.predict import (
    Fusion as Fusion,
    Scenario as Scenario,
    Setup as Setup,
    Step as Step,
    Storage as Storage,
    binding as binding,
    predicted_efficiency as predicted_efficiency,
    step_seconds as step_seconds,
)
from .model.report import (
    Advice as Advice,
    PredictedRow as PredictedRow,
    advice as advice,
    plot_predictions as plot_predictions,
    predicted_rows as predicted_rows,
    prediction_document as prediction_document,
    prediction_table as prediction_table,
)
from .model.workload import (
    ReadyBucket as ReadyBucket,
    Workload as Workload,
    rebucketed as rebucketed,
    slowest_factor as slowest_factor,
    spread_of_times as spread_of_times,
)
from .nodes_advice.advise import (
    NodesAdvice as NodesAdvice,
    ScalingGoal as ScalingGoal,
    advise_nodes as advise_nodes,
    no_advice as no_advice,
)
from .nodes_advice.evidence import RunEvidence as RunEvidence
from .nodes_advice.predict_nodes import (
    FixedShare as FixedShare,
    MeasuredJob as MeasuredJob,
    MeasuredLink as MeasuredLink,
    NodesModel as NodesModel,
    NodesPrediction as NodesPrediction,
)
from .simulate import (
    Outcome as Outcome,
    SimulatedJob as SimulatedJob,
    simulate_job as simulate_job,
    sweep as sweep,
)
from .statistics.comparison import (
    ALL_FIGURES as ALL_FIGURES,
    Comparison as Comparison,
    FigureComparison as FigureComparison,
    PermutationTest as PermutationTest,
    compare_rounds as compare_rounds,
    paired_decrease as paired_decrease,
    unpaired_decrease as unpaired_decrease,
)
from .statistics.fits import (
    FitChoice as FitChoice,
    FittedParameter as FittedParameter,
    LawFit as LawFit,
    Parameter as Parameter,
    ScalingLaw as ScalingLaw,
    fit_laws as fit_laws,
    laws_of as laws_of,
)
from .statistics.intervals import (
    RatioEstimate as RatioEstimate,
    paired_ratio as paired_ratio,
    unpaired_ratio as unpaired_ratio,
)
from .statistics.need_scipy import check_scipy as check_scipy
from .trace.chrome_trace import (
    RankTrace as RankTrace,
    chrome_trace as chrome_trace,
    read_horovod_timeline as read_horovod_timeline,
    read_traces as read_traces,
)
from .trace.clock_offset import ClockOffset as ClockOffset, measure_clock_offset as measure_clock_offset
from .trace.trace_steps import TRACE_FOLDER as TRACE_FOLDER, parse_trace_steps as parse_trace_steps
