"""Prometheus' own tools read the files in deploy, and run each alert on series that fire it and on others."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
CASES = Path(__file__).with_name("rules_test.yml")

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus")


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


@needs_promtool
def test_prometheus_reads_its_configuration() -> None:
    promtool("check", "config", RULES.with_name("prometheus.yml"))


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", CASES)


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: str(alert["alert"]))
def test_an_alert_has_a_case_that_fires_and_one_that_does_not(alert: dict[str, Any]) -> None:
    """`promtool test rules` compares all labels and texts of what fires, so the instance "good" must not fire."""
    (case,) = (
        case
        for case in yaml.safe_load(CASES.read_text())["tests"]
        if any(ask["alertname"] == alert["alert"] and ask["exp_alerts"] for ask in case["alert_rule_test"])
    )
    names = " ".join(series["series"] for series in case["input_series"])
    assert 'instance="bad"' in names and 'instance="good"' in names
    for ask in case["alert_rule_test"]:
        for expected in ask["exp_alerts"]:
            assert expected["exp_labels"]["instance"] == "bad"
            assert {"job", "instance", "severity"} <= set(expected["exp_labels"])
            assert set(expected["exp_annotations"]) == {"summary", "description", "runbook_url"}


def test_every_alert_has_a_runbook_of_its_own() -> None:
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "deploy.md").read_text(), re.MULTILINE)
    assert [alert["alert"] for alert in alerts()] == headings
    for alert in alerts():
        assert alert["annotations"]["runbook_url"] == f"docs/deploy.md#{alert['alert'].lower()}"
