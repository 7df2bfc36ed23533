from .dashboards import (
    Dashboard as Dashboard,
    DashboardSection as DashboardSection,
    Panel as Panel,
    Query as Query,
    monitoring_files as monitoring_files,
    read_dashboards as read_dashboards,
    write_monitoring as write_monitoring,
)
