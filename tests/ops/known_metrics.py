"""What PromQL may name: the metrics and labels that the services define, and the few that others bring."""

import re

from shared.metrics import Metric
from tools.dashboards.promql import FOREIGN
from tools.metrics_doc import TABLES

KNOWN: dict[str, Metric] = {metric.name: metric for rows in TABLES.values() for metric in rows}
KNOWN |= {metric.name: metric for metric in FOREIGN}
_SUFFIX = re.compile(r"_(bucket|sum|count)$")
_WORDS = frozenset(
    {
        "sum", "max", "min", "avg", "count", "by", "rate", "increase", "histogram_quantile", "time", "vector", "or",
        "and", "on", "unless", "absent_over_time", "count_over_time",
    }
)  # fmt: skip
TARGET_LABELS = frozenset({"job", "instance", "namespace"})


def find_unknown(expr: str, also: frozenset[str] = frozenset()) -> list[str]:
    """List what an expression names and nobody defines: metrics, matched labels, grouping labels."""
    unknown = []
    labels = set(TARGET_LABELS)
    for name, matchers in re.findall(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}", expr):
        metric = KNOWN.get(name) or KNOWN.get(_SUFFIX.sub("", name))
        own = set(metric.labels if metric else ()) | TARGET_LABELS
        if metric and metric.kind == "histogram":
            own.add("le")
        labels |= own
        unknown += [
            f"{name}{{{label}}}" for label in re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", matchers) if label not in own
        ]
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", " ", expr)
    grouping = re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", bare)
    bare = re.sub(r"\b(?:by|on)\s*\([^)]*\)", " ", bare)
    for name in re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", bare):
        if name in _WORDS or name in also:
            continue
        metric = KNOWN.get(name)
        base = KNOWN.get(_SUFFIX.sub("", name))
        if metric is None and (base is None or base.kind != "histogram"):
            unknown.append(name)
            continue
        if metric is not None and metric.kind == "histogram":
            unknown.append(f"{name}: a histogram has no series of its own name")
        found = metric or base
        labels |= set(found.labels if found else ()) | ({"le"} if found and found.kind == "histogram" else set())
    for group in grouping:
        unknown += [f"by {label}" for label in re.findall(r"\w+", group) if label not in labels]
    return unknown
