"""What clients may write: every refusal is a 400 that names the field, and the service goes on."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.api.intake import chat_job, completion_job
from services.api.job import mix_seed
from services.api.schema import ChatRequest, CompletionRequest, parse
from shared.dialect import Dialect
from shared.errors import InvalidRequest, Unavailable
from tests.api.conftest import RunningApi
from tests.api.engine_side import MODEL, EngineSide

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
DIALECT = Dialect("hermes")


def tool(parameters: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TOOL = tool({"type": "object"})

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 9}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 10**40}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1.5": 1}}, "logit_bias"),
    ({"logit_bias": {"1" * 30: 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"x_unknown": 1}, "x_unknown"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "bogus"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
        "response_format.json_schema.schema",
    ),
    ({"regex": ""}, "regex"),
    ({"ebnf": "x" * 200_000}, "ebnf"),
    ({"json_schema": "{"}, "json_schema"),
    ({"json_schema": "[]"}, "json_schema"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "nope"}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [TOOL], "tool_choice": {"type": "bogus"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": allowed("g")}, "tool_choice.allowed_tools.tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": "required", "regex": "a"}, "regex"),
    ({"tools": "x"}, "tools"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"tools": [tool({"type": "string"})]}, "tools[0].function.parameters.type"),
    ({"tools": [TOOL, tool({"a": [[[2**64]]]})]}, "tools[1].function.parameters"),
    ({"tools": [tool({"title": "x" * 200_000})], "tool_choice": "required"}, "tools"),
    ({"tools": [tool({"title": "x" * 200_000})], "response_format": {"type": "json_object"}}, "tools"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"verbosity": "low"}, "verbosity"),
    ({"metadata": {"a": 1}}, "metadata[...]"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b/c"}}]}, "tools[0].function.name"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"timeout": 0}, "timeout"),
    ({"model": ""}, "model"),
    ({"model": 7}, "model"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"chat_template_kwargs": {"a": [[[2**64]]]}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]

RAW_REFUSED = [
    "",
    "{",
    "[]",
    "null",
    "5",
    "{'a':1}",
    '{"temperature":NaN}',
    '{"temperature":1e999}',
    '{"model":"m","messages":[],"seed":1' + "0" * 5000 + "}",
    '{"tools":' + "[" * 200_000,
    '{"model":"m","messages":[],"metadata":' + '{"a":' * 5000 + "1" + "}" * 5001,
    '{"model":"\\ud800","messages":[]}',
]


@pytest.mark.parametrize(("change", "param"), REFUSED, ids=[f"{p}-{i}" for i, (_, p) in enumerate(REFUSED)])
def test_a_refusal_names_the_field(change: dict[str, Any], param: str) -> None:
    body = json.dumps({**HI, **change}).encode()
    with pytest.raises(InvalidRequest) as refused:
        chat_job(parse(ChatRequest, body), 64, DIALECT)
    assert refused.value.param == param
    assert param.split("[")[0].split(".")[0] in refused.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"audio": {}}, "audio: not supported"),
        ({"guided_json": {}}, "unknown field: guided_json; use structured_outputs or response_format"),
    ],
)
def test_what_is_known_from_elsewhere_is_refused_in_words(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(ChatRequest, json.dumps({**HI, **change}).encode())
    assert refused.value.message == message


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(ChatRequest, b'{"model":"m"}')
    assert refused.value.param == "messages"


@pytest.mark.parametrize("raw", RAW_REFUSED)
def test_what_is_no_json_is_refused(raw: str) -> None:
    with pytest.raises(InvalidRequest):
        chat_job(parse(ChatRequest, raw.encode()), 64)


def test_null_means_not_given() -> None:
    fields = set(ChatRequest.__struct_fields__) - {"model", "messages"}
    job = chat_job(parse(ChatRequest, json.dumps({**dict.fromkeys(fields), **HI}).encode()), 64)
    assert job.params.temperature == 1.0
    fields = set(CompletionRequest.__struct_fields__) - {"model", "prompt"}
    body = {**dict.fromkeys(fields), "model": MODEL, "prompt": "x"}
    assert completion_job(parse(CompletionRequest, json.dumps(body).encode()), 64).params.max_tokens == 16


def test_extras_of_common_clients_are_accepted() -> None:
    extras = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "verbosity": "medium"}
    more = {"safety_identifier": "s", "prompt_cache_key": "k", "parallel_tool_calls": True, "tools": []}
    assert chat_job(parse(ChatRequest, json.dumps({**HI, **extras, **more}).encode()), 64).tools is None


def test_tools_are_shown_unless_none_is_chosen() -> None:
    for choice, shown in ((None, True), ("auto", True), ("none", False)):
        body = {**HI, "tools": [TOOL], "tool_choice": choice}
        job = chat_job(parse(ChatRequest, json.dumps(body).encode()), 64, DIALECT)
        assert (job.tools == [TOOL]) is shown


def test_tools_wait_for_a_tokenizer_that_tells_how_they_are_called() -> None:
    body = parse(ChatRequest, json.dumps({**HI, "tools": [TOOL]}).encode())
    with pytest.raises(Unavailable):
        chat_job(body, 64, None)
    body.tool_choice = "none"
    assert chat_job(body, 64, None).outline is None


def test_contents_become_text() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ]
    job = chat_job(parse(ChatRequest, json.dumps({**HI, "messages": messages}).encode()), 64)
    found = job.prompts[0].messages or []
    assert [m["content"] for m in found] == ["a\nb", "", ""]
    assert found[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": ""}


@pytest.mark.parametrize(
    "prompt", [[], [[]], [[], [5]], [-1], [2**31], [2**64], [5, "x"], [1.5], [[5], "x"], [True], {"a": 1}, None, 7]
)
def test_prompts_that_are_none(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        completion_job(parse(CompletionRequest, json.dumps({"model": "m", "prompt": prompt}).encode()), 64)
    assert refused.value.param == "prompt"


def test_fields_of_completions_that_are_not_served() -> None:
    for change, param in (
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
    ):
        body = {"model": "m", "prompt": "x", **change}
        with pytest.raises(InvalidRequest) as refused:
            completion_job(parse(CompletionRequest, json.dumps(body).encode()), 64)
        assert refused.value.param == param


def test_seeds_of_choices_are_apart_and_in_range() -> None:
    for seed in (0, -1, 2**63 - 1, -(2**63)):
        mixed = [mix_seed(seed, choice) for choice in range(128)]
        assert mixed[0] == seed
        assert len(set(mixed)) == 128
        assert all(-(2**63) <= s < 2**63 for s in mixed)


def test_errors_over_http_have_the_shape_of_openai(api: RunningApi) -> None:
    for answer, status in (
        (api.post(CHAT, {**HI, "temperature": 9}), 400),
        (api.post(CHAT, {**HI, "timeout": 1e9}), 400),
        (api.post(CHAT, {**HI, "model": "no-such-model"}), 404),
        (api.get("/v1/nope"), 404),
        (api.get(CHAT), 405),
        (api.post(CHAT + "/", HI), 404),
        (api.get("/v1/models/no%2Fsuch"), 404),
        (httpx.post(api.url + CHAT, content=b"a=b", headers={"content-type": "text/plain"}), 415),
        (httpx.post(api.url + CHAT, content=b"x", headers={"content-encoding": "gzip"}), 415),
        (httpx.post(api.url + CHAT, json=HI, headers={"x-request-timeout": "soon"}), 400),
        (httpx.post(api.url + CHAT, json=HI, headers={"x-millrace-resume": "1"}), 400),
        (httpx.post(api.url + CHAT, json=HI, headers={"x-request-id": "a b"}), 400),
    ):
        assert answer.status_code == status, answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-request-id"]
    assert api.get(f"/v1/models/{MODEL.replace('/', '%2F')}").json()["id"] == MODEL


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/nope", "no such path: `/v1/nope`"),
        ("/chat/completions", "no such path: `/chat/completions`; did you mean `/v1/chat/completions`?"),
        ("/v1/v1/models", "no such path: `/v1/v1/models`; did you mean `/v1/models`?"),
        (CHAT + "/", f"no such path: `{CHAT}/`; did you mean `{CHAT}`?"),
        ("/v1/models/nope", f"the model `nope` does not exist; there is: {MODEL}"),
    ],
)
def test_what_does_not_exist_is_named_with_what_does(api: RunningApi, path: str, message: str) -> None:
    answer = api.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "nonsense"})
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6)


def test_no_body_breaks_the_service(api: RunningApi, engine: EngineSide) -> None:
    with httpx.Client(timeout=20) as client:

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(path=st.sampled_from([CHAT, "/v1/completions", "/generate"]), change=BODIES, bare=st.booleans())
        def attack(path: str, change: dict[str, Any], bare: bool) -> None:
            base = {} if bare else {"model": MODEL, "max_tokens": 1}
            if not bare:
                base |= {"messages": HI["messages"]} if path == CHAT else {"prompt": "x"}
            answer = client.post(api.url + path, content=json.dumps({**base, **change}))
            assert answer.status_code in (200, 400, 404), answer.text
            canary = client.post(api.url + CHAT, json=HI)
            assert canary.json()["choices"][0]["message"]["content"] == " w1"

        attack()
    assert not engine.failure
