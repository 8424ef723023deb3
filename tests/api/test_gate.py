"""Keys, request ids, CORS, metrics: what every request passes."""

import re
import socket
from typing import Any

import httpx
import pytest

from services.api.auth import KeyRing
from shared.errors import ConfigError, NotAuthorized
from tests.api.conftest import RunningApi, StartApi
from tests.api.engine_side import MODEL, EngineSide
from tests.redis_keys import command
from tests.waiting import eventually

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
KEY = {"Authorization": "Bearer secret-key"}


def test_keys_are_compared_whole() -> None:
    ring = KeyRing(["secret-key", "team=other"])
    assert ring.tenant(b"Bearer secret-key").name == "key1"
    assert ring.tenant(b"bearer other ").name == "team"
    for wrong in (None, b"", b"Bearer", b"Bearer ", b"Basic other", b"Bearer otherx", b"Bearer k\xc3\xa9y", b"other"):
        with pytest.raises(NotAuthorized):
            ring.tenant(wrong)
    for entry in ("name=", "cGFkZGVk=="):
        with pytest.raises(ConfigError):
            KeyRing([entry])


def test_all_but_probes_want_a_key(start_api: StartApi, engine: EngineSide, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nteam=from-file\n")
    api = start_api(api_keys="secret-key", api_keys_file=keys)
    api.wait_ready()
    for path in (CHAT, "/v1/completions", "/generate", "/v1/nope", "//v1/chat/completions", "/health/../v1/models"):
        answer = api.post(path, HI)
        assert answer.status_code == 401, path
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/docs", "/openapi.json", "/version"):
        assert api.get(path).status_code == 401, path
        assert api.get(path, headers=KEY).status_code == 200, path
    for path in ("/", "/livez", "/startupz", "/readyz", "/health", "/metrics"):
        assert api.get(path).status_code == 200, path
    assert api.post(CHAT, HI, headers=KEY).status_code == 200
    assert api.post(CHAT, HI, headers={"Authorization": "Bearer from-file"}).status_code == 200
    assert engine.queued[-1].tenant == "team"
    assert "secret-key" not in api.get("/metrics").text


@pytest.mark.parametrize("path", ["/", "/livez", "/startupz", "/readyz", "/health"])
def test_probes_answer_head(api: RunningApi, path: str) -> None:
    answer = httpx.head(api.url + path)
    assert answer.status_code == 200
    assert not answer.content


def test_metrics_may_have_a_key_of_their_own(start_api: StartApi) -> None:
    api = start_api(metrics_key="numbers")
    assert api.get("/metrics").status_code == 401
    assert api.get("/metrics", headers={"Authorization": "Bearer numbers"}).status_code == 200


def test_request_ids_come_back(api: RunningApi, engine: EngineSide) -> None:
    answer = api.post(CHAT, HI, headers={"X-Request-Id": "my-id.1", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    assert answer.headers["x-request-id"] == "my-id.1"
    assert engine.queued[-1].request_id == "my-id.1"
    assert engine.queued[-1].traceparent.startswith("00-aaaa")
    assert api.post(CHAT, HI, headers={"traceparent": "nonsense"}).headers["x-request-id"].startswith("req-")
    assert engine.queued[-1].traceparent == ""
    for bad in ("a b", "*", "x" * 129, "a\tb", "\xe9"):
        answer = api.post(CHAT, HI, headers={"X-Request-Id": bad.encode("latin-1")})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "X-Request-Id"
    first, second = (api.post(CHAT, HI, headers={"X-Request-Id": "same"}).json()["id"] for _ in (1, 2))
    assert first != second


def test_browsers_may_call_only_if_allowed(start_api: StartApi, engine: EngineSide) -> None:
    preflight = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
    preflight["Access-Control-Request-Headers"] = "authorization,content-type,x-stainless-os"
    closed = start_api()
    assert httpx.options(closed.url + CHAT, headers=preflight).status_code == 405
    api = start_api(cors_origins="http://a.example", api_keys="k")
    answer = httpx.options(api.url + CHAT, headers=preflight)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "http://a.example"
    assert "POST" in answer.headers["access-control-allow-methods"]
    refused = api.post(CHAT, HI, headers={"Origin": "http://a.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://a.example"
    assert "access-control-allow-origin" not in api.post(CHAT, HI, headers={"Origin": "http://b.example"}).headers


def test_labels_do_not_come_from_clients(api: RunningApi) -> None:
    def series() -> int:
        return len(api.get("/metrics").text.splitlines())

    api.post(CHAT, HI)
    api.get("/v1/nope")
    api.get("/v1/models/nope")
    api.post(CHAT, {**HI, "model": "x"})
    httpx.request("FOO", api.url + "/v1/models")
    before = series()
    for i in range(20):
        api.get(f"/v1/nope{i}")
        api.get(f"/v1/models/nope{i}", headers={"X-Request-Id": f"id-{i}"})
        api.post(CHAT, {**HI, "model": f"m{i}", "user": f"u{i}"})
        httpx.request("PUT", api.url + f"/v1/models{i}")
    assert series() - before < 10


def value(text: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} ([0-9.e+]+)$", text, re.MULTILINE)
    return float(found.group(1)) if found else 0.0


def test_the_books_balance(start_api: StartApi, engine: EngineSide) -> None:
    api = start_api()
    api.wait_ready()
    api.post(CHAT, {**HI, "n": 2, "max_tokens": 5})
    engine.hold()
    api.post(CHAT, {**HI, "timeout": 0.1})
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(api.url + CHAT, json=HI, timeout=0.3)
    eventually(lambda: api.service.admission.num_choices == 0, "all is over")
    engine.release()
    text = api.get("/metrics").text
    for reason, count in (("length", 2), ("deadline", 1), ("aborted", 1)):
        assert value(text, f'millrace_requests_finished_total{{reason="{reason}"}}') == count
    assert value(text, "millrace_requests_in_flight") == 0
    assert value(text, "millrace_api_generation_tokens_total") == 10
    assert value(text, f'millrace_time_to_first_token_seconds_count{{model="{MODEL}"}}') == 1
    assert value(text, 'millrace_http_requests_total{route="/v1/chat/completions",status="499"}') == 1


def test_a_client_that_leaves_within_its_body_is_no_fault_of_ours(api: RunningApi) -> None:
    def booked(status: int) -> float:
        line = f'millrace_http_requests_total{{route="/v1/chat/completions",status="{status}"}}'
        return value(api.get("/metrics").text, line)

    left, failed = booked(499), booked(500)
    with socket.create_connection(("127.0.0.1", api.port)) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
    eventually(lambda: booked(499) + booked(500) == left + failed + 1, "it is in the books")
    assert booked(500) == failed


def test_rubbish_in_the_inbox_and_the_log_harms_nobody(api: RunningApi, engine: EngineSide) -> None:
    inbox = engine.broker.keys.inbox(api.service.incarnation)
    for words in ((b"\xff\xfe", b"\x00"), (b"m", b"\x05"), (b"m", b"\x91\x94\xa1u\xc1"), (b"m", b""), (b"", b"")):
        engine.broker.run(command("XADD", inbox, "*", *words))
    engine.broker.run(command("XADD", inbox, "*", b"m", b"\x91" * 100_000))
    assert api.post(CHAT, HI).status_code == 200
    engine.broker.run(command("XADD", inbox, "*", b"m", b"\x90"))
    assert api.post(CHAT, {**HI, "max_tokens": 50}).elapsed.total_seconds() < api.settings.repair_after


def test_the_documentation_names_the_bodies(api: RunningApi) -> None:
    described = api.get("/openapi.json").json()
    reference = described["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert reference.rsplit("/", 1)[1] in described["components"]["schemas"]
