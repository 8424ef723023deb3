"""What a client wants continued: prompts in their four forms, and messages as chat templates expect them.

What cannot be used is refused by name. Knows no vocabulary: whether a token id is in it, the tokenizer says.
"""

from typing import Any

from services.api.schema import MAX_PROMPTS, MAX_TOKENS, ChatMessage, check_tree
from shared.errors import InvalidRequest
from shared.messages import Prompt


def read_prompts(given: Any) -> list[Prompt]:
    """Tell the four forms of `prompt` apart.

    Raises:
        InvalidRequest: it is of none of them.
    """
    if isinstance(given, str):
        return [Prompt(text=given)]
    if given is None:
        raise InvalidRequest("missing field: prompt", param="prompt", code="missing_field")
    if not isinstance(given, list):
        raise InvalidRequest.of_field(
            "prompt", "must be a string, a list of strings, a list of token ids, or a list of such lists"
        )
    if not given:
        raise InvalidRequest.of_field("prompt", "must not be empty")
    if isinstance(given[0], str | list) and len(given) > MAX_PROMPTS:
        raise InvalidRequest.of_field("prompt", f"at most {MAX_PROMPTS} prompts are allowed")
    if all(isinstance(p, str) for p in given):
        return [Prompt(text=p) for p in given]
    if isinstance(given[0], list):
        return [Prompt(token_ids=_token_ids(p)) for p in given]
    return [Prompt(token_ids=_token_ids(given))]


def _token_ids(given: Any) -> list[int]:
    if not isinstance(given, list) or not given:
        raise InvalidRequest.of_field(
            "prompt", "every list of token ids must hold at least one, and lists and text cannot be mixed"
        )
    for token in given:
        if type(token) is not int or not 0 <= token <= MAX_TOKENS:
            raise InvalidRequest.of_field("prompt", "every token id must be an integer within the vocabulary")
    return given


def read_message(message: ChatMessage, index: int, max_depth: int) -> dict[str, Any]:
    """Give a message as chat templates expect it: content is text, absent fields are absent.

    Args:
        message: of the conversation.
        index: its place there, for a refusal.
        max_depth: of its free-form parts.

    Raises:
        InvalidRequest: naming the field.
    """
    where = f"messages[{index}]"
    if message.content is None and message.role != "assistant":
        raise InvalidRequest.of_field(f"{where}.content", "must be text")
    entry: dict[str, Any] = {"role": message.role, "content": _content(message.content, where)}
    if message.name is not None:
        entry["name"] = message.name
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    thoughts = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if thoughts is not None:
        entry["reasoning_content"] = thoughts
    if message.tool_calls:
        if message.role != "assistant":
            raise InvalidRequest.of_field(f"{where}.tool_calls", "only the assistant calls tools")
        entry["tool_calls"] = [
            {"id": c.id or "", "type": c.type, "function": {"name": c.function.name, "arguments": c.function.arguments}}
            for c in message.tool_calls
        ]
    check_tree(message.annotations, f"{where}.annotations", max_depth)
    return entry


def _content(content: str | list[dict[str, Any]] | None, where: str) -> str:
    """Join the parts of a content with line breaks; text is the only kind of part this server reads."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidRequest.of_field(f"{where}.content", "must not be an empty list")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type")
        field = "refusal" if kind == "refusal" else "text"
        if kind not in ("text", "refusal"):
            reason = "only text parts are supported by this server"
            raise InvalidRequest.of_field(f"{where}.content[{i}].type", reason, "unsupported_parameter")
        if not isinstance(part.get(field), str):
            raise InvalidRequest.of_field(f"{where}.content[{i}].{field}", "must be a string")
        texts.append(part[field])
    return "\n".join(texts)
