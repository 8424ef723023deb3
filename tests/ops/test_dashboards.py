"""The dashboards that are written: equal to the code, about metrics that exist, complete for whoever looks."""

import json
import re
from itertools import combinations
from typing import Any

import pytest

from shared.metrics import READY, Metric
from tests.ops.compose_file import ROOT
from tests.ops.known_metrics import KNOWN, find_unknown
from tools.dashboards import promql
from tools.dashboards.__main__ import DASHBOARDS, FOLDER, files
from tools.dashboards.builder import Dashboard

WRITTEN: list[dict[str, Any]] = [json.loads(text) for _, text in files()]
PANELS = [(board["title"], panel) for board in WRITTEN for panel in board["panels"] if panel["type"] != "row"]
IDS = [f"{board} {panel['title']}" for board, panel in PANELS]


def test_the_files_are_what_the_code_says() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    assert written == {path.name: text for path, text in files()}, "run make dashboards"


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=IDS)
def test_a_panel_is_complete(board: str, panel: dict[str, Any]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    assert panel["title"] and panel["description"] and defaults["unit"] and defaults["noValue"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["targets"]
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]
        assert target["legendFormat"] or panel["type"] == "table"
        assert find_unknown(promql_without_variables(target["expr"])) == []
        assert 'job=~"$job",instance=~"$instance"' in target["expr"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def promql_without_variables(expr: str) -> str:
    return expr.replace("$__rate_interval", "5m").replace("$__range", "1h")


def test_unknown_metrics_and_labels_are_found() -> None:
    assert find_unknown('sum by (job) (rate(millrace_steps_total{path=~"a|b"}[5m])) or vector(0)') == []
    assert find_unknown("rate(millrace_stepps_total[5m])") == ["millrace_stepps_total"]
    assert find_unknown('millrace_ready{uid="x"}') == ["millrace_ready{uid}"]
    assert find_unknown("sum by (why) (millrace_ready)") == ["by why"]
    assert find_unknown("millrace_step_seconds") != []
    with pytest.raises(ValueError, match="millrace_ready has no label reason"):
        promql.select(READY, reason="x")
    with pytest.raises(ValueError, match="millrace_ready has no label stream"):
        promql.gauge(READY, "stream")


@pytest.mark.parametrize("board", WRITTEN, ids=lambda board: board["uid"])
def test_a_dashboard_can_be_placed_and_found(board: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in board["panels"] if panel["type"] != "row"]
    assert len(set(titles)) == len(titles)
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert names[:3] == ["datasource", "job", "instance"]
    assert board["templating"]["list"][0]["current"]["value"] == "prometheus"
    text = json.dumps(board)
    assert "__inputs" not in text and "${DS_" not in text
    for one, other in combinations([panel["gridPos"] for panel in board["panels"]], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in board["panels"])


def test_every_dashboard_has_a_small_picture_that_is_shown() -> None:
    folder = ROOT / "docs" / "images"
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    names = [f"dashboard-{board['uid'].removeprefix('millrace-')}.png" for board in WRITTEN]
    assert sum((folder / name).stat().st_size for name in names) < 300_000
    assert all(f"(images/{name})" in page for name in names)


def test_addresses_and_names_are_unique() -> None:
    assert len({board.uid for board in DASHBOARDS}) == len(DASHBOARDS)
    assert all(isinstance(board, Dashboard) and board.description for board in DASHBOARDS)


def test_a_rate_needs_something_to_divide_by() -> None:
    metric = Metric("millrace_x_seconds", "histogram", "x")
    assert "_count" in promql.mean(metric) and promql.mean(metric).endswith("> 0)")


def test_pages_and_the_chart_name_metrics_that_exist() -> None:
    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / "ops" / "helm").rglob("*.*"), ROOT / "README.md"]
    named = {
        (name, path.name)
        for path in files
        if path.is_file() and path.suffix in (".md", ".yaml", ".yml", ".tpl")
        for name in re.findall(r"\bmillrace_[a-z][a-z_]*[a-z]\b", path.read_text(encoding="utf-8"))
    }
    known = {name: metric for name, metric in KNOWN.items() if name.startswith("millrace_")}
    assert {
        one for one in named if one[0] not in known and re.sub(r"_(bucket|sum|count)$", "", one[0]) not in known
    } == set()
