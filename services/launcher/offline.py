"""The offline side of the step loop: a Link without a broker, and the text of answers.

Owns the requests of one `LLM.generate` call while they run. What tokens print, and where a stop string ends an
answer, is the detokenizer's own code, so that offline and served text are the same. Knows nothing of engines.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.detokenizer.pieces import Piece
from services.detokenizer.state import Reply, Texts
from services.scheduler.core.batch import RowLogprobs
from services.scheduler.core.link import Arrival, Load, PromptEcho, StepOutput
from services.scheduler.inbox import PROMPT_TAIL
from shared.broker.log_id import make_log_id
from shared.messages import Delta, ErrorBody, FenceHeader, FinishReason, GenerateRequest, ReplyHeader, decode

ATTEMPT: Final = 1
"""Offline nobody takes over, so every request is tried once."""


@dataclass(slots=True)
class Answer:
    """One answer while it grows.

    Attributes:
        request: what was asked.
        header: its stop strings, and what of it is printed.
        token_ids: of the answer; the end token is one of them.
        text: printed so far; without stop strings it comes whole at the end.
        finish: how it ended, or None.
        error: why it failed, or None.
        cached_tokens: of the prompt, found in the prefix cache.
        logprobs: one per token, if they were asked for.
        prompt: its tokens with scores, if they were asked for.
    """

    request: GenerateRequest
    header: ReplyHeader
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    error: ErrorBody | None = None
    cached_tokens: int = 0
    logprobs: list[RowLogprobs] = field(default_factory=list)
    prompt: PromptEcho | None = None
    reply: Reply | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing follows."""
        return self.finish is not None or self.error is not None


class OfflineLink:
    """See `services.scheduler.core.link.Link`. All of it runs on the thread that calls `StepLoop.turn`.

    Args:
        texts: what ids print.
    """

    paused = False

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._on_tokens: Callable[[int, int], None] = lambda tokens, ended: None
        self._answers: dict[str, Answer] = {}
        self._arrivals: list[Arrival] = []
        self._endings: list[tuple[str, int]] = []

    @property
    def num_running(self) -> int:
        """Answers that have not ended."""
        return len(self._answers)

    def watch(self, on_tokens: Callable[[int, int], None]) -> None:
        """Have this called with the tokens of each step and the answers that ended with it."""
        self._on_tokens = on_tokens

    def add(self, answers: Sequence[Answer]) -> None:
        """Let answers begin, in this order."""
        for answer in answers:
            self._answers[answer.request.uid] = answer
            self._arrivals.append(Arrival(answer.request, ATTEMPT))

    def drop_all(self) -> None:
        """End whatever runs without a word."""
        self._arrivals.clear()
        self._endings += [(uid, ATTEMPT) for uid in self._answers]
        self._answers.clear()

    def arrivals(self) -> list[Arrival]:
        """Give what was added."""
        taken, self._arrivals = self._arrivals, []
        return taken

    def endings(self) -> list[tuple[str, int]]:
        """Give answers that a stop string has ended."""
        taken, self._endings = self._endings, []
        return taken

    def await_look(self) -> float:
        """Nobody ends an answer but the loop's own thread."""
        return 0.0

    def planned(self) -> None:
        """Nothing depends on it."""

    def publish(self, output: StepOutput) -> None:
        """Add the tokens of a step to their answers. An answer that has ended hears no more."""
        ended = 0
        for place, (uid, token_id) in enumerate(zip(output.uids, output.tokens, strict=True)):
            answer = self._answers.get(uid)
            if answer is None:
                continue
            if place in output.starts:
                answer.cached_tokens = output.starts[place][1]
            if place in output.logprobs:
                answer.logprobs.append(output.logprobs[place])
            answer.prompt = output.prompts.get(place, answer.prompt)
            finish = output.finishes.get(place)
            ids = [token_id] if token_id >= 0 else []
            if answer.header.stop:
                self._say(answer, len(answer.token_ids) + 1, ids, finish, place in output.complete)
            answer.token_ids += ids
            if not answer.header.stop and finish is not None:
                self._say(answer, 1, answer.token_ids, finish, place in output.complete)
            if answer.has_ended:
                ended += 1
                del self._answers[uid]
                if finish is None:
                    self._endings.append((uid, ATTEMPT))
        self._on_tokens(len(output.tokens), ended)

    def fail(self, uid: str, attempt: int, error: ErrorBody) -> None:
        """End an answer with an error."""
        answer = self._answers.pop(uid, None)
        if answer is not None:
            answer.error = error
            self._on_tokens(0, 1)

    def report(self, load: Load) -> None:
        """Nobody asks."""

    def idle(self, timeout_s: float) -> None:
        """Wait for a grammar: nothing else comes from outside."""
        time.sleep(min(timeout_s, 0.002))

    def _say(self, answer: Answer, first: int, ids: Sequence[int], finish: FinishReason | None, complete: bool) -> None:
        if answer.reply is None:
            prompt = answer.request.prompt_ids
            fence = FenceHeader("", "", len(prompt), prompt[-PROMPT_TAIL:])
            answer.reply = Reply(make_log_id(ATTEMPT, 0), answer.header, fence, self._texts)
        piece = Piece(ATTEMPT, first, list(ids), 0)
        piece.finish, piece.complete = finish, complete
        item = answer.reply.say(answer.request.uid, piece)
        if item is None:
            return
        delta = decode(Delta, item.blob)
        answer.text += delta.text
        answer.finish = delta.finish
