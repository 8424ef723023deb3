"""What can be seen of one request in all services: its spans at a collector, and its id in every log."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.collector import Collector
from tests.e2e.stack import Stack
from tests.waiting import eventually

TRACE, PARENT = "5bd66ef5095369c7b0d1f8f4bd33716a", "53995c3f42cd8ad8"
SECRET = "a sentence that must stay between two people"
STAGES = {
    ("millrace-api", "chat"),
    ("millrace-tokenizer", "queue"),
    ("millrace-tokenizer", "tokenize"),
    ("millrace-scheduler", "queue"),
    ("millrace-scheduler", "prefill"),
    ("millrace-scheduler", "decode"),
    ("millrace-detokenizer", "detokenize"),
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector().start()
    yield collector
    collector.stop()


@pytest.fixture(scope="module")
def traced(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that tells everything it can: all its spans, and all its log lines."""
    flags = ("--engine", "fake", "--fake-step-ms", "5", "--log-level", "debug", "--log-format", "json")
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    stack = Stack(tmp_path_factory.mktemp("traced"), *flags, env=env)
    try:
        yield stack
    finally:
        stack.close()


def ask(stack: Stack, headers: dict[str, str], **body: Any) -> None:
    asked = stack.chat_body(SECRET, max_tokens=5, **body)
    assert stack.client.post("/v1/chat/completions", json=asked, headers=headers).status_code == 200


def test_the_stages_of_all_services_are_one_trace(traced: Stack, collector: Collector) -> None:
    ask(traced, {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "traced-1"})
    eventually(lambda: {(s.service, s.name) for s in collector.of(TRACE)} >= STAGES, "all stages are told")
    spans = collector.of(TRACE)
    assert len(spans) == len(STAGES)
    [whole] = [s for s in spans if s.service == "millrace-api"]
    assert whole.parent == PARENT
    assert {s.parent for s in spans if s is not whole} == {whole.id}
    assert {s.attributes["millrace.request_id"] for s in spans} == {"traced-1"}
    assert whole.attributes["gen_ai.usage.output_tokens"] == 5
    assert whole.attributes["millrace.finish"] == "length"
    order = [s.name for s in spans if s.name in ("tokenize", "prefill", "decode")]
    assert order == ["tokenize", "prefill", "decode"]
    assert all(s.start_ns <= s.end_ns for s in spans)


def test_choices_have_stages_of_their_own(traced: Stack, collector: Collector) -> None:
    trace = "a" * 32
    ask(traced, {"traceparent": f"00-{trace}-{PARENT}-01"}, n=2)

    def count(name: str) -> int:
        return sum(span.name == name for span in collector.of(trace))

    eventually(lambda: count("detokenize") >= 2 and count("chat") >= 1, "both choices and the request are told")
    assert (count("detokenize"), count("chat")) == (2, 1)


def test_a_request_without_a_trace_begins_one_and_one_not_sampled_has_none(traced: Stack, collector: Collector) -> None:
    unwanted = "b" * 32
    ask(traced, {"traceparent": f"00-{unwanted}-{PARENT}-00"})
    ask(traced, {"X-Request-Id": "untraced-1"})

    def own() -> list[str]:
        return [s.trace for s in collector.spans if s.attributes.get("millrace.request_id") == "untraced-1"]

    eventually(lambda: len(own()) == len(STAGES), "it has a trace of its own")
    assert len(set(own())) == 1
    assert not collector.of(unwanted)


def test_no_text_of_a_request_is_in_its_trace_or_in_a_log(traced: Stack, collector: Collector) -> None:
    ask(traced, {"traceparent": f"00-{'c' * 32}-{PARENT}-01"})
    eventually(lambda: collector.of("c" * 32), "it is told")
    assert not [raw for raw in collector.raw if SECRET.encode() in raw or b"sentence" in raw]
    assert "sentence" not in traced.log.read_text()


def test_every_service_names_the_request_in_its_log(traced: Stack) -> None:
    ask(traced, {"X-Request-Id": "logged-1"})

    def speakers() -> set[str]:
        lines = [json.loads(line) for line in traced.log.read_text().splitlines() if '"logged-1"' in line]
        return {line["service"].partition("-")[0] for line in lines if line["request_id"] == "logged-1"}

    eventually(lambda: speakers() == {"api", "tokenizer", "scheduler", "detokenizer"}, "all have spoken of it")


def test_a_collector_that_is_not_there_harms_nobody(tmp_path_factory: pytest.TempPathFactory) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, and nobody listens
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        flags = ("--engine", "fake", "--fake-step-ms", "1", "--otlp-endpoint", url)
        stack = Stack(tmp_path_factory.mktemp("nobody"), *flags, env={"OTEL_BSP_SCHEDULE_DELAY": "100"})
        try:
            for _ in range(20):
                stack.chat(max_tokens=3)
            eventually(lambda: "traces cannot be delivered" in stack.log.read_text(), "it is told")
            assert stack.log.read_text().count("traces cannot be delivered") <= 4, "once per service"
            assert stack.stop() == 0
        finally:
            stack.close()
