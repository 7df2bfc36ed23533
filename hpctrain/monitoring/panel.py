"""Dashboards, as `files/dashboards.toml` has them: sections of panels, and their PromQL. No Grafana in here."""

from __future__ import annotations

import functools
import sys
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILES = files("hpctrain.monitoring") / "files"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Query(_Part):
    """An expression of a panel, in PromQL with Grafana's variables, and the name of its series."""

    expr: str
    legend: str


class Panel(_Part):
    """A panel of a dashboard. The comment in the table says what its fields mean."""

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


class Section(_Part):
    """A heading of a dashboard and the panels below it."""

    title: str
    panels: tuple[Panel, ...]


class Dashboard(_Part):
    """A dashboard. name: of its file, and in its address in Grafana. about: who looks at it, and for what."""

    name: str
    title: str
    about: str
    sections: tuple[Section, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, in the order in which they are shown."""
        return tuple(panel for section in self.sections for panel in section.panels)


class _Table(_Part):
    dashboards: tuple[Dashboard, ...]


@functools.cache
def read_dashboards() -> tuple[Dashboard, ...]:
    """Returns the dashboards of the table."""
    text = (FILES / "dashboards.toml").read_text(encoding="utf-8")
    return _Table.model_validate(tomllib.loads(text)).dashboards
