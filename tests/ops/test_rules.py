"""The rules: promtool takes them, each alert has a test and a page in the runbook, and names what exists."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.prometheus_server import RULES
from tests.ops.compose_file import ROOT
from tests.ops.known_metrics import find_unknown

TESTS = Path(__file__).parent / "rules_test.yml"
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
LOADED: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = [rule for rule in LOADED if "alert" in rule]
RECORDED = frozenset(rule["record"] for rule in LOADED if "record" in rule)


def promtool(*args: str) -> str:
    done = subprocess.run(["promtool", *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_takes_the_rules() -> None:
    assert f"{len(LOADED)} rules found" in promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    promtool("test", "rules", str(TESTS))
    asked = {alert: set[bool]() for alert in (rule["alert"] for rule in ALERTS)}
    for one in yaml.safe_load(TESTS.read_text())["tests"]:
        for check in one["promql_expr_test"]:
            alert = re.search(r'alertname="(\w+)"', check["expr"])
            assert alert
            asked[alert[1]].add(bool(check["exp_samples"]))
    assert {alert for alert, seen in asked.items() if True not in seen} == set(), "no test has them fire"


@pytest.mark.parametrize("rule", LOADED, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_name_what_exists(rule: dict[str, Any]) -> None:
    assert find_unknown(rule["expr"], also=RECORDED) == []


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: str(rule["alert"]))
def test_an_alert_is_complete(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    notes = rule["annotations"]
    assert notes["summary"] and notes["description"]
    page, _, anchor = notes["runbook_url"].partition("#")
    assert anchor == rule["alert"].lower()
    assert f"\n### {rule['alert']}\n" in (ROOT / page).read_text()


def test_the_runbook_knows_no_other_alert() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text()
    sections = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    assert sorted(sections) == sorted(rule["alert"] for rule in ALERTS)
    assert set(re.findall(r"\(#(\w+)\)", text)) <= {section.lower() for section in sections}


def test_prometheus_takes_the_configuration_of_the_containers(tmp_path: Path) -> None:
    folder = ROOT / "ops" / "prometheus"
    text = (folder / "prometheus.yml").read_text().replace("/tmp/metrics-key", str(tmp_path / "key"))
    (tmp_path / "key").write_text("")
    (tmp_path / "rules").symlink_to(folder / "rules")
    (tmp_path / "prometheus.yml").write_text(text)
    assert "SUCCESS" in promtool("check", "config", str(tmp_path / "prometheus.yml"))
