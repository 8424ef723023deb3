"""Renders messages with the model's own chat template. The template is foreign code and runs in a sandbox.

Owns the environment templates expect (that of Hugging Face) and the bounds of a render. What messages look like
when they reach a template is services/tokenizer/chat_messages.py's business.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.tokenizer.chat_messages import Message, Taste, prepare
from services.tokenizer.control_texts import ControlTexts
from shared.errors import ConfigError, InvalidRequest
from shared.model_files import ModelFiles

MAX_RENDER_S: Final = 10.0
MAX_RENDER_CHARS: Final = 64_000_000
_MAX_POWER: Final = 64
_RESERVED: Final = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", "_tick"})
_CUT: Final = "\uf8ff\uf8fecut\uf8fe\uf8ff"
"""Private-use characters that mark where a message to be continued ends."""


class _GenerationBlocks(Extension):
    """Templates made for training mark the assistant's text with {% generation %}; here that is only its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """No attribute of Python's own, no change of what is passed in, no text or number out of all proportion."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if operator == "*" and isinstance(one, str | list | tuple) and isinstance(other, int):
                if len(one) * other > MAX_RENDER_CHARS:
                    raise SecurityError("a product in the template is too large")
            elif operator == "**" and isinstance(one, int | float) and abs(one) > _MAX_POWER:
                raise SecurityError("a power in the template is too large")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own escapes for HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> _Sandbox:
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, LoopControlExtension])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _compile(env: _Sandbox, source: str) -> Template:
    """Compile, with a look at the clock in every round of a loop and every call of a macro."""
    tree = env.parse(source)
    bodies: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
    for node in bodies:
        call = nodes.Call(nodes.Name("_tick", "load"), [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        node.body[0].set_environment(env)
    return env.from_string(tree)


class ChatTemplate:
    """The templates of one model, compiled once. Rendering keeps no state, so threads may share it."""

    def __init__(self, files: ModelFiles) -> None:
        """Compile every template of the model and find out what it understands.

        Raises:
            ConfigError: a template has a syntax error; names the template and the line.
        """
        env = _environment()
        self._model = files.served_name
        self._texts = dict(files.special_texts)
        self._templates: dict[str, Template] = {}
        for name, source in files.chat_templates.items():
            try:
                self._templates[name] = _compile(env, source)
            except TemplateSyntaxError as e:
                raise ConfigError(f"{files.path}: chat template {name!r}, line {e.lineno}: {e.message}") from e
        self._tastes = {name: self._taste(name, source) for name, source in files.chat_templates.items()}

    @property
    def shows_tools(self) -> bool:
        """Whether the template itself writes the tools that it is given."""
        return any(taste.tools for taste in self._tastes.values())

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        controls: ControlTexts | None = None,
    ) -> str:
        """Write a conversation as the model's prompt.

        Args:
            messages: OpenAI's, with text content.
            tools: OpenAI's, for templates that list them.
            add_generation_prompt: end with the opening of an assistant's turn.
            continue_final_message: end inside the last message, which the model is to go on with.
            kwargs: further variables for the template (`enable_thinking` and the like).
            controls: cut where the client spells them; the text that comes back has these cuts.

        Raises:
            InvalidRequest: the model has no template, or the template refuses these messages; says why.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(
                f"model {self._model!r} has no chat template (chat_template in tokenizer_config.json, or "
                "chat_template.jinja); use /v1/completions",
                code="chat_template_missing",
            )
        if clash := sorted(_RESERVED.intersection(kwargs or ())):
            raise InvalidRequest(f"chat_template_kwargs may not set {clash[0]!r}", param="chat_template_kwargs")
        taste = self._tastes[name]
        try:
            prepared = prepare(messages, tools or (), taste)
            if controls is not None:
                prepared = controls.cut_messages(prepared)
                tools, kwargs = controls.cut(tools), controls.cut(kwargs)
        except RecursionError as e:
            raise InvalidRequest("the arguments of a tool call are nested too deeply", param="messages") from e
        if continue_final_message:
            _mark_end(prepared, add_generation_prompt)
        try:
            text = self._run(name, prepared, tools if taste.tools else None, add_generation_prompt, kwargs or {})
        except Exception as e:  # a template is foreign code: whatever it raises is about these messages
            reason = str(e) if isinstance(e, TemplateError) else f"{type(e).__name__}: {e}"
            raise InvalidRequest(f"the model's chat template refuses the messages: {reason}", param="messages") from e
        return _cut(text) if continue_final_message else text

    def _run(
        self,
        name: str,
        messages: list[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        variables = {
            **self._texts,
            **kwargs,
            "messages": messages,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
            "_tick": _deadline(MAX_RENDER_S),
        }
        pieces: list[str] = []
        size = 0
        for piece in self._templates[name].generate(variables):
            size += len(piece)
            if size > MAX_RENDER_CHARS:
                raise SecurityError(f"it writes more than {MAX_RENDER_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _taste(self, name: str, source: str) -> Taste:
        tools = "tools" in source or "tool_calls" in source
        return Taste(
            developer="developer" in source,
            tools=tools,
            argument_objects=tools and self._wants_objects(name),
            short_ids=tools and self._wants_short_ids(name),
        )

    def _wants_objects(self, name: str) -> bool:
        """Try a call with its arguments as an object: some templates print text, others write JSON themselves."""
        text = self._try_call(name, "call00000", {"key": "value"})
        return text is not None and "{'key'" not in text

    def _wants_short_ids(self, name: str) -> bool:
        """Try calls with ids of several lengths: some templates take only such as their model was trained on."""
        tried = [
            self._try_call(name, call_id, arguments)
            for call_id in ("call_0123456789", "call00000")
            for arguments in ({"key": "value"}, '{"key": "value"}')
        ]
        return tried[:2] == [None, None] and tried[2:] != [None, None]

    def _try_call(self, name: str, call_id: str, arguments: Any) -> str | None:
        """Render a conversation with a call; None where the template refuses it, which is an answer too."""
        call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
        talk: list[Message] = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            return self._run(name, talk, None, False, {})
        except Exception:
            return None


def _deadline(seconds: float) -> Callable[[], str]:
    end = time.monotonic() + seconds

    def tick() -> str:
        if time.monotonic() > end:
            raise SecurityError(f"it takes longer than {seconds:g} s")
        return ""

    return tick


def _mark_end(messages: list[Message], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    if not messages or messages[-1]["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant", param="continue_final_message"
        )
    messages[-1]["content"] += _CUT


def _cut(text: str) -> str:
    head, mark, _ = text.rpartition(_CUT)
    if not mark:
        raise InvalidRequest(
            "the model's chat template does not print the last message, so it cannot be continued",
            param="continue_final_message",
        )
    return head
