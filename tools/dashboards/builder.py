"""Dashboards as values, and the JSON that Grafana reads. Owns the layout; knows no metric.

A panel says what it shows (its queries), what that means (its description) and what it shows when there is
nothing (`empty`). A panel with `may_be_empty` waits for something that a healthy installation never does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Json = dict[str, Any]
Kind = Literal["timeseries", "stat", "heatmap", "table"]

DATASOURCE: Final[Json] = {"type": "prometheus", "uid": "${datasource}"}
WIDTH: Final = 24
_HEIGHT: Final[dict[Kind, int]] = {"timeseries": 8, "stat": 4, "heatmap": 8, "table": 7}
SCHEMA_VERSION: Final = 39


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and the name of what it gives; `{{label}}` in the name is filled in by Grafana."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        unit: of Grafana: s, reqps, short, percentunit, bytes, ...
        empty: shown when the queries give nothing.
        may_be_empty: whether that is so while requests are served and nothing is wrong.
        width: of 24.
        stacked: series are parts of a whole.
        limits: values above which the colour turns to yellow and to red.
        falling: the colours turn below the limits, not above.
        hidden: labels that a table does not show.
    """

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    kind: Kind = "timeseries"
    empty: str = "No requests yet"
    may_be_empty: bool = False
    width: int = 8
    stacked: bool = False
    limits: tuple[float, float] | None = None
    falling: bool = False
    maximum: float | None = None
    hidden: Sequence[str] = ("Time", "Value", "__name__", "job")


@dataclass(frozen=True, slots=True)
class Row:
    """A titled line of panels."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard; `uid` is its address and never changes."""

    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    variables: Sequence[Json] = field(default_factory=tuple)

    @property
    def panels(self) -> list[Panel]:
        """All panels, in their order."""
        return [panel for row in self.rows for panel in row.panels]

    def to_json(self) -> Json:
        """Give what Grafana reads."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["millrace"],
            "schemaVersion": SCHEMA_VERSION,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "annotations": {"list": []},
            "links": [
                {"type": "dashboards", "title": "Millrace", "tags": ["millrace"], "asDropdown": False,
                 "includeVars": True, "keepTime": True, "icon": "external link", "targetBlank": False}
            ],
            "templating": {"list": [*FLEET_VARIABLES, *self.variables, FILTERS]},
            "panels": self._lay_out(),
        }  # fmt: skip

    def _lay_out(self) -> list[Json]:
        """Place rows below each other, and the panels of a row beside each other until the line is full."""
        placed: list[Json] = []
        y = 0
        for row in self.rows:
            placed.append({"id": len(placed) + 1, "type": "row", "title": row.title, "collapsed": False,
                           "panels": [], "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}})  # fmt: skip
            y, x, height = y + 1, 0, 0
            for panel in row.panels:
                if x + panel.width > WIDTH:
                    x, y, height = 0, y + height, 0
                place = {"x": x, "y": y, "w": panel.width, "h": _HEIGHT[panel.kind]}
                placed.append({"id": len(placed) + 1, **_panel_json(panel), "gridPos": place})
                x, height = x + panel.width, max(height, _HEIGHT[panel.kind])
            y += height
        return placed


def _panel_json(panel: Panel) -> Json:
    instant = panel.kind in ("stat", "table")
    targets = [
        {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": query.expr, "legendFormat": query.legend,
         "range": not instant, "instant": instant,
         "format": {"heatmap": "heatmap", "table": "table"}.get(panel.kind, "time_series")}
        for i, query in enumerate(panel.queries)
    ]  # fmt: skip
    made: Json = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
    }
    if panel.kind == "table":
        hidden = {"excludeByName": dict.fromkeys(panel.hidden, True)}
        made["transformations"] = [{"id": "organize", "options": hidden}]
    return made


def _defaults(panel: Panel) -> Json:
    defaults: Json = {
        "unit": panel.unit,
        "noValue": panel.empty,
        "thresholds": {"mode": "absolute", "steps": _steps(panel)},
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
        "mappings": [{"type": "special", "options": {"match": "nan", "result": {"text": panel.empty}}}],
    }
    if panel.unit in ("percentunit", "short", "bytes", "s", "reqps"):
        defaults["min"] = 0
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 25 if panel.stacked else 5,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return defaults


def _steps(panel: Panel) -> list[Json]:
    if panel.limits is None:
        return [{"color": "blue", "value": None}]
    first, second = panel.limits
    colours = ("red", "yellow", "green") if panel.falling else ("green", "yellow", "red")
    return [{"color": colour, "value": value} for colour, value in zip(colours, (None, first, second), strict=True)]


def _options(panel: Panel) -> Json:
    if panel.kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "colorMode": "value", "graphMode": "none", "textMode": "auto"}  # fmt: skip
    if panel.kind == "heatmap":
        return {"calculate": False, "yAxis": {"unit": panel.unit}, "cellGap": 1,
                "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
                "tooltip": {"mode": "single", "yHistogram": True}, "legend": {"show": True}}  # fmt: skip
    if panel.kind == "table":
        return {"showHeader": True, "cellHeight": "sm"}
    return {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"}}  # fmt: skip


def choice(name: str, label: str, metric: str, wanted: str) -> Json:
    """Make a variable whose values are those of a label; all of them to begin with."""
    query = f"label_values({metric}, {wanted})"
    return {"name": name, "label": label, "type": "query", "datasource": DATASOURCE, "query": query,
            "definition": query, "refresh": 2, "sort": 1, "multi": True, "includeAll": True, "allValue": ".*",
            "current": {"text": "All", "value": "$__all"}}  # fmt: skip


def one_of(name: str, label: str, values: Sequence[str], first: str) -> Json:
    """Make a variable with a fixed set of values."""
    options = [{"text": value, "value": value, "selected": value == first} for value in values]
    return {"name": name, "label": label, "type": "custom", "query": ",".join(values), "options": options,
            "multi": False, "includeAll": False, "current": {"text": first, "value": first}}  # fmt: skip


FLEET_VARIABLES: Final[Sequence[Json]] = (
    {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus",
     "current": {"text": "Prometheus", "value": "prometheus"}},
    choice("job", "Job", "millrace_ready", "job"),
    choice("instance", "Instance", 'millrace_ready{job=~"$job"}', "instance"),
)  # fmt: skip
FILTERS: Final[Json] = {"name": "filters", "label": "Filters", "type": "adhoc", "datasource": DATASOURCE}
"""Any other label, for example the namespace of one of several installations."""
