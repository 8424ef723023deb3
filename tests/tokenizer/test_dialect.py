"""What is found out of templates and vocabularies about calls and thoughts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.dialect import find_dialect
from shared.dialect import Dialect
from shared.model_files import locate
from shared.vocab import load_vocabulary
from tests.shared.tiny_models import byte_level_tokenizer, write_folder

PLAIN = (
    "{% for m in messages %}<s>{{ m.role }} {{ m.content }}{% endfor %}{% if add_generation_prompt %}<s>A {% endif %}"
)
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
QWEN = (
    TOOLS + "{% for m in messages %}<s>{{ m.role }} {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<s>A\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ALWAYS = PLAIN.replace("<s>A ", "<s>A <think>\n")
V3 = PLAIN.replace("<s>A ", "<s>A {{ '<think>' if thinking else '</think>' }}")
MISTRAL = (
    TOOLS + "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have a length of 9') }}{% endif %}"
    "{{ c.function | tojson }} {{ c.id }}{% endfor %}{% elif m.role == 'tool' %}{{ m.tool_call_id }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
LLAMA = TOOLS + "{% for m in messages %}{{ m.content }}{% endfor %}"

Find = Callable[..., Dialect]


@pytest.fixture
def find(tmp_path: Path) -> Find:
    def find(source: str | None, *tokens: str, **options: Any) -> Dialect:
        tokenizer = byte_level_tokenizer()
        tokenizer.add_tokens([AddedToken(token, special=token.startswith("<|")) for token in tokens])
        files = locate(str(write_folder(tmp_path / "m", tokenizer=tokenizer, template=source)))
        return find_dialect(files, ChatTemplate(files), load_vocabulary(files), **options)

    return find


@pytest.mark.parametrize(
    ("source", "tokens", "tools"),
    [
        (None, (), "hermes"),
        (PLAIN, (), "hermes"),
        (QWEN, (), "hermes"),
        (QWEN.replace("<tool_call>", "<tool_call><function="), (), ""),
        (MISTRAL, (), "mistral"),
        (LLAMA, ("[TOOL_CALLS]",), "mistral"),
        (LLAMA, ("<|python_tag|>",), "llama3"),
        (LLAMA, (), ""),
    ],
)
def test_the_format_of_calls(find: Find, source: str | None, tokens: tuple[str, ...], tools: str) -> None:
    assert find(source, *tokens).tools == tools
    assert find(source, *tokens, tools="llama3").tools == "llama3"
    assert find(source, *tokens, tools="none").tools == ""


@pytest.mark.parametrize(
    ("source", "openings"),
    [
        (QWEN, ("free", "free", "never")),
        (ALWAYS, ("begun", "begun", "begun")),
        (V3, ("never", "begun", "never")),
    ],
)
def test_who_opens_thoughts(find: Find, source: str, openings: tuple[str, ...]) -> None:
    found = find(source, "</think>")
    assert found.openings == openings
    assert found.thoughts is not None
    assert (found.thoughts.open, found.thoughts.close) == ("<think>", "</think>")
    assert found.thoughts.close_id >= 0
    assert find(source, reasoning="none").thoughts is None
    without = find(source).thoughts
    assert without is not None and without.close_id == -1


def test_thoughts_that_no_template_names(find: Find) -> None:
    assert find(PLAIN).thoughts is None
    told = find(PLAIN, reasoning="magistral").thoughts
    assert told is not None and told.open == "[THINK]"


def test_calls_get_short_names_where_a_template_wants_them(tmp_path: Path) -> None:
    template = ChatTemplate(locate(str(write_folder(tmp_path / "m", template=MISTRAL))))

    def render(call_id: str) -> str:
        call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        talk = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "r", "tool_call_id": call_id},
        ]
        return template.render(talk, add_generation_prompt=False)

    text = render("call_0123456789abcdef")
    name = text[-9:]
    assert text.count(name) == 2 and name.isalnum()
    assert render("abc123def").endswith("abc123def")
    assert render("call_other") != text
