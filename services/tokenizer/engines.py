"""Which engine gets a request, and how long a request may be: both read from the engines' heartbeats."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shared.messages import Heartbeat


@dataclass(slots=True)
class _Sent:
    """What this tokenizer has given an engine since the heartbeat of count `beat`."""

    beat: int
    requests: int = 0
    tokens: int = 0
    gone: bool = False


class Engines:
    """The living engines of one model. Between two heartbeats it adds what it has sent itself.

    Args:
        model: served name.
        living: gives the engines known to be alive, by incarnation.
        model_seq_len: context length to go by while no engine says another.
    """

    def __init__(self, model: str, living: Callable[[], Mapping[str, Heartbeat]], model_seq_len: int) -> None:
        self._model = model
        self._living = living
        self._model_seq_len = model_seq_len
        self._sent: dict[str, _Sent] = {}

    @property
    def max_seq_len(self) -> int:
        """Tokens of prompt and answer together that every living engine can hold."""
        limits = [_limit(beat) for beat in self._ours().values() if beat.max_seq_len > 0]
        return min(limits, default=self._model_seq_len)

    def choose(self, key: str, num_tokens: int) -> str | None:
        """Pick the least loaded engine and count the request as sent; None while there is none.

        Args:
            key: decides between equals, so that several tokenizers do not all take the same one.
            num_tokens: of the request's prompts.
        """
        ours = self._ours()
        self._forget_old(ours)
        ready = {
            engine: beat
            for engine, beat in ours.items()
            if not beat.draining and not (engine in self._sent and self._sent[engine].gone)
        }
        if not ready:
            return None
        engine = min(ready, key=lambda e: (self._load(e, ready[e]), zlib.crc32(f"{key}{e}".encode())))
        sent = self._sent.setdefault(engine, _Sent(ready[engine].beat))
        sent.requests += 1
        sent.tokens += num_tokens
        return engine

    def gone(self, engine: str) -> None:
        """Take in that an engine is not registered any more: it is not chosen until it beats again."""
        beat = self._living().get(engine)
        self._sent[engine] = _Sent(beat.beat if beat else -1, gone=True)

    def _ours(self) -> dict[str, Heartbeat]:
        return {engine: beat for engine, beat in self._living().items() if beat.model == self._model}

    def _forget_old(self, ours: Mapping[str, Heartbeat]) -> None:
        """A new heartbeat counts what was sent before it."""
        for engine in list(self._sent):
            if engine not in ours or ours[engine].beat != self._sent[engine].beat:
                del self._sent[engine]

    def _load(self, engine: str, beat: Heartbeat) -> float:
        """Give the share of slots plus the share of cache that is in use or asked for."""
        sent = self._sent.get(engine, _Sent(beat.beat))
        requests = beat.num_running + beat.num_waiting + sent.requests
        capacity = beat.num_pages * beat.page_size
        cache = 0.0
        if capacity:
            live = (beat.num_pages - beat.free_pages) * beat.page_size
            cache = (live + beat.queued_tokens + sent.tokens) / capacity
        return requests / max(1, beat.max_running) + cache


def _limit(beat: Heartbeat) -> int:
    """A request must fit the context and, alone, the cache."""
    capacity = beat.num_pages * beat.page_size
    return min(beat.max_seq_len, capacity) if capacity else beat.max_seq_len
