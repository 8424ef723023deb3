"""Spans of a request's stages, sent to an OpenTelemetry collector if there is one; nothing at all otherwise.

Owns the one exporter of a process, set up like logging. A span belongs to the trace whose W3C `traceparent` the
request carries, so the stages of all services join into one trace. What is recorded waits in a bounded queue for a
thread that sends it: a collector that is slow, or away, costs spans and nothing else. No prompt and no output text
ever becomes part of a span; callers see to that.
"""

import logging
import re
import threading
from typing import Any, Final, NamedTuple

from shared.errors import ConfigError
from shared.settings import ServiceSettings
from shared.version import VERSION

log = logging.getLogger(__name__)

Attribute = str | int | float | bool

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_PATH: Final = "/v1/traces"
_EXPORT_TIMEOUT_S: Final = 5.0
_QUEUE: Final = 8192
_STOP_S: Final = 2.0


class _Recorder(NamedTuple):
    tracer: Any
    provider: Any


_recorder: _Recorder | None = None


class Span:
    """A stage that is still under way.

    Attributes:
        traceparent: what the stages below it carry.
    """

    def __init__(self, span: Any) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def end(self, **attributes: Attribute) -> None:
        """Record the stage as over; attributes as for `record`."""
        self._span.set_attributes(_named(attributes))
        self._span.end()


def setup_tracing(role: str, settings: ServiceSettings) -> None:
    """Begin to send spans, if the settings name a collector. Called once, before the service starts.

    Raises:
        ConfigError: the packages that send spans are not installed.
    """
    global _recorder
    if not settings.otlp_endpoint:
        return
    try:
        _recorder = _connect(role, settings)
    except ImportError as e:
        raise ConfigError(
            "MILLRACE_OTLP_ENDPOINT: sending traces needs the OpenTelemetry packages (pip install -e '.[otel]')"
        ) from e
    log.info("traces are sent to %s", _url(settings.otlp_endpoint))


def stop_tracing() -> None:
    """Send what is left, for at most two seconds."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        last = threading.Thread(target=recorder.provider.shutdown, daemon=True)
        last.start()
        last.join(_STOP_S)


def start(name: str, traceparent: str, **attributes: Attribute) -> Span | None:
    """Begin the stage that the outside sees, as a part of its trace, or of a new one; None while nothing is sent."""
    if _recorder is None:
        return None
    from opentelemetry.trace import SpanKind

    parent = _parent(traceparent)
    return Span(_recorder.tracer.start_span(name, parent, SpanKind.SERVER, attributes=_named(attributes)))


def record(name: str, traceparent: str, start_ns: int, end_ns: int, **attributes: Attribute) -> None:
    """Record a stage that is over.

    Args:
        name: of the stage.
        traceparent: of the request; without one nothing is recorded.
        start_ns: wall clock.
        end_ns: wall clock.
        attributes: numbers and short names, never text of a request. `a__b` is called `a.b`; a name without such
            a mark is ours and gets `millrace.` in front.
    """
    if _recorder is None or not traceparent:
        return
    span = _recorder.tracer.start_span(
        name, _parent(traceparent), attributes=_named(attributes), start_time=min(start_ns, end_ns)
    )
    span.end(end_ns)


def _named(attributes: dict[str, Attribute]) -> dict[str, Attribute]:
    return {
        name.replace("__", ".") if "__" in name else f"millrace.{name}": value for name, value in attributes.items()
    }


def _parent(traceparent: str) -> Any:
    """Make the context of a remote parent; None where there is none that can be read."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return None
    context = SpanContext(int(match[2], 16), int(match[3], 16), True, TraceFlags(int(match[4], 16)))
    return set_span_in_context(NonRecordingSpan(context))


def _connect(role: str, settings: ServiceSettings) -> _Recorder:
    """Load the packages, which nobody else needs to have, and start the thread that sends."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would tell of every single failure
    url = _url(settings.otlp_endpoint)
    resource = Resource.create(
        {
            "service.name": f"millrace-{role}",
            "service.namespace": settings.redis_prefix,
            "service.instance.id": settings.name or role,
            "service.version": VERSION,
        }
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = _told_once(OTLPSpanExporter(endpoint=url, timeout=_EXPORT_TIMEOUT_S), url)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=_QUEUE))
    return _Recorder(provider.get_tracer("millrace", VERSION), provider)


def _told_once(exporter: Any, url: str) -> Any:
    """Have a collector that cannot be reached told to the log once, and again when it is back."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    export, lost = exporter.export, False

    def tell(spans: Any) -> Any:
        nonlocal lost
        result = export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed != lost:
            lost = failed
            log.warning("traces cannot be delivered to %s, they are dropped" if lost else "traces reach %s again", url)
        return result

    exporter.export = tell
    return exporter


def _url(endpoint: str) -> str:
    base = endpoint.rstrip("/")
    return base if base.endswith(_PATH) else base + _PATH
