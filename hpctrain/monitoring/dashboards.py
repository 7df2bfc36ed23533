"""Writes dashboards for Grafana, alert rules and an example configuration for Prometheus into a folder.

`files/dashboards.toml` has the dashboards in a form that does not depend on Grafana: sections, their panels, and the
panels' PromQL. `grafana_dashboard` converts a dashboard to Grafana's classic JSON, which Grafana 9 and later import.
Data source and run are variables of the dashboard, so that the same file can be used in every Grafana.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hpctrain.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILES = files("hpctrain.monitoring") / "files"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Query(_Part):
    """A query of a panel: an expression in PromQL with Grafana's variables, and the legend of its series."""

    expr: str
    legend: str


class Panel(_Part):
    """A panel of a dashboard. A comment in `files/dashboards.toml` explains the fields."""

    title: str
    about: str
    kind: Literal["stat", "timeseries", "heatmap", "table"]
    unit: str
    queries: tuple[Query, ...] = Field(min_length=1)
    width: int = Field(8, ge=1, le=24)
    warn_above: float | None = None
    warn_below: float | None = None
    minimum: float | None = None
    maximum: float | None = None


class DashboardSection(_Part):
    """A heading of a dashboard and the panels below it."""

    title: str
    panels: tuple[Panel, ...]


class Dashboard(_Part):
    """A dashboard.

    name: name of the dashboard's file, also used in its address in Grafana.
    about: who uses the dashboard, and for what.
    """

    name: str
    title: str
    about: str
    sections: tuple[DashboardSection, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, in the order in which they are shown."""
        return tuple(panel for section in self.sections for panel in section.panels)


class _Table(_Part):
    dashboards: tuple[Dashboard, ...]


@functools.cache
def read_dashboards() -> tuple[Dashboard, ...]:
    """Returns the dashboards in `files/dashboards.toml`."""
    text = (FILES / "dashboards.toml").read_text(encoding="utf-8")
    return _Table.model_validate(tomllib.loads(text)).dashboards


_SCHEMA_VERSION = 36  # that of Grafana 9; newer versions convert it when they load it
_COLUMNS = 24
_HEIGHTS = {"stat": 4, "timeseries": 8, "heatmap": 8, "table": 8}
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
RUN_VARIABLE_QUERY = "label_values(hpctrain_run_info, run)"


def grafana_dashboard(dashboard: Dashboard) -> dict[str, Any]:
    """Returns a dashboard as a JSON document for Grafana."""
    return {
        "id": None,
        "uid": f"hpctrain-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["hpctrain"],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # the same moment is marked in all panels
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "annotations": {"list": []},
        "links": [_links_to_others()],
        "templating": {"list": [_datasource_variable(), _run_variable()]},
        "panels": list(_placed(dashboard)),
    }


def _links_to_others() -> dict[str, Any]:
    return {
        "title": "hpctrain",
        "type": "dashboards",
        "tags": ["hpctrain"],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
    }


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
    }


def _run_variable() -> dict[str, Any]:
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": RUN_VARIABLE_QUERY,
        "query": {"query": RUN_VARIABLE_QUERY, "refId": "run"},
        "current": {},
        "hide": 0,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "options": [],
        "refresh": 2,  # whenever the time range changes: runs come and go
        "regex": "",
        "sort": 1,
    }


def _placed(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    """Yields headings and panels with their numbers and positions, from left to right and top to bottom."""
    number, top = 0, 0
    for section in dashboard.sections:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": section.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": top, "w": _COLUMNS, "h": 1},
        }
        top, left, height = top + 1, 0, 0
        for panel in section.panels:
            if left + panel.width > _COLUMNS:
                top, left, height = top + height, 0, 0
            number += 1
            place = {"x": left, "y": top, "w": panel.width, "h": _HEIGHTS[panel.kind]}
            yield {"id": number, **_panel(panel), "gridPos": place}
            left, height = left + panel.width, max(height, _HEIGHTS[panel.kind])
        top += height


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "mappings": [], "thresholds": _thresholds(panel)}
    if panel.minimum is not None:
        defaults["min"] = panel.minimum
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.kind == "timeseries":
        defaults["color"] = {"mode": "palette-classic"}
        marked = panel.warn_above is not None or panel.warn_below is not None
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 0,
            "showPoints": "never",
            "thresholdsStyle": {"mode": "dashed" if marked else "off"},
        }
    else:
        defaults["color"] = {"mode": "thresholds"}
    shown: dict[str, Any] = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel),
        "targets": [_target(panel, query, index) for index, query in enumerate(panel.queries)],
    }
    if panel.kind == "table":
        shown["transformations"] = [_one_table()]
    return shown


def _thresholds(panel: Panel) -> Mapping[str, Any]:
    below, above = panel.warn_below, panel.warn_above
    steps: list[dict[str, Any]] = [{"color": "green" if below is None else "orange", "value": None}]
    if below is not None:
        steps.append({"color": "green", "value": below})
    if above is not None:
        steps.append({"color": "orange", "value": above})
    return {"mode": "absolute", "steps": steps}


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        return {
            "colorMode": "value",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
            "textMode": "auto",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    if panel.kind == "heatmap":
        return {
            "calculate": False,  # Prometheus has counted in buckets already
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
            "yAxis": {"unit": panel.unit},
            "tooltip": {"show": True, "yHistogram": False},
        }
    if panel.kind == "table":
        return {"showHeader": True, "cellHeight": "sm"}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _target(panel: Panel, query: Query, index: int) -> dict[str, Any]:
    formats = {"heatmap": "heatmap", "table": "table"}
    instant = panel.kind in ("stat", "table")
    return {
        "refId": chr(ord("A") + index),
        "datasource": _DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "format": formats.get(panel.kind, "time_series"),
        "instant": instant,
        "range": not instant,
    }


def _one_table() -> dict[str, Any]:
    """Returns the transformation that hides the columns of a table that are of no interest."""
    hidden = ("Time", "__name__", "instance", "job")
    return {"id": "organize", "options": {"excludeByName": dict.fromkeys(hidden, True)}}


# Writes dashboards, alert rules and an example of Prometheus's configuration into a folder.


# Written by hand, and copied as they are.
_COPIED = ("alerts.yml", "prometheus.yml")


def monitoring_files() -> Mapping[str, str]:
    """Returns the text of each file that `write_monitoring` writes, by the file's path in the folder."""
    found = {
        f"dashboards/{dashboard.name}.json": json.dumps(grafana_dashboard(dashboard), indent=2) + "\n"
        for dashboard in read_dashboards()
    }
    return found | {name: (FILES / name).read_text(encoding="utf-8") for name in _COPIED}


def write_monitoring(folder: Path) -> tuple[Path, ...]:
    """Writes the files into `folder`, which is created if it does not exist, and returns their paths.

    Existing files of these names are replaced. Raises UsageError if a file cannot be written.
    """
    written = []
    for name, text in monitoring_files().items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"{path} cannot be written ({error.strerror}): name a folder where this user may write"
            ) from error
        written.append(path)
    return tuple(written)
