import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.metrics import LATENCY_BUCKETS, READY, SERVICE_INFO, STALE_S, Metric, Metrics, StreamGauges, bounded, table

COUNTER = Metric("millrace_x_total", "counter", "x", ("reason",))
HISTOGRAM = Metric("millrace_x_seconds", "histogram", "x")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("api", "api-0", 'odd "model"\n\\', "1.2")


def test_the_page_can_be_parsed_and_says_who_it_is(metrics: Metrics) -> None:
    page = metrics.render().decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    [info] = families["millrace_service_info"].samples
    assert info.labels == {"service": "api", "name": "api-0", "version": "1.2", "model": 'odd "model"\n\\'}
    assert "process_resident_memory_bytes" in families
    assert "python_gc_collections" in families


def test_a_metric_is_made_once(metrics: Metrics) -> None:
    assert metrics.counter(COUNTER) is metrics.counter(COUNTER)
    metrics.counter(COUNTER).labels("a").inc()
    assert metrics.registry.get_sample_value("millrace_x_total", {"reason": "a"}) == 1


def test_only_what_is_used_is_exported(metrics: Metrics) -> None:
    assert b"millrace_x_total" not in metrics.render()
    metrics.counter(COUNTER).labels("a")
    assert b"millrace_x_total" in metrics.render()


def test_a_metric_of_another_kind_is_an_error(metrics: Metrics) -> None:
    with pytest.raises(TypeError, match="is a gauge, not a counter"):
        metrics.counter(READY)


def test_histograms_reach_from_a_millisecond_to_minutes(metrics: Metrics) -> None:
    metrics.histogram(HISTOGRAM).observe(0.0015)
    assert (LATENCY_BUCKETS[0], LATENCY_BUCKETS[-1] > 120) == (0.001, True)
    assert metrics.registry.get_sample_value("millrace_x_seconds_bucket", {"le": "0.001"}) == 0
    assert metrics.registry.get_sample_value("millrace_x_seconds_bucket", {"le": "0.002"}) == 1


def test_two_registries_do_not_mix() -> None:
    one, two = Metrics("api", "a", "m", "0"), Metrics("api", "b", "m", "0")
    one.counter(COUNTER).labels("a").inc()
    assert two.registry.get_sample_value("millrace_x_total", {"reason": "a"}) is None


def test_a_stream_that_nobody_measures_any_more_is_left_out(metrics: Metrics) -> None:
    now = 100.0
    gauges = StreamGauges(metrics, "tokens", clock=lambda: now)

    def value(name: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"stream": "tokens"})

    assert value("millrace_stream_length") is None
    gauges.set(10, 7, 3, 1.5)
    names = ("length", "lag", "pending", "oldest_age_seconds")
    assert [value(f"millrace_stream_{name}") for name in names] == [10, 7, 3, 1.5]
    now += STALE_S
    assert [value(f"millrace_stream_{name}") for name in names] == [None] * 4
    gauges.set(1, -1, 2, 0)  # read before it was counted
    assert value("millrace_stream_lag") == 0


def test_labels_come_from_closed_sets() -> None:
    assert bounded("a", {"a", "b"}) == "a"
    assert bounded("evil", {"a", "b"}) == "other"


def test_a_table_can_be_written_down() -> None:
    text = table([SERVICE_INFO, READY])
    assert "| `millrace_service_info` | gauge | service, name, version, model |" in text
    assert text.count("\n") == 4
