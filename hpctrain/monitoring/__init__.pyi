from .panel import (
    Dashboard as Dashboard,
    Panel as Panel,
    Query as Query,
    Section as Section,
    read_dashboards as read_dashboards,
)
from .write import monitoring_files as monitoring_files, write_monitoring as write_monitoring
