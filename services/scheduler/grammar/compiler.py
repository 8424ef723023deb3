"""Compiles grammars beside the step: on threads of its own, within bounds of time and size, each only once.

Owns the llguidance tokenizer, the threads and the cache of compiled grammars. Knows nothing of requests.
"""

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.scheduler.core.batch import mask_words
from services.scheduler.core.guides import Compilation, Matcher
from services.scheduler.grammar.calls import schemas_of
from services.scheduler.grammar.matcher import GrammarMatcher
from services.scheduler.grammar.tokens import make_tokenizer
from services.scheduler.grammar.translate import refusal, translate
from shared.errors import RequestError, ServerFault
from shared.sampling import MAX_GRAMMAR_BYTES, Grammar
from shared.vocab import Vocabulary

log = logging.getLogger(__name__)

MAX_COMPILE_S: Final = 5.0
"""A grammar that takes longer is refused; the bounds below end the work itself."""
MAX_CACHED: Final = 256
_LIMITS: Final = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
)
"""What a grammar may cost: in all, and per token. Behind them lie some hundred milliseconds, and a few."""
_STACK_BYTES: Final = 256 << 20
"""Of a thread that compiles. Rules that name each other in a chain are followed by recursion, and a stack that ends
kills the process: the longest chain that MAX_GRAMMAR_BYTES can hold takes some 40 MB. Only what is used is memory."""


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """What the compiler must know of the model.

    Attributes:
        load: gives the vocabulary; called once, on a thread of the compiler.
        vocab_size: of the engine.
        eos_ids: end tokens of the engine.
    """

    load: Callable[[], Vocabulary]
    vocab_size: int
    eos_ids: Sequence[int]


class GrammarCompiler:
    """The Grammars of a scheduler. `begin` belongs to the step loop; `close` may come from any thread.

    Args:
        source: the vocabulary, which is loaded beside the start of the service.
        threads: grammars compiled at once; a hostile one occupies one of them for a while.
    """

    def __init__(self, source: GrammarVocabulary, *, threads: int = 2) -> None:
        self._source = source
        self._pool = _deep_threads(threads)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._control_ids: dict[str, int] = {}
        self._tokenizer: Future[LLTokenizer] = self._pool.submit(self._load)

    def begin(self, grammar: Grammar, said_ids: Sequence[int], *, ignore_eos: bool) -> Compilation:
        """Begin to compile a grammar and to follow what was said of the answer; returns at once."""
        work = self._pool.submit(self._make, grammar, list(said_ids), ignore_eos)
        return _Pending(grammar, work, self._tokenizer)

    def close(self) -> None:
        """Begin nothing any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> LLTokenizer:
        source = self._source
        vocabulary = source.load()
        self._control_ids = {
            (vocabulary.token_bytes(i) or b"").decode("utf-8", "replace"): i
            for i in vocabulary.special_ids
            if i < source.vocab_size
        }
        eos_ids = [i for i in source.eos_ids if i < source.vocab_size] or list(vocabulary.eos_ids)
        return make_tokenizer(vocabulary, source.vocab_size, sorted(eos_ids))

    def _make(self, grammar: Grammar, said_ids: list[int], ignore_eos: bool) -> Matcher:
        tokenizer = self._tokenizer.result()
        state = self._compile(grammar, tokenizer)
        if state.try_consume_tokens(said_ids) != len(said_ids):
            raise ServerFault("what was said of the answer does not follow its grammar", code="grammar_mismatch")
        state.compute_bitmask()  # here, as the lexer is built with the first mask, which may take as long as the rest
        if state.is_error():
            raise refusal(grammar, state.get_error())
        words = mask_words(self._source.vocab_size)
        return GrammarMatcher(state, tokenizer.eos_tokens, ignore_eos=ignore_eos, num_words=words)

    def _compile(self, grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
        """Give a fresh matcher of a grammar.

        Raises:
            InvalidRequest: it cannot be compiled.
        """
        key = msgspec.msgpack.encode(msgspec.structs.replace(grammar, field=""))
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found.deep_copy()
        if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
            raise refusal(grammar, f"it is larger than {MAX_GRAMMAR_BYTES} bytes")
        made = LLMatcher(tokenizer, translate(grammar, self._mark), log_level=0, limits=_LIMITS)
        if made.is_error():
            self._blame(grammar, tokenizer)
            raise refusal(grammar, made.get_error())
        with self._lock:
            self._compiled[key] = made
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
            return made.deep_copy()

    def _mark(self, text: str) -> str:
        """Give a mark as a term of Lark: the control token of that text if there is one, else the text."""
        token_id = self._control_ids.get(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    def _blame(self, grammar: Grammar, tokenizer: LLTokenizer) -> None:
        """Name the schema that spoils a grammar of calls, if one does by itself."""
        for schema in schemas_of(grammar):
            alone = LLMatcher(tokenizer, translate(schema), log_level=0, limits=_LIMITS)
            if alone.is_error():
                raise refusal(schema, alone.get_error())


def _deep_threads(num: int) -> ThreadPoolExecutor:
    """Start threads with room for deep recursion."""
    pool = ThreadPoolExecutor(num, thread_name_prefix="grammar")
    all_there = threading.Barrier(num + 1)
    before = threading.stack_size(_STACK_BYTES)
    try:
        for _ in range(num):
            pool.submit(all_there.wait)
    finally:
        threading.stack_size(before)
    all_there.wait()
    return pool


class _Pending:
    """A Compilation."""

    def __init__(self, grammar: Grammar, work: Future[Matcher], vocabulary: Future[LLTokenizer]) -> None:
        self._grammar = grammar
        self._work = work
        self._vocabulary = vocabulary
        self._until = 0.0

    def poll(self) -> Matcher | RequestError | None:
        """The matcher, why there is none, or None while that is not known yet."""
        if not self._work.done():
            now = time.monotonic()
            if not self._until and self._vocabulary.done():
                self._until = now + MAX_COMPILE_S
            if not self._until or now < self._until:
                return None
            self._work.cancel()
            return refusal(self._grammar, f"it takes longer than {MAX_COMPILE_S:g} s to compile")
        error = self._work.exception()
        if error is None:
            return self._work.result()
        if isinstance(error, RequestError):
            return error
        log.error("a grammar could not be compiled: %s", type(error).__name__)
        return ServerFault("the grammar of the answer could not be compiled")
