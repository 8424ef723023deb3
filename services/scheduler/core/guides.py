"""Guides: answers that must follow a grammar, from the compiling of the grammar to the mask of each draw.

Owns which requests wait for their grammar, and the rule that a matcher has seen exactly the settled tokens of its
answer. What a grammar is stays behind the two protocols; they are implemented in `services.scheduler.grammar`.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from services.scheduler.core.batch import Batch, BoolArray, IntArray, MaskArray, StepResult, mask_words
from services.scheduler.core.finish import FinishRules
from services.scheduler.core.req import Req
from services.scheduler.core.slots import SlotTable
from shared.errors import InvalidRequest, RequestError
from shared.sampling import Grammar

ALL = np.int32(-1)


class Matcher(Protocol):
    """Follows one answer through its grammar. Used by one thread at a time."""

    @property
    def complete(self) -> bool:
        """Whether the answer is whole and no token but an end token can follow."""
        ...

    def accept(self, token_id: int) -> bool:
        """Take in the next token; False if the grammar does not allow it, or has become too hard to follow."""
        ...

    def fill(self, mask: IntArray) -> bool:
        """Set a bit for each token that may follow, end tokens among them where the answer may end.

        Args:
            mask: (mask_words(vocab_size),) all zero.

        Returns:
            False if the grammar has become too hard to follow.
        """
        ...


class Compilation(Protocol):
    """A grammar on its way to a matcher."""

    def poll(self) -> Matcher | RequestError | None:
        """The matcher, why there is none, or None while that is not known yet. Never blocks."""
        ...


class Grammars(Protocol):
    """Makes matchers, beside the step and never in it."""

    def begin(self, grammar: Grammar, said_ids: Sequence[int], *, ignore_eos: bool) -> Compilation:
        """Begin to compile a grammar and to follow what was said of the answer; returns at once."""
        ...


class Guides:
    """The guided requests of a scheduler.

    Args:
        table: slots.
        vocab_size: of the engine.
        grammars: makes matchers; without it guided requests are refused.
    """

    def __init__(self, table: SlotTable, vocab_size: int, grammars: Grammars | None) -> None:
        self._table = table
        self._words = mask_words(vocab_size)
        self._grammars = grammars
        self._compiling: dict[Req, Compilation] = {}

    @property
    def compiling(self) -> Sequence[Req]:
        """Requests that wait for their grammar."""
        return list(self._compiling)

    @property
    def num_compiling(self) -> int:
        """How many those are."""
        return len(self._compiling)

    def begin(self, req: Req, grammar: Grammar) -> None:
        """Have a request's grammar compiled; it shows up in `take` when it is.

        Raises:
            InvalidRequest: this scheduler has no grammars.
        """
        if self._grammars is None:
            raise InvalidRequest("Structured output is not supported by this server.", param="response_format")
        self._compiling[req] = self._grammars.begin(grammar, req.output_ids.tolist(), ignore_eos=req.params.ignore_eos)

    def forget(self, req: Req) -> bool:
        """Stop waiting for a request's grammar; False if it does not wait."""
        return self._compiling.pop(req, None) is not None

    def take(self) -> list[tuple[Req, RequestError | None]]:
        """Take the requests whose grammar is compiled, in the order of their arrival, or why it cannot be."""
        done: list[tuple[Req, RequestError | None]] = []
        for req, compilation in list(self._compiling.items()):
            found = compilation.poll()
            if found is None:
                continue
            del self._compiling[req]
            if isinstance(found, RequestError):
                done.append((req, found))
            else:
                req.matcher = found
                done.append((req, None))
        return done

    def masks(self, batch: Batch) -> tuple[MaskArray, list[Req]]:
        """Make the masks of a launched step, once every step before it is settled.

        Returns:
            The masks, in the order of `batch.guided`, and the requests whose grammar has become too hard to follow.
            Rows of those, and of requests that have ended meanwhile, may draw anything: nobody will see it.
        """
        masks: MaskArray = np.zeros((len(batch.guided), self._words), np.int32)
        lost = []
        for place, slot in enumerate(batch.slots[batch.guided].tolist()):
            req = self._table.reqs[slot]
            if req is None:
                masks[place] = ALL
                continue
            assert req.matcher is not None, "a guided request runs without its matcher"
            if not req.matcher.fill(masks[place]):
                masks[place] = ALL
                lost.append(req)
        return masks, lost

    def follow(self, batch: Batch, result: StepResult, alive: BoolArray, rules: FinishRules) -> list[Req]:
        """Take the drawn tokens of guided rows to their matchers; those that end an answer by themselves need not go.

        Args:
            batch: the step.
            result: what it drew.
            alive: (rows,) whose request still wants its token; rows that cannot be followed are struck out.
            rules: of the model.

        Returns:
            The requests whose grammar has become too hard to follow.
        """
        lost = []
        for row in batch.guided[alive[batch.guided]].tolist():
            req, token_id = self._table.req(int(batch.slots[row])), int(result.token_ids[row])
            if rules.ends_text(req, token_id, int(batch.starts[row] + batch.lengths[row]) + 1):
                continue
            assert req.matcher is not None, "a guided request runs without its matcher"
            if req.matcher.accept(token_id):
                self._table.is_complete[req.slot] = req.matcher.complete
            else:
                alive[row] = False
                lost.append(req)
        return lost
