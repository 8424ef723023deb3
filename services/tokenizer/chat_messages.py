"""What messages look like when a chat template reads them: the differences between OpenAI's form and a model's.

Pure data in, pure data out; the messages that came in are never changed. It knows nothing of Jinja.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shared.errors import InvalidRequest

Message = dict[str, Any]

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
_SHORT_ID: Final = 9
_TOOLS_HEAD: Final = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_TAIL: Final = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


@dataclass(frozen=True, slots=True)
class Taste:
    """What a template was found to understand.

    Attributes:
        developer: the role of that name; else it is told as `system`.
        tools: tools and their calls; else they are written into the messages, in the most common form.
        argument_objects: arguments of calls as objects; else as the text they came in.
        short_ids: calls are named by nine letters and digits; else by any text.
    """

    developer: bool = False
    tools: bool = True
    argument_objects: bool = True
    short_ids: bool = False


def prepare(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], taste: Taste) -> list[Message]:
    """Write messages as a template of that taste wants them.

    Raises:
        InvalidRequest: a message has a role or a content that no template could render; names it.
    """
    prepared = [_message(message, f"messages[{i}]", taste) for i, message in enumerate(messages)]
    if taste.tools:
        return prepared
    plain = [_without_tools(message) for message in prepared]
    return _with_tools_text(plain, tools) if tools else plain


def text_of(content: Any, where: str) -> str:
    """Give a content as one text: nothing is empty, and the texts of parts are joined with line breaks.

    Raises:
        InvalidRequest: a part is no text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if all(isinstance(text, str) for text in texts):
            return "\n".join(text for text in texts if text is not None)
    raise InvalidRequest("the content of a message must be text", param=f"{where}.content")


def _message(message: Message, where: str, taste: Taste) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"a message's role must be one of {', '.join(sorted(ROLES))}", param=f"{where}.role")
    if role == "developer" and not taste.developer:
        role = "system"
    prepared = {**message, "role": role, "content": text_of(message.get("content"), where)}
    if message.get("tool_calls"):
        prepared["tool_calls"] = [_call(call, taste) for call in message["tool_calls"]]
    if taste.short_ids and "tool_call_id" in prepared:
        prepared["tool_call_id"] = _short(prepared["tool_call_id"])
    return prepared


def _call(call: Mapping[str, Any], taste: Taste) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if taste.argument_objects:
        function["arguments"] = _arguments(function.get("arguments"))
    elif not str(function.get("arguments") or "").strip():
        function["arguments"] = "{}"
    prepared = {**call, "function": function}
    return {**prepared, "id": _short(prepared.get("id", ""))} if taste.short_ids else prepared


def _short(call_id: Any) -> str:
    """Give the name of a call in nine letters and digits; one that has that form stays as it is."""
    text = str(call_id)
    if len(text) == _SHORT_ID and text.isascii() and text.isalnum():
        return text
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=_SHORT_ID).hexdigest()[:_SHORT_ID]


def _arguments(text: Any) -> Any:
    """Read arguments as an object; those that a model wrote badly stay the text they are."""
    if not isinstance(text, str):
        return text
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _without_tools(message: Message) -> Message:
    """Write calls and their results as text, for a template that would leave them out."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]] if message["content"] else []
    for call in calls:
        function = call["function"]
        body = {"name": function.get("name"), "arguments": _arguments(function.get("arguments"))}
        texts.append(f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>")
    return {"role": "assistant", "content": "\n".join(texts)}


def _with_tools_text(messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _TOOLS_HEAD + listed + _TOOLS_TAIL
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
