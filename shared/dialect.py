"""How a model writes what is not plain text: calls of tools, and thoughts in front of an answer.

A tokenizer finds a model's dialect in its chat template and says it in its heartbeat; the api makes an outline of
it for each request, which the detokenizer (what is printed) and the engine (what may be drawn) follow as well.
Names only: nothing here reads or writes a text.
"""

from typing import Final, Literal

import msgspec

ToolFormat = Literal["", "hermes", "llama3", "mistral"]
"""Empty: calls are not looked for."""
Opening = Literal["free", "begun", "never"]
"""Whether an answer may begin with thoughts, begins within them, or has none since the prompt has closed them."""

TOOL_MARKS: Final[dict[ToolFormat, tuple[str, ...]]] = {
    "": (),
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
}
"""What the formats are recognized by. Some models have single tokens for them, some of those are control tokens."""
THOUGHT_MARKS: Final[dict[str, tuple[str, str]]] = {
    "think": ("<think>", "</think>"),
    "magistral": ("[THINK]", "[/THINK]"),
}
"""What thoughts stand between, by the name of the way."""
MAX_FUNCTIONS: Final = 128


class Thoughts(msgspec.Struct, array_like=True, frozen=True):
    """Thoughts in front of an answer.

    Attributes:
        open: the mark they begin with.
        close: the mark they end with.
        close_id: the token of `close`, or -1 if it is not one token.
        begun: the prompt has opened them.
    """

    open: str
    close: str
    close_id: int = -1
    begun: bool = False


class Dialect(msgspec.Struct, array_like=True, frozen=True):
    """How a model writes, as its tokenizer found it.

    Attributes:
        tools: format of its calls.
        thoughts: how it thinks, or None.
        openings: by default, and with thinking switched on and off by the request.
    """

    tools: ToolFormat = ""
    thoughts: Thoughts | None = None
    openings: tuple[Opening, Opening, Opening] = ("free", "free", "free")

    def thoughts_for(self, switch: bool | None) -> Thoughts | None:
        """Give the thoughts to expect in an answer, by the request's switch."""
        opening = self.openings[0 if switch is None else 1 if switch else 2]
        if self.thoughts is None or opening == "never":
            return None
        return msgspec.structs.replace(self.thoughts, begun=opening == "begun")


class Outline(msgspec.Struct, array_like=True, frozen=True):
    """What is to be taken out of the text of an answer.

    Attributes:
        tools: format of its calls; empty if none are looked for.
        functions: names that may be called.
        parallel: more than one call is wanted.
        thoughts: in front of the answer, or None.
    """

    tools: ToolFormat = ""
    functions: list[str] = []
    parallel: bool = True
    thoughts: Thoughts | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that must stay in the answer even where they are control tokens."""
        thoughts = (self.thoughts.open, self.thoughts.close) if self.thoughts else ()
        return TOOL_MARKS[self.tools] + thoughts


class FunctionShape(msgspec.Struct, array_like=True, frozen=True):
    """A function that an answer must call.

    Attributes:
        name: of the function.
        schema: of its arguments, as JSON.
        strict: keywords of the schema that cannot be enforced are refused.
        field: the client's field with the schema, for a refusal.
    """

    name: str
    schema: str
    strict: bool = False
    field: str = "tools"


class CallShapes(msgspec.Struct, array_like=True, frozen=True):
    """Calls that an answer must, or may, consist of; a grammar of the kind `calls` holds it as JSON.

    Attributes:
        tools: format to write them in.
        functions: each call is of one of them.
        parallel: more than one call may be made.
        free: any text may stand in front of the calls, or in their place.
    """

    tools: ToolFormat
    functions: list[FunctionShape]
    parallel: bool = True
    free: bool = False
