"""The scheduler's metric table and its recorder."""

import pytest

from services.scheduler.core.config import SchedulerStats
from services.scheduler.core.ports import EngineLimits
from services.scheduler.metrics import TABLE, Gauges, SchedulerMetrics, StepTimes
from shared.metrics import COMMON, Metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_names_are_unique_and_of_one_family() -> None:
    names = [metric.name for metric in (*TABLE, *COMMON)]
    assert len(set(names)) == len(names)
    assert all(name.startswith("millrace_") for name in names)
    assert all(metric.name.endswith("_total") == (metric.kind == "counter") for metric in TABLE)


def test_every_metric_of_the_table_is_exported() -> None:
    metrics = Metrics("scheduler", "s", "tiny", "0")
    recorder = SchedulerMetrics(metrics)
    recorder.watch(Gauges)
    recorder.loaded(1.0)
    limits = EngineLimits("f", 256, frozenset(), 128, 16, 10, 4, 64)
    recorder.describe(limits, model="m", engine="fake", device="cpu", dtype="auto", ranks=1, prefix_cache="radix")
    text = metrics.render().decode()
    assert [metric.name for metric in TABLE if f"# HELP {metric.name} " not in text] == []


def test_gauges_are_read_at_each_scrape() -> None:
    metrics = Metrics("scheduler", "s", "tiny", "0")
    now = Gauges(running=3, pages=10, pages_free=4, pages_live=1, pages_cached=5, pages_reach=8)
    SchedulerMetrics(metrics).watch(lambda: now)
    assert value(metrics, "millrace_requests_running") == 3
    assert value(metrics, "millrace_kv_pages", state="live") == 1
    assert value(metrics, "millrace_kv_cache_usage_ratio") == pytest.approx(0.2)
    now = Gauges(pages=10, pages_free=10, pages_reach=10)
    assert value(metrics, "millrace_requests_running") == 0
    assert value(metrics, "millrace_kv_pages", state="live") == 0


def test_counters_follow_the_schedulers_own() -> None:
    metrics = Metrics("scheduler", "s", "tiny", "0")
    recorder = SchedulerMetrics(metrics)
    recorder.follow(SchedulerStats(prompt_tokens=5, generated_tokens=2))
    recorder.follow(SchedulerStats(prompt_tokens=9, generated_tokens=2, retractions=1))
    assert value(metrics, "millrace_prefill_tokens_total") == 9
    assert value(metrics, "millrace_generated_tokens_total") == 2
    assert value(metrics, "millrace_retractions_total") == 1


def test_idle_time_is_taken_over_once() -> None:
    metrics = Metrics("scheduler", "s", "tiny", "0")
    recorder = SchedulerMetrics(metrics)
    for seconds in (0.5, 0.5, 2.0):
        recorder.idle(seconds)
    assert value(metrics, "millrace_engine_idle_seconds_total") == 2.0


def test_the_parts_of_a_step_are_what_was_added_since() -> None:
    metrics = Metrics("scheduler", "s", "tiny", "0")
    recorder = SchedulerMetrics(metrics)
    recorder.step(4, 9, StepTimes(1.5, 0.5, 2.0, 3.0).minus(StepTimes(1.0, 0.25, 1.0, 1.0)), "mixed_graph")
    assert value(metrics, "millrace_step_part_seconds_sum", part="host") == 0.5
    assert value(metrics, "millrace_step_part_seconds_sum", part="device") == 2.0
    assert value(metrics, "millrace_step_seconds_sum") == 1.75
    assert value(metrics, "millrace_step_rows_sum") == 4
    assert value(metrics, "millrace_step_tokens_sum") == 9
    assert value(metrics, "millrace_steps_total", path="mixed_graph") == 1


def test_a_reason_that_is_unknown_makes_no_label() -> None:
    metrics = Metrics("scheduler", "s", "tiny", "0")
    recorder = SchedulerMetrics(metrics)
    recorder.finished("length")
    recorder.finished("whatever a client made up")
    assert value(metrics, "millrace_engine_requests_finished_total", reason="length") == 1
    assert value(metrics, "millrace_engine_requests_finished_total", reason="stop") == 1
