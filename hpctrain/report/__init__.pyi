from .conclusions import Conclusion as Conclusion, conclude as conclude
from .contents import Report as Report, make_report as make_report
from .files import (
    write_csv as write_csv,
    write_html as write_html,
    write_markdown as write_markdown,
    write_png as write_png,
)
from .mlflow_export import export_to_mlflow as export_to_mlflow
from .plots import check_matplotlib as check_matplotlib
from .prices import Prices as Prices, read_prices as read_prices
from .reduction_limit import (
    Level as Level,
    ReductionLimit as ReductionLimit,
    reduction_limit as reduction_limit,
)
from .run_data import INCIDENTS as INCIDENTS, RunData as RunData, read_run as read_run
from .table import Row as Row, Table as Table
from .tables import incident_text as incident_text
