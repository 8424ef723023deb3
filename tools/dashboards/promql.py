"""PromQL made from the metric tables: a name or a label that no service defines cannot be written down.

Every selector carries the dashboard's variables, every rate Grafana's own interval, and every division guards
against a denominator of zero, so that an idle installation shows an empty state and no error.
"""

from collections.abc import Sequence
from typing import Final

from shared.metrics import Metric

FLEET: Final = 'job=~"$job",instance=~"$instance"'
TARGET_LABELS: Final = frozenset({"job", "instance"})
PROCESS_CPU: Final = Metric("process_cpu_seconds_total", "counter", "Of the Prometheus client")
PROCESS_MEMORY: Final = Metric("process_resident_memory_bytes", "gauge", "Of the Prometheus client")
PROCESS_START: Final = Metric("process_start_time_seconds", "gauge", "Of the Prometheus client")
UP: Final = Metric("up", "gauge", "Of Prometheus: whether a target answers")
FOREIGN: Final = (PROCESS_CPU, PROCESS_MEMORY, PROCESS_START, UP)
"""What the dashboards use beside the services' own metrics."""


def select(metric: Metric, suffix: str = "", **matchers: str) -> str:
    """Give the selector of a metric; a matcher is `label="value"`, or `label="~regex"`."""
    unknown = matchers.keys() - {*metric.labels, "le"}
    if unknown:
        raise ValueError(f"{metric.name} has no label {', '.join(sorted(unknown))}")
    more = [
        f'{label}=~"{value[1:]}"' if value.startswith("~") else f'{label}="{value}"'
        for label, value in matchers.items()
    ]
    return f"{metric.name}{suffix}{{{','.join([FLEET, *more])}}}"


def rate(metric: Metric, *by: str, **matchers: str) -> str:
    """Give the rate per second of a counter, summed."""
    return f"sum{_by(metric, by)}(rate({select(metric, **matchers)}[$__rate_interval]))"


def increase(metric: Metric, *by: str, **matchers: str) -> str:
    """Give how much a counter grew in the shown range, summed."""
    return f"sum{_by(metric, by)}(increase({select(metric, **matchers)}[$__range]))"


def gauge(metric: Metric, *by: str, how: str = "sum", **matchers: str) -> str:
    """Give a gauge, put together over instances: `sum`, `max`, `min`, `avg`."""
    return f"{how}{_by(metric, by)}({select(metric, **matchers)})"


def quantile(q: float, metric: Metric, *by: str, **matchers: str) -> str:
    """Give a quantile of a histogram, over all instances."""
    buckets = f"rate({select(metric, '_bucket', **matchers)}[$__rate_interval])"
    return f"histogram_quantile({q:g}, sum{_by(metric, ('le', *by))}({buckets}))"


def mean(metric: Metric, *by: str, **matchers: str) -> str:
    """Give the mean of what a histogram saw."""
    total, count = (
        f"sum{_by(metric, by)}(rate({select(metric, suffix, **matchers)}[$__rate_interval]))"
        for suffix in ("_sum", "_count")
    )
    return f"{total} / ({count} > 0)"


def share_within(metric: Metric, bound: str, *by: str) -> str:
    """Give the share of observations at or below a bucket's bound."""
    within = f"sum{_by(metric, by)}(rate({select(metric, '_bucket', le=bound)}[$__rate_interval]))"
    return f"{within} / (sum{_by(metric, by)}(rate({select(metric, '_count')}[$__rate_interval])) > 0)"


def buckets(metric: Metric) -> str:
    """Give the buckets of a histogram, for a heatmap."""
    return f"sum by (le) (rate({select(metric, '_bucket')}[$__rate_interval]))"


def ratio(part: str, whole: str) -> str:
    """Divide, where there is something to divide by."""
    return f"{part} / ({whole} > 0)"


def or_zero(expression: str) -> str:
    """Show 0 where nothing was ever counted."""
    return f"{expression} or vector(0)"


def _by(metric: Metric, labels: Sequence[str]) -> str:
    unknown = set(labels) - {*metric.labels, *TARGET_LABELS, "le"}
    if unknown:
        raise ValueError(f"{metric.name} has no label {', '.join(sorted(unknown))}")
    return f" by ({', '.join(labels)}) " if labels else ""
