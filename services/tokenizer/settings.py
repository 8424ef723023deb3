"""The settings of a tokenizer. Each field is the environment variable `MILLRACE_<FIELD>`."""

from pydantic import Field

from shared.settings import ModelSettings


class TokenizerSettings(ModelSettings):
    """What one tokenizer is told at its start.

    Attributes:
        tokenizer_batch: requests taken from the queue at once.
        tokenizer_threads: threads that encode very long prompts, beside the one for all others.
    """

    health_port: int = Field(default=9101, ge=0, le=65535)
    tokenizer_batch: int = Field(default=32, ge=1, le=256)
    tokenizer_threads: int = Field(default=2, ge=1, le=64)
