import re

import pytest

from shared.metrics import Metric
from tools.metrics_doc import PATH, TABLES, render

ALL = [(service, metric) for service, rows in TABLES.items() for metric in rows]


def test_the_page_is_what_the_tables_say() -> None:
    assert PATH.read_text(encoding="utf-8") == render(), "run python -m tools.metrics_doc"


@pytest.mark.parametrize(("service", "metric"), ALL, ids=[f"{service} {metric.name}" for service, metric in ALL])
def test_names_follow_the_rules(service: str, metric: Metric) -> None:
    assert re.fullmatch(r"millrace_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.help
    assert "uid" not in metric.labels
    assert list(metric.buckets) == sorted(metric.buckets)
    assert not metric.buckets or metric.kind == "histogram"


def test_a_name_means_one_thing() -> None:
    meanings: dict[str, Metric] = {}
    for _, metric in ALL:
        assert meanings.setdefault(metric.name, metric) == metric
