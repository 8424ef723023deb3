"""What a detokenizer knows of one reply: where its log ends, and how its text goes on.

It is made from the log alone, always by `rebuild`, and can be thrown away at any time. Knows the vocabulary
and the log's entries; sends nothing.
"""

import time
from collections.abc import Sequence

from services.detokenizer.incremental import Incremental, TokenTexts
from services.detokenizer.pieces import Piece
from services.detokenizer.stop_strings import StopMatcher, stop_strings
from shared.broker.append import Item, Terminal
from shared.broker.log_id import LogId, make_end_id, make_log_id, split_log_id
from shared.broker.replies import EndEntry, FenceEntry, LogEntry, OpenEntry, TokensEntry, life_ms
from shared.errors import WireError
from shared.messages import Delta, FenceHeader, FinishReason, LogprobEntry, ReplyHeader, encode
from shared.vocab import Vocabulary


class Texts:
    """What the ids of one vocabulary print, with and without control tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        control = (vocabulary.token_bytes(i) or b"" for i in vocabulary.special_ids)
        self._control_marks = frozenset(text.decode("utf-8", "replace") for text in control)
        self.without_special = TokenTexts(vocabulary, skip_special=True)
        self.with_special = TokenTexts(vocabulary, skip_special=False)
        self._with_marks: dict[frozenset[str], TokenTexts] = {}

    def of(self, header: ReplyHeader) -> TokenTexts:
        """Give what ids print in one reply: nothing for control tokens, unless they are wanted, or are its marks."""
        if not header.skip_special:
            return self.with_special
        marks = self._control_marks.intersection(header.outline.marks) if header.outline else None
        if not marks:
            return self.without_special
        if marks not in self._with_marks:
            self._with_marks[marks] = TokenTexts(self.vocabulary, skip_special=True, marks=marks)
        return self._with_marks[marks]

    def with_bytes(self, entry: LogprobEntry) -> LogprobEntry:
        """Add the bytes of the tokens to a log probability, which comes from the engine without."""
        look = self.vocabulary.token_bytes
        top = [(token_id, logprob, look(token_id) or b"") for token_id, logprob, _ in entry.top]
        return LogprobEntry(entry.token_id, entry.logprob, look(entry.token_id) or b"", top)


class Reply:
    """One reply, as its log has it, ready to be continued.

    Attributes:
        last: last id of the log.
        attempt: who speaks.
        said: tokens in the log.
        chain: of the flush whose answer was `last`; 0 when that was only read.
        touched_s: when it was last continued, on the monotonic clock.
        began_ns: wall clock when this instance took it up.
        header: head of the log.
    """

    __slots__ = (
        "_fence", "_stops", "_text", "_texts", "attempt", "began_ns", "chain", "header", "last", "said", "touched_s"
    )  # fmt: skip

    def __init__(self, last: LogId, header: ReplyHeader, fence: FenceHeader, texts: Texts) -> None:
        self.last = last
        self.chain = 0
        self.attempt, self.said = split_log_id(last)
        self.touched_s = time.monotonic()
        self.header = header
        self.began_ns = time.time_ns()
        self._fence = fence
        self._texts = texts
        self._text = Incremental(texts.of(header), strip_start=_begins_a_text(fence, texts.vocabulary))
        self._stops: StopMatcher | None = None
        if header.stop:
            self._stops = StopMatcher(stop_strings(tuple(header.stop), header.include_stop))

    def replay(self, token_ids: Sequence[int], text: str) -> None:
        """Bring the text to where the log is: these tokens were said, and `text` of them."""
        whole = self._text.push_all(token_ids)
        if self._stops is not None:
            self._stops.feed(whole)
            self._stops.correct(whole[len(text) :])

    def continues(self, piece: Piece) -> bool:
        """Whether a piece goes on where the log is, or lies behind that: no other attempt, and no gap."""
        return piece.attempt == self.attempt and piece.first <= self.said + 1

    def say(self, uid: str, piece: Piece) -> Item | None:
        """Make the log's next entry from a piece; None when the log has all of it.

        The state is then ahead of the log: if the entry is refused, it must be thrown away.
        """
        skip = self.said + 1 - piece.first
        ids = piece.ids[skip:] if skip else piece.ids
        if not ids and piece.finish is None:
            return None
        # The token that ends a reply (an end token, a stop token id) is counted, but is no part of the text.
        is_silent = piece.finish == "stop" and not piece.complete and not self.header.include_stop
        text, used, finish = self._speak(ids, piece.finish, is_silent=is_silent)
        logprobs: list[LogprobEntry] = []
        if piece.logprobs:
            logprobs = [self._texts.with_bytes(entry) for entry in piece.logprobs[skip : skip + used]]
        prompt_tokens, cached_tokens = piece.start or (0, 0)
        delta = Delta(
            self.said + 1,
            ids if used == len(ids) else ids[:used],
            text,
            logprobs,
            finish,
            None,
            prompt_tokens,
            cached_tokens,
            piece.stamp_ns,
            [self._texts.with_bytes(entry) for entry in piece.prompt] if piece.prompt and not self.said else [],
        )
        self.said += used
        prev = self.last
        if finish is None:
            self.last = make_log_id(self.attempt, self.said)
            return Item(uid, prev, self.last, encode(delta), self.header.replica, None, self.chain)
        self.last = make_end_id(self.said)
        terminal = Terminal(self._fence.engine, self._fence.entry.encode(), life_ms(self.header))
        return Item(uid, prev, self.last, encode(delta), self.header.replica, terminal)

    def _speak(
        self, ids: Sequence[int], finish: FinishReason | None, *, is_silent: bool
    ) -> tuple[str, int, FinishReason | None]:
        """Give the text that can be said, how many of the tokens belong to the reply, and how it ends."""
        spoken = ids[:-1] if is_silent else ids
        if self._stops is None:
            text = self._text.push_all(spoken)
            return (text if finish is None else text + self._text.flush()), len(ids), finish
        said: list[str] = []
        for i, token_id in enumerate(spoken):
            text, matched = self._stops.feed(self._text.push(token_id))
            said.append(text)
            if matched:
                return "".join(said), i + 1, "stop"
        if finish is not None:
            text, matched = self._stops.feed(self._text.flush())
            said.append(text)
            if matched:
                finish = "stop"
            else:
                said.append(self._stops.release())
        return "".join(said), len(ids), finish


def rebuild(entries: Sequence[LogEntry], texts: Texts) -> Reply | None:
    """Make the state of a reply from its log; None if nothing can follow: no log, no speaker yet, or an end.

    Raises:
        WireError: the log does not begin as one, or its tokens do not add up to its last id.
    """
    if not entries or isinstance(entries[-1], EndEntry):
        return None
    first = entries[0]
    if not isinstance(first, OpenEntry):
        raise WireError("a reply log does not begin with its header")
    fence: FenceHeader | None = None
    token_ids: list[int] = list(first.said.token_ids) if first.said else []
    said: list[str] = [first.said.text] if first.said else []
    for entry in entries:
        if isinstance(entry, TokensEntry):
            token_ids += entry.delta.token_ids
            said.append(entry.delta.text)
        elif isinstance(entry, FenceEntry):
            fence = entry.header
    if fence is None:
        return None
    reply = Reply(entries[-1].log_id, first.header, fence, texts)
    if len(token_ids) != reply.said:
        raise WireError("the tokens of a reply log do not add up to its last id")
    if token_ids:
        reply.replay(token_ids, "".join(said))
    return reply


def _begins_a_text(fence: FenceHeader, vocabulary: Vocabulary) -> bool:
    """Whether nothing that can be read stands in front of the reply."""
    return (
        vocabulary.strips_leading_space
        and fence.prompt_tokens <= len(fence.prompt_tail)
        and all(map(vocabulary.is_special, fence.prompt_tail))
    )
