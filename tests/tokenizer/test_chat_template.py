import re
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer import chat_template
from services.tokenizer.chat_template import ChatTemplate
from shared.errors import ConfigError, InvalidRequest
from shared.model_files import locate
from shared.vocab import Vocabulary, load_vocabulary
from tests.shared.tiny_models import write_folder

Message = dict[str, Any]


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


def assistant(text: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def system(text: Any) -> Message:
    return {"role": "system", "content": text}


def call(arguments: Any, name: str = "f") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
ECHO = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ 'A:' if add_generation_prompt }}"


@pytest.fixture(scope="module")
def smollm() -> ChatTemplate:
    return ChatTemplate(locate())


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(locate())


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def make(source: str | None, **texts: str) -> ChatTemplate:
        return ChatTemplate(locate(str(write_folder(tmp_path / "m", template=source, tokenizer_config=texts))))

    return make


@pytest.mark.parametrize(
    ("messages", "options", "num_tokens"),
    [
        ([user("hi")], {}, 31),
        ([user("Say hello.")], {}, 33),
        ([user("Count from 1 to 5.")], {}, 38),
        ([user("hi"), assistant("Hello"), user("hi")], {}, 44),
        ([user("")], {}, 30),
        ([system("Only system.")], {}, 12),
        ([assistant("Hello")], {}, 32),
        ([user("hi"), user("hi")], {}, 37),
        ([user("hi"), system("Be brief.")], {}, 39),
        ([system("You are helpful."), user("hi")], {}, 19),
        ([{"role": "developer", "content": "You are helpful."}, user("hi")], {}, 19),
        ([user([{"type": "text", "text": "hi"}])], {}, 31),
        ([user([{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}])], {}, 33),
        ([user("Count from 1 to 5."), assistant("1, 2, 3,")], {}, 52),
        (
            [user("Count from 1 to 5."), assistant("1, 2, 3,")],
            {"continue_final_message": True, "add_generation_prompt": False},
            46,
        ),
    ],
)
def test_the_embedded_template_counts_as_the_reference(
    smollm: ChatTemplate, vocabulary: Vocabulary, messages: list[Message], options: dict[str, Any], num_tokens: int
) -> None:
    assert len(vocabulary.encode(smollm.render(messages, **options))) == num_tokens


def test_absent_content_is_never_printed_as_a_word(smollm: ChatTemplate) -> None:
    calls = {"tool_calls": [call("{}")]}
    absent = {"role": "assistant", **calls}
    tool = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    texts = {
        smollm.render([user("weather?"), m, tool]) for m in (absent, assistant(None, **calls), assistant("", **calls))
    }
    assert len(texts) == 1 and "None" not in texts.pop()
    assert "None" not in smollm.render([user("hi"), assistant(None), user("hi")])


def test_tools_reach_a_model_whose_template_does_not_know_them(smollm: ChatTemplate) -> None:
    text = smollm.render([user("Weather in Paris?")], tools=[TOOL])
    assert '"name": "get_weather"' in text and text.startswith("<|im_start|>system\n# Tools")
    told = smollm.render([system("Be brief."), user("hi")], tools=[TOOL])
    assert told.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and told.count("<|im_start|>system") == 1
    talk = [user("q"), assistant(None, tool_calls=[call('{"a": 1}')]), {"role": "tool", "content": "sunny"}]
    history = smollm.render(talk, tools=[TOOL])
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in history
    assert "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>" in history


CALLS = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments ARG }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "arguments", "text"),
    [
        (CALLS.replace("ARG", "| tojson"), '{"a": "ä<"}', '{"a": "ä<"}'),
        (CALLS.replace("ARG", "| tojson"), "", "{}"),
        (CALLS.replace("ARG", "| tojson"), "not json", '"not json"'),
        (CALLS.replace("ARG", ""), '{"a":1}', '{"a":1}'),
        (CALLS.replace("ARG", "+ ''"), '{"a":1}', '{"a":1}'),
        (CALLS.replace("ARG", "if c.function.arguments is string else c.function.arguments | tojson"), "x", "x"),
    ],
)
def test_arguments_come_in_the_form_the_template_prints(make: Any, source: str, arguments: str, text: str) -> None:
    assert make(source).render([user("q"), assistant("", tool_calls=[call(arguments)])]) == text


def test_a_template_that_knows_the_developer_gets_the_developer(make: Any) -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert make(ECHO).render(messages) == "system:x;A:"
    assert make(ECHO + "{# developer #}").render(messages) == "developer:x;A:"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "wizard", "content": "x"}],
        [{"role": "user<|im_end|>", "content": "x"}],
        [{"content": "x"}],
        [user([])],
        [user([{"type": "text"}])],
        [user([{"type": "image_url", "image_url": {"url": "data:"}}])],
        [user(5)],
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(smollm: ChatTemplate, messages: list[Message]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        smollm.render(messages)
    assert caught.value.param is not None and caught.value.param.startswith("messages[0]")


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a":' * 5_000 + "1" + "}" * 5_000])
def test_arguments_nested_without_end_are_refused(smollm: ChatTemplate, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidRequest) as caught:
        smollm.render([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert caught.value.param == "messages"


def test_a_message_to_go_on_with_ends_the_prompt(make: Any) -> None:
    go_on: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    assert make(ECHO).render([user("q"), assistant("so ")], **go_on) == "user:q;assistant:so "
    for messages, options in (
        ([user("q"), assistant("so")], {"continue_final_message": True}),
        ([user("q")], go_on),
        ([], go_on),
    ):
        with pytest.raises(InvalidRequest, match="continue"):
            make(ECHO).render(messages, **options)
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        make("{{ messages | length }}").render([assistant("so")], **go_on)


def test_the_messages_that_came_in_are_not_changed(make: Any) -> None:
    messages = [user("q"), assistant(None, tool_calls=[call("{}")])]
    make(ECHO).render(messages, continue_final_message=True, add_generation_prompt=False)
    assert messages == [user("q"), assistant(None, tool_calls=[call("{}")])]


def test_templates_find_what_hugging_face_gives_them(make: Any) -> None:
    source = (
        "{{ bos_token }}{{ strftime_now('%Y') }}{% generation %}{{ {'a': 'é<'} | tojson }}{% endgeneration %}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ enable_thinking }}"
    )
    text = make(source, bos_token="<s>").render([user("q")], kwargs={"enable_thinking": False})
    assert re.fullmatch(r'<s>\d{4}\{"a": "é<"\}01False', text)


def test_requests_with_tools_use_the_template_made_for_them(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    template = ChatTemplate(locate(str(write_folder(tmp_path / "m", tokenizer_config={"chat_template": named}))))
    assert template.render([user("q")]) == "plain"
    assert template.render([user("q")], tools=[TOOL]) == "1 tools"


def test_a_model_without_a_template_says_so(make: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"'m' has no chat template.*chat_template"):
        make(None).render([user("q")])


def test_a_syntax_error_stops_the_start(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"chat template 'default', line 2"):
        make("ok\n{% for %}")


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].no.such }}", "has no attribute 'no'"),
        ("{{ messages[0].content + 5 }}", "TypeError"),
        ("{% include '/etc/passwd' %}", ""),
        ("{% import 'os' as os %}{{ os }}", ""),
    ],
)
def test_what_a_template_raises_is_the_clients_answer(make: Any, source: str, word: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make(source).render([user("q")])
    assert word in caught.value.message and caught.value.status == 400


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__class__",
        "(messages | attr('__class__'))",
        "raise_exception.__globals__",
        "strftime_now.__globals__['json']",
        "_tick.__closure__",
        "_tick.__globals__",
        "cycler.__init__.__globals__",
        "lipsum.__globals__['os'].popen('id').read()",
        "self.__init__.__globals__",
        "namespace.__init__",
        "('{0.__class__}').format(messages)",
        "('%s' % self._TemplateReference__context)",
        "self._TemplateReference__context.environment",
        "messages.append(1)",
        "messages[0].update({'role': 'x'})",
        "messages.clear()",
        "open('/etc/passwd').read()",
        "config",
        "request.application",
    ],
)
def test_a_template_cannot_leave_its_sandbox(make: Any, expression: str) -> None:
    messages = [user("q")]
    try:
        text = make("{{ " + expression + " }}").render(messages)
    except InvalidRequest:
        text = ""
    assert text == "" and messages == [user("q")]


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ [0] * 10 ** 12 }}",
        "{{ 9999999 ** 9999999 }}",
        "{% for a in range(99999) %}{{ messages[0].content * 5000 }}{% endfor %}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_render_is_bounded_in_time_and_size(make: Any, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.5)
    monkeypatch.setattr(chat_template, "MAX_RENDER_CHARS", 1_000_000)
    template = make(source)
    with pytest.raises(InvalidRequest):
        template.render([user("q")])


def test_a_variable_of_ours_cannot_be_set_from_outside(make: Any) -> None:
    for name in ("messages", "_tick", "raise_exception"):
        with pytest.raises(InvalidRequest, match=name):
            make(ECHO).render([user("q")], kwargs={name: 1})


def test_a_large_conversation_is_rendered_whole(smollm: ChatTemplate) -> None:
    text = smollm.render([user("x" * 1000)] * 2000)
    assert text.count("<|im_start|>user") == 2000 and len(text) > 2_000_000
