"""A real Prometheus scrapes the launched stack under load and faults: every query answers, every rule is sound."""

import math
import re
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from bench.mixed_load import MixedLoad
from bench.prometheus_server import PrometheusServer, filled_in, targets_of
from tests.e2e.stack import Stack
from tests.ops.known_metrics import KNOWN
from tests.ops.test_rules import LOADED
from tests.waiting import eventually
from tools.dashboards.__main__ import DASHBOARDS
from tools.dashboards.builder import Dashboard, Query

FLAGS = (
    "--engine", "fake", "--fake-step-ms", "5", "--schedulers", "2", "--tokenizers", "2", "--detokenizers", "2",
    "--api-workers", "2", "--max-seq-len", "1024",
)  # fmt: skip


class Watched:
    """A stack, who looks at it, and who asks it."""

    def __init__(self, stack: Stack, prometheus: PrometheusServer, load: MixedLoad) -> None:
        self.stack = stack
        self.prometheus = prometheus
        self.load = load

    def answer(self, num: int) -> None:
        """Wait until so many more requests were answered."""
        before = self.load.answered
        eventually(lambda: self.load.answered >= before + num, f"{num} more answers")

    def has_data(self, query: Query) -> bool:
        """Whether a panel's query gives a number now."""
        return any(not math.isnan(value) for _, value in self.prometheus.query(filled_in(query.expr)))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    stack = Stack(tmp_path_factory.mktemp("watched"), *FLAGS)
    try:
        prometheus = PrometheusServer(tmp_path_factory.mktemp("prometheus"), targets_of(stack.ports()))
        try:
            with MixedLoad(stack.url, stack.model, 6) as load:
                all_there = Watched(stack, prometheus, load)
                all_there.answer(60)
                stack.kill("scheduler-0")
                stack.kill("tokenizer-1")
                all_there.answer(100)
                yield all_there
        finally:
            prometheus.close()
    finally:
        stack.close()


@pytest.mark.slow
@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)
def test_every_panel_shows_something(watched: Watched, board: Dashboard) -> None:
    def empty() -> list[str]:
        return [
            f"{panel.title}: {query.legend}"
            for panel in board.panels
            if not panel.may_be_empty
            for query in panel.queries
            if not watched.has_data(query)
        ]

    eventually(lambda: not empty(), f"data in all of {board.title}, not in {empty()}", every_s=1.0)


def test_a_panel_that_may_be_empty_is_a_query_all_the_same(watched: Watched) -> None:
    for board in DASHBOARDS:
        for panel in board.panels:
            for query in panel.queries:
                assert isinstance(watched.prometheus.query(filled_in(query.expr)), list)


def test_every_rule_is_evaluated_and_nothing_fires_that_should_not(watched: Watched) -> None:
    eventually(lambda: all(rule["health"] == "ok" for rule in watched.prometheus.rules()), "all rules are evaluated")
    rules = watched.prometheus.rules()
    assert [rule["lastError"] for rule in rules if rule.get("lastError")] == []
    assert len(rules) == len(LOADED)
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []


def test_every_metric_of_a_rule_is_there(watched: Watched) -> None:
    """An alert is empty while all is well; what it looks at must not be."""
    names = {
        name
        for rule in LOADED
        for name in re.findall(r"\b(millrace_\w+|up)\b", rule["expr"])
        if name in KNOWN or re.sub(r"_(bucket|count|sum)$", "", name) in KNOWN
    }
    assert len(names) > 20
    for name in sorted(names):
        assert watched.prometheus.query(f"count({name})"), f"no series of {name}"
    for bound in {bound for rule in LOADED for bound in re.findall(r'(\w+_bucket\{le="[^"]+"\})', rule["expr"])}:
        assert watched.prometheus.query(f"count({bound})"), f"no such bucket: {bound}"
    for record in (rule["record"] for rule in LOADED if "record" in rule):
        assert watched.prometheus.query(record), f"nothing is recorded as {record}"


def test_the_dead_were_noticed(watched: Watched) -> None:
    """An engine and a tokenizer were killed: their leases ended, and others took over what they had."""
    query = watched.prometheus.query
    lost = query("max by (role) (millrace_leases_lost_total) > 0")
    assert {labels["role"] for labels, _ in lost} >= {"scheduler", "tokenizer"}
    eventually(lambda: query('max(millrace_instances_living{role="scheduler"})')[0][1] == 2, "both engines live again")


def test_promtool_finds_no_fault_in_any_page(watched: Watched) -> None:
    for name, port in watched.stack.ports().items():
        if name == "redis":
            continue
        page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
        done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), name


def test_who_leaves_is_gone_from_the_gauges(watched: Watched) -> None:
    """Series of an instance end with its target: nothing is shown of engines that are no longer there."""
    prometheus, ports = watched.prometheus, targets_of(watched.stack.ports())["scheduler"]
    eventually(lambda: len(prometheus.query("millrace_requests_running")) == 2, "two engines are seen")
    prometheus.aim("scheduler", ports[:1])
    eventually(lambda: len(prometheus.query("millrace_requests_running")) == 1, "one engine is seen")
    prometheus.aim("scheduler", ports)
