"""Settings of the detokenizer."""

from pydantic import Field

from shared.settings import ModelSettings


class DetokenizerSettings(ModelSettings):
    """What a detokenizer can be told, beside what all services share.

    Attributes:
        read_steps: engine steps read at once per token stream; together they are one flush.
        max_replies: replies whose text is kept in memory; beyond it the longest silent are read again from their
            logs when they go on.
        idle_reply: seconds of silence after which a reply's text is no longer kept.
    """

    health_port: int = Field(default=9103, ge=0, le=65535)
    read_steps: int = Field(default=64, ge=1, le=1000)
    max_replies: int = Field(default=20_000, ge=1)
    idle_reply: float = Field(default=20.0, ge=1.0)
