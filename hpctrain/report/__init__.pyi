from .conclusions import (
    Conclusion as Conclusion,
    Level as Level,
    ReductionLimit as ReductionLimit,
    conclude as conclude,
    reduction_limit as reduction_limit,
)
from .contents import (
    Report as Report,
    make_report as make_report,
    write_csv as write_csv,
    write_html as write_html,
    write_markdown as write_markdown,
    write_png as write_png,
    write_report_json as write_report_json,
)
from .mlflow_export import export_to_mlflow as export_to_mlflow
from .plots import check_matplotlib as check_matplotlib
from .run_data import INCIDENTS as INCIDENTS, RunData as RunData, read_run as read_run
from .tables import (
    Prices as Prices,
    Row as Row,
    Table as Table,
    incident_text as incident_text,
    read_prices as read_prices,
)
