"""The description of the api: it is right, its page loads nothing from outside, and what it describes never breaks.

Bodies are made from the description by schemathesis, and by hypothesis without regard to it: none gets a 5xx, none
hangs, and right after each an ordinary request is answered. The same bodies every time.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from services.api.answer_schema import ChatCompletion, ErrorAnswer, ModelList, PlainAnswer, Readiness, TextCompletion
from services.api.schema import ChatRequest, CompletionRequest, GenerateRequest
from shared.messages import Delta, LogprobEntry, TokenizeRequest
from tests.api.conftest import RunningApi, StartApi
from tests.api.engine_side import MODEL, Answer, EngineSide

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
BODIES = {
    CHAT: ChatRequest,
    "/v1/completions": CompletionRequest,
    "/generate": GenerateRequest,
}
LIMIT_S = 20.0
MOST = 100
"""Examples per route: enough to meet every field, few enough for every run of the tests."""
steady = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=MOST,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def target(api: RunningApi, engine: EngineSide) -> RunningApi:
    """A replica whose engine says two words whatever is asked, and whose tokenizer tells ids and texts."""
    engine.script = lambda request: Answer([" a", " b"], "stop")
    engine.tell = tell
    return api


def tell(request: TokenizeRequest) -> Delta | None:
    if request.purpose == "tokenize":
        return Delta(0, [], "", finish="stop", prompt_tokens=1, prompt=[LogprobEntry(7, 0.0, b"a")])
    return Delta(0, [], "a", finish="stop") if request.purpose == "detokenize" else None


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """One client for all: making one takes longer than a request."""
    with httpx.Client(timeout=LIMIT_S) as client:
        yield client


def canary(client: httpx.Client, target: RunningApi) -> None:
    """An ordinary request is answered at once."""
    answer = client.post(target.url + CHAT, json=HI)
    assert answer.status_code == 200, answer.text


def send(client: httpx.Client, target: RunningApi, path: str, content: bytes) -> httpx.Response:
    return client.post(target.url + path, content=content, headers={"content-type": "application/json"})


def check(client: httpx.Client, target: RunningApi, path: str, content: bytes) -> None:
    answer = send(client, target, path, content)
    assert answer.status_code < 500, (answer.status_code, answer.text, content[:2000])
    if answer.status_code != 200:
        msgspec.json.decode(answer.content, type=ErrorAnswer)
    canary(client, target)


def test_the_description_is_complete(target: RunningApi) -> None:
    page = target.get("/openapi.json").json()
    for path in (*BODIES, "/tokenize", "/detokenize"):
        operation = page["paths"][path]["post"]
        assert operation["requestBody"]["content"]["application/json"]["schema"]
        assert {"200", "4XX", "5XX"} <= set(operation["responses"])
    text = json.dumps(page)
    assert "422" not in text and "HTTPValidationError" not in text
    named = set(re.findall(r"#/components/schemas/(\w+)", text))
    assert named <= set(page["components"]["schemas"])
    assert set(page["paths"]) >= {"/v1/models", "/v1/models/{name}", "/readyz", "/metrics", "/version"}


def test_the_description_names_the_key(start_api: StartApi) -> None:
    api = start_api(api_keys="k")
    page = api.get("/openapi.json", headers={"Authorization": "Bearer k"}).json()
    assert page["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert page["paths"][CHAT]["post"]["security"] == [{"bearer": []}]
    for path in ("/readyz", "/livez", "/metrics"):
        assert page["paths"][path]["get"]["security"] == []


def test_its_page_loads_nothing_from_outside(target: RunningApi) -> None:
    page = target.get("/docs")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    parts = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(parts) == 3
    for part in parts:
        assert "//" not in part
        found = target.get(f"/{part}")
        assert found.status_code == 200 and len(found.content) > 50
    assert target.get("/docs/..%2f..%2fapp.py").status_code == 404


def test_answers_are_as_described(target: RunningApi) -> None:
    prompt = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
    for path, body, kind in (
        (CHAT, {**HI, "logprobs": True, "top_logprobs": 1}, ChatCompletion),
        (CHAT, {**HI, "n": 2}, ChatCompletion),
        ("/v1/completions", {**prompt, "logprobs": 1}, TextCompletion),
        ("/generate", {"prompt": "hi", "stream": False}, PlainAnswer),
    ):
        answer = target.post(path, body)
        msgspec.json.decode(answer.content, type=kind)
    msgspec.json.decode(target.get("/v1/models").content, type=ModelList)
    msgspec.json.decode(target.get("/readyz").content, type=Readiness)
    for answer in (target.get("/v1/nope"), target.get(CHAT), target.post(CHAT, {}), target.post(CHAT, [])):
        msgspec.json.decode(answer.content, type=ErrorAnswer)


@pytest.mark.parametrize("path", [*BODIES, "/tokenize", "/detokenize"])
def test_bodies_made_from_the_description(target: RunningApi, client: httpx.Client, path: str) -> None:
    schema = schemathesis.openapi.from_dict(target.get("/openapi.json").json())
    checks = [
        schemathesis.checks.not_a_server_error,
        schemathesis.checks.CHECKS.get_one("response_schema_conformance"),
        schemathesis.checks.CHECKS.get_one("status_code_conformance"),
    ]
    cases = schema[path]["POST"].as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)

    with requests.Session() as session:

        @settings(steady, max_examples=30)
        @given(case=cases)
        def run(case: Any) -> None:
            if isinstance(case.body, dict) and case.body.get("model") is not None:
                case.body["model"] = MODEL
            case.call_and_validate(base_url=target.url, checks=checks, session=session, timeout=LIMIT_S)
            canary(client, target)

        run()


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
TREES = st.recursive(
    SCALARS,
    lambda kids: st.lists(kids, max_size=3) | st.dictionaries(st.text(max_size=4), kids, max_size=3),
    max_leaves=6,
)
EDGES = st.sampled_from(
    [
        0,
        -1,
        1,
        2**31,
        2**63,
        2**64,
        -(2**63) - 1,
        1e308,
        -0.0,
        "",
        "\x00",
        "\ud800",
        "a" * 5000,
        [],
        {},
        [[]],
        [{}],
        None,
    ]
)


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """An ordinary body with some of its fields replaced by anything at all."""
    fields = [field.name for field in msgspec.structs.fields(BODIES[path])]
    changes = st.dictionaries(st.sampled_from(fields) | st.text(max_size=6), EDGES | TREES, max_size=4)
    good = HI if path == CHAT else {"model": MODEL, "prompt": "hi", "max_tokens": 1}
    return changes.map(lambda change: {**good, **change})


@pytest.mark.parametrize("path", list(BODIES))
def test_bodies_with_anything_in_their_fields(target: RunningApi, client: httpx.Client, path: str) -> None:
    @steady
    @given(body=bodies(path))
    def run(body: dict[str, Any]) -> None:
        check(client, target, path, json.dumps(body).encode("utf-8", "surrogatepass"))

    run()


@pytest.mark.parametrize("path", list(BODIES))
def test_bodies_that_are_cut_or_damaged(target: RunningApi, client: httpx.Client, path: str) -> None:
    whole = json.dumps(HI if path == CHAT else {"model": MODEL, "prompt": "hi", "max_tokens": 1}).encode()

    @settings(steady, max_examples=30)
    @given(at=st.integers(0, len(whole)), junk=st.binary(max_size=6))
    def run(at: int, junk: bytes) -> None:
        check(client, target, path, whole[:at] + junk + whole[at + len(junk) :])
        check(client, target, path, whole[:at])

    run()


def nested(depth: int, opening: str, inner: str, closing: str) -> str:
    return opening * depth + inner + closing * depth


@pytest.mark.parametrize("depth", [65, 1_000, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize(
    "field", ["chat_template_kwargs", "tools", "messages", "metadata", "x", "stop", "response_format"]
)
def test_what_is_nested_too_deeply_is_refused(
    target: RunningApi, client: httpx.Client, field: str, opening: str, closing: str, depth: int
) -> None:
    value = nested(depth, opening, "1", closing)
    rest = json.dumps({k: v for k, v in HI.items() if k != field})[1:-1]
    answer = send(client, target, CHAT, f'{{"{field}":{value},{rest}}}'.encode())
    assert answer.status_code == 400, answer.text
    canary(client, target)


@pytest.mark.parametrize(
    ("field", "count"),
    [("messages", 5_000), ("tools", 200), ("stop", 5), ("stop_token_ids", 1_000), ("logit_bias", 5_000)],
)
def test_lists_are_bounded(target: RunningApi, field: str, count: int) -> None:
    entries: dict[str, Any] = {
        "messages": HI["messages"] * count,
        "tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)],
        "stop": ["x"] * count,
        "stop_token_ids": list(range(count)),
        "logit_bias": {str(i): 1 for i in range(count)},
    }
    answer = target.post(CHAT, {**HI, field: entries[field]})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(field)
