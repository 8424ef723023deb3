"""Finds out how a model writes calls of tools and thoughts, from its chat template and its vocabulary.

Settings come first. What a template does with thoughts is tried out on a short conversation: some open them
themselves, some close them when the request switches thinking off, most leave both to the model.
"""

from typing import Any, Final

from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.settings import ReasoningParser, ToolParser
from shared.dialect import THOUGHT_MARKS, Dialect, Opening, Thoughts, ToolFormat
from shared.errors import InvalidRequest
from shared.model_files import ModelFiles
from shared.vocab import Vocabulary

_SWITCHES: Final[tuple[dict[str, Any], ...]] = tuple(
    {} if on is None else {"enable_thinking": on, "thinking": on} for on in (None, True, False)
)


def find_dialect(
    files: ModelFiles,
    template: ChatTemplate,
    vocabulary: Vocabulary,
    *,
    tools: ToolParser = "auto",
    reasoning: ReasoningParser = "auto",
) -> Dialect:
    """Find a model's dialect.

    Args:
        files: of the model.
        template: of the model.
        vocabulary: of the model.
        tools: format of calls, `none`, or `auto` for what the template shows.
        reasoning: marks of thoughts, `none`, or `auto` for those that the template names.
    """
    source = "\n".join(files.chat_templates.values())
    marks = _marks(source, reasoning)
    thoughts = None if marks is None else Thoughts(*marks, close_id=_token(vocabulary, marks[1]))
    openings: tuple[Opening, Opening, Opening] = ("free", "free", "free")
    if marks is not None:
        default, on, off = (_opening(template, kwargs, *marks) for kwargs in _SWITCHES)
        openings = (default, on, off)
    return Dialect(_tools(source, template, vocabulary, tools), thoughts, openings)


def _tools(source: str, template: ChatTemplate, vocabulary: Vocabulary, wanted: ToolParser) -> ToolFormat:
    if wanted != "auto":
        return "" if wanted == "none" else wanted
    if "<function=" in source:  # calls as tags, which no reader of ours knows
        return ""
    if "<tool_call>" in source or not template.shows_tools:
        return "hermes"  # also what is written into the messages for a template that leaves tools out
    if "[TOOL_CALLS]" in source or _token(vocabulary, "[TOOL_CALLS]") >= 0:
        return "mistral"
    return "llama3" if _token(vocabulary, "<|python_tag|>") >= 0 else ""


def _marks(source: str, wanted: ReasoningParser) -> tuple[str, str] | None:
    if wanted != "auto":
        return THOUGHT_MARKS.get(wanted)
    return next((marks for marks in THOUGHT_MARKS.values() if marks[0] in source or marks[1] in source), None)


def _token(vocabulary: Vocabulary, text: str) -> int:
    """Give the one token of a text, or -1."""
    ids = vocabulary.encode(text, add_special=False)
    return ids[0] if len(ids) == 1 else -1


def _opening(template: ChatTemplate, kwargs: dict[str, Any], opens: str, closes: str) -> Opening:
    """Look at what a template puts in front of an answer."""
    talk = [{"role": "user", "content": "q"}]
    try:
        prompt = template.render(talk, kwargs=kwargs)
        asked = template.render(talk, add_generation_prompt=False, kwargs=kwargs)
    except InvalidRequest:
        return "free"
    opening = prompt[len(asked) :] if prompt.startswith(asked) else prompt
    if opens not in opening and closes not in opening:
        return "free"
    return "begun" if opening.rfind(opens) > opening.rfind(closes) else "never"
