"""Writes dashboards, alert rules and an example of Prometheus's configuration into a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from hpctrain.errors import UsageError
from hpctrain.monitoring.grafana import grafana_dashboard
from hpctrain.monitoring.panel import FILES, read_dashboards

# Written by hand, and copied as they are.
_COPIED = ("alerts.yml", "prometheus.yml")


def monitoring_files() -> Mapping[str, str]:
    """Returns the text of each file by its path in the folder."""
    found = {
        f"dashboards/{dashboard.name}.json": json.dumps(grafana_dashboard(dashboard), indent=2) + "\n"
        for dashboard in read_dashboards()
    }
    return found | {name: (FILES / name).read_text(encoding="utf-8") for name in _COPIED}


def write_monitoring(folder: Path) -> tuple[Path, ...]:
    """Writes the files into `folder`, which is made if it is not there, and returns their paths.

    Files of these names that are there already are replaced. Raises UsageError if one cannot be written.
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
