from .dashboards import (
    Dashboard as Dashboard,
    Panel as Panel,
    Query as Query,
    Section as Section,
    monitoring_files as monitoring_files,
    read_dashboards as read_dashboards,
    write_monitoring as write_monitoring,
)
