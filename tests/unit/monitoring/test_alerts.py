"""The alert rules: what promtool says of them, that each is tested both ways, and that their runbooks are there."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpctrain.monitoring import write_monitoring
from tests.monitoring.servers import program
from tests.ranks_launcher import REPOSITORY

CASES = Path(__file__).with_name("alerts_test.yml")
RULES = REPOSITORY / "hpctrain" / "monitoring" / "files" / "alerts.yml"


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def promtool(*words: str, cwd: Path) -> None:
    done = subprocess.run(
        [program("promtool"), *words], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_the_configuration_and_its_rules(tmp_path: Path) -> None:
    write_monitoring(tmp_path)
    promtool("check", "config", "prometheus.yml", cwd=tmp_path)
    promtool("check", "rules", "--lint=all", "--lint-fatal", "alerts.yml", cwd=tmp_path)


def test_each_alert_fires_where_it_has_to_and_only_there() -> None:
    promtool("test", "rules", CASES.name, cwd=CASES.parent)


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    fires: dict[str, set[bool]] = defaultdict(set)
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for asked in case["alert_rule_test"]:
            fires[asked["alertname"]].add(bool(asked.get("exp_alerts")))
    assert fires == {rule["alert"]: {True, False} for rule in rules()}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_has_all_its_parts_and_its_runbooks_name_it(rule: dict[str, Any]) -> None:
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert set(rule["annotations"]) == {"summary", "runbook"}
    assert "{{ $labels.run }}" in rule["annotations"]["summary"]
    pages = re.findall(r"f\d+-[\w-]+", rule["annotations"]["runbook"])
    assert pages
    for page in pages:
        assert f"`{rule['alert']}`" in (REPOSITORY / "docs" / "runbooks" / f"{page}.md").read_text()
