"""The tokens of engine steps, sorted by reply: what came in several steps for one uid becomes one piece.

Owns the check of a step's shape; knows nothing of text or logs.
"""

from collections.abc import Iterable

from shared.errors import WireError
from shared.messages import FinishReason, LogprobEntry, StepChunk


class Piece:
    """Tokens of one reply that follow each other.

    Attributes:
        attempt: who says them.
        first: index of the first; of the next one when there are none.
        ids: the tokens.
        finish: how the reply ends with them, or None.
        start: (prompt tokens, cached prompt tokens), with the first piece of an attempt.
        logprobs: one entry per token, or empty.
        prompt: one entry per token of the prompt, with the first piece of a reply that asked for it.
        complete: the last token is part of the text although the reply stops with it.
        stamp_ns: wall clock when the last of them was known.
    """

    __slots__ = ("attempt", "complete", "finish", "first", "ids", "logprobs", "prompt", "stamp_ns", "start")

    def __init__(self, attempt: int, first: int, ids: list[int], stamp_ns: int) -> None:
        self.attempt = attempt
        self.first = first
        self.ids = ids
        self.stamp_ns = stamp_ns
        self.finish: FinishReason | None = None
        self.start: tuple[int, int] | None = None
        self.logprobs: list[LogprobEntry] = []
        self.prompt: list[LogprobEntry] = []
        self.complete = False

    def joins(self, attempt: int, first: int) -> bool:
        """Whether tokens that begin there go on where this piece ends."""
        return self.attempt == attempt and self.finish is None and self.first + len(self.ids) == first


def check_shape(chunk: StepChunk) -> None:
    """Make sure that a chunk's arrays fit together.

    Raises:
        WireError: they do not.
    """
    places = len(chunk.uids)
    tokens = sum(chunk.counts) if chunk.counts else places
    if not (
        len(chunk.attempts) == len(chunk.firsts) == places
        and len(chunk.tokens) == tokens
        and (not chunk.counts or (len(chunk.counts) == places and min(chunk.counts) >= 0))
        and all(place in range(places) for place in (*chunk.finishes, *chunk.starts, *chunk.logprobs, *chunk.prompts))
    ):
        raise WireError("the arrays of a step do not fit together")


def sort_by_reply(chunks: Iterable[StepChunk]) -> dict[str, list[Piece]]:
    """Sort the tokens of steps, in their order, by uid. All but a change of attempt or a gap makes one piece."""
    queues: dict[str, list[Piece]] = {}
    for chunk in chunks:
        counts, tokens, stamp_ns = chunk.counts, chunk.tokens, chunk.stamp_ns
        has_extras = bool(chunk.finishes or chunk.starts or chunk.logprobs or chunk.prompts)
        at = 0
        for place, (uid, attempt, first) in enumerate(zip(chunk.uids, chunk.attempts, chunk.firsts, strict=True)):
            if counts:
                ids = tokens[at : at + counts[place]]
                at += counts[place]
            else:
                token_id = tokens[place]
                ids = [token_id] if token_id >= 0 else []
            queue = queues.get(uid)
            if queue is None:
                piece = Piece(attempt, first, ids, stamp_ns)
                queues[uid] = [piece]
            elif queue[-1].joins(attempt, first):
                piece = queue[-1]
                piece.ids += ids
                piece.stamp_ns = stamp_ns
            else:
                piece = Piece(attempt, first, ids, stamp_ns)
                queue.append(piece)
            if has_extras:
                _add_extras(piece, chunk, place)
    return queues


def _add_extras(piece: Piece, chunk: StepChunk, place: int) -> None:
    """Take over what few places of a chunk have."""
    piece.finish = chunk.finishes.get(place)
    start = chunk.starts.get(place)
    if start is not None:
        piece.start = start
    piece.complete = place in chunk.complete
    prompt = chunk.prompts.get(place)
    if prompt:
        piece.prompt = prompt
    logprobs = chunk.logprobs.get(place)
    if logprobs:
        piece.logprobs += logprobs
