"""Tools as clients may write them, right or wrong: a job, or a refusal; nothing else comes of any of them."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.api.intake import chat_job
from services.api.schema import ChatRequest, parse
from shared.dialect import Dialect, Opening, Thoughts
from shared.errors import InvalidRequest

KEYS = ["type", "properties", "required", "additionalProperties", "$ref", "anyOf", "enum", "a", "x-guidance"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["object", "string", "a", "", "#/$defs/a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=10,
)
NAMES = st.sampled_from(["f", "g", "now", "a b", ""])
FUNCTIONS = st.fixed_dictionaries(
    {"name": NAMES},
    optional={
        "parameters": st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4) | JSON,
        "strict": st.booleans() | st.none(),
        "description": st.text(max_size=5),
    },
)
TOOLS = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTIONS}), max_size=3) | JSON
NAMED = st.fixed_dictionaries({"type": st.just("function"), "function": st.fixed_dictionaries({"name": NAMES})})
ALLOWED = st.fixed_dictionaries(
    {
        "type": st.just("allowed_tools"),
        "allowed_tools": st.fixed_dictionaries(
            {"mode": st.sampled_from(["auto", "required", "x"]), "tools": st.lists(NAMED, max_size=2)}
        ),
    }
)
CHOICES = st.sampled_from(["auto", "none", "required", "any", None]) | NAMED | ALLOWED | JSON
FORMATS = st.none() | st.just({"type": "json_object"}) | JSON
OPENINGS: list[tuple[Opening, Opening, Opening]] = [("free", "free", "never"), ("begun", "begun", "begun")]
DIALECTS = st.builds(
    Dialect,
    st.sampled_from(["", "hermes", "llama3", "mistral"]),
    st.none() | st.just(Thoughts("<think>", "</think>")),
    st.sampled_from(OPENINGS),
)
KWARGS = st.none() | st.dictionaries(st.sampled_from(["enable_thinking", "thinking", "x"]), JSON, max_size=2)
LAST = st.sampled_from([("user", "q"), ("assistant", "<think>so"), ("assistant", ""), ("assistant", None)])


@settings(max_examples=400, deadline=None)
@given(TOOLS, CHOICES, FORMATS, DIALECTS, KWARGS, LAST, st.booleans(), st.booleans() | st.none())
def test_a_job_or_a_refusal(
    tools: Any, choice: Any, form: Any, dialect: Dialect, kwargs: Any, last: Any, goes_on: bool, parallel: Any
) -> None:
    body = {
        "model": "m",
        "messages": [{"role": last[0], "content": last[1]}],
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "response_format": form,
        "chat_template_kwargs": kwargs,
        "continue_final_message": goes_on,
    }
    try:
        job = chat_job(parse(ChatRequest, json.dumps(body).encode()), 16, dialect)
    except InvalidRequest as refused:
        assert refused.param
        return
    grammar = job.params.grammar
    if grammar is not None and grammar.kind == "calls":
        assert job.outline is not None and job.outline.tools and job.outline.functions and job.tools
    if job.outline is not None and job.outline.tools:
        assert job.outline.functions and job.tools
