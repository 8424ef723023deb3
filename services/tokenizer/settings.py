"""The settings of a tokenizer. Each field is the environment variable `MILLRACE_<FIELD>`."""

from typing import Literal

from pydantic import Field

from shared.settings import ModelSettings

ToolParser = Literal["auto", "none", "hermes", "llama3", "mistral"]
ReasoningParser = Literal["auto", "none", "think", "magistral"]


class TokenizerSettings(ModelSettings):
    """What one tokenizer is told at its start.

    Attributes:
        tokenizer_batch: requests taken from the queue at once.
        tokenizer_threads: threads that encode very long prompts, beside the one for all others.
        tool_call_parser: format of the model's tool calls: hermes, llama3, mistral, none to leave them text; auto
            takes it from the chat template.
        reasoning_parser: marks of the model's thoughts: think (<think>), magistral ([THINK]), none to leave them
            text; auto takes them from the chat template.
        control_tokens_in_messages: a control token that a message spells out becomes the token, so that whoever
            writes the message can begin turns in it; otherwise it stays text.
    """

    health_port: int = Field(default=9101, ge=0, le=65535)
    tokenizer_batch: int = Field(default=32, ge=1, le=256)
    tokenizer_threads: int = Field(default=2, ge=1, le=64)
    tool_call_parser: ToolParser = "auto"
    reasoning_parser: ReasoningParser = "auto"
    control_tokens_in_messages: bool = False
