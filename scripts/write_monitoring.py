"""Writes deploy/monitoring, which `hpctrain export monitoring` writes for a user: `make docs`."""

from __future__ import annotations

from pathlib import Path

from hpctrain.monitoring import write_monitoring

if __name__ == "__main__":
    write_monitoring(Path(__file__).resolve().parent.parent / "deploy" / "monitoring")
