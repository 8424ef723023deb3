"""A compiler over the byte vocabulary, and grammars that are there at once, for tests without threads."""

from collections.abc import Sequence
from concurrent.futures import Future

from services.scheduler.grammar.compiler import GrammarCompiler, GrammarVocabulary
from shared.errors import RequestError
from shared.sampling import Grammar
from shared.vocab import byte_vocabulary
from tests.waiting import eventually

EOS = 258
VOCAB = 259


def byte_compiler(eos_ids: Sequence[int] = (EOS,), vocab_size: int = VOCAB) -> GrammarCompiler:
    return GrammarCompiler(GrammarVocabulary(byte_vocabulary, vocab_size, eos_ids))


def compiled(compiler: GrammarCompiler, grammar: Grammar, said: Sequence[int] = (), *, ignore_eos: bool = False):
    """Wait for a matcher, or why there is none."""
    pending = compiler.begin(grammar, said, ignore_eos=ignore_eos)
    found: Future = Future()

    def done() -> bool:
        outcome = pending.poll()
        if outcome is not None and not found.done():
            found.set_result(outcome)
        return found.done()

    eventually(done, "the grammar is compiled")
    return found.result()


class AtOnce:
    """Grammars whose compilations have ended when they are first looked at."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler

    def begin(self, grammar: Grammar, said_ids: Sequence[int], *, ignore_eos: bool) -> "_Done":
        return _Done(compiled(self._compiler, grammar, said_ids, ignore_eos=ignore_eos))


class _Done:
    def __init__(self, outcome) -> None:
        self._outcome = outcome

    def poll(self) -> "RequestError | object":
        return self._outcome
