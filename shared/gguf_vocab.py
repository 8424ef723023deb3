"""Builds a `tokenizers` tokenizer from the vocabulary inside a GGUF file. It knows nothing of files.

A GGUF names its pre-tokenizer (`tokenizer.ggml.pre`) instead of holding it; the patterns here are those that the
original tokenizers of these families use. A wrong one gives wrong ids without an error, so an unknown name is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from shared.errors import ConfigError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE_MARK: Final = "\u2581"

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL: Final = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
_GPT2: Final = frozenset({"", "default", "gpt-2", "gpt2", "phi-2", "olmo", "jina-v2-en", "mpt"})
_DIGITS: Final = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
_PATTERNS: Final = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "dbrx": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_WHOLE_WORDS_FIRST: Final = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
"""A word that is a token as it stands is taken whole, though merges would not build it."""
_BOS_BY_DEFAULT: Final = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})


def build_tokenizer(meta: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """Build the tokenizer, and say whether prompts begin with its BOS.

    Raises:
        ConfigError: there is no vocabulary, or it is of an unknown kind; names it.
    """
    tokens = meta.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ConfigError("the GGUF has no vocabulary (tokenizer.ggml.tokens)")
    kind = meta.get("tokenizer.ggml.model", "")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(tokens, meta)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(tokens, meta), True
    else:
        raise ConfigError(f"GGUF vocabulary of kind {kind!r} (tokenizer.ggml.model) is not supported: gpt2, llama are")
    _add_tokens(tokenizer, tokens, meta)
    return tokenizer, bool(meta.get("tokenizer.ggml.add_bos_token", add_bos))


def _byte_level(tokens: Sequence[str], meta: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    pre = str(meta.get("tokenizer.ggml.pre", ""))
    if pre in _GPT2:
        splitter: pre_tokenizers.PreTokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in _DIGITS:
        splitter = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre in _PATTERNS:
        splitter = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PATTERNS[pre]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        known = ", ".join(sorted((_GPT2 | _DIGITS | _PATTERNS.keys()) - {""}))
        raise ConfigError(f"GGUF pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not known; known: {known}")
    merges = [tuple(merge.split(" ", 1)) for merge in meta.get("tokenizer.ggml.merges", ())]
    tokenizer = _bpe(tokens, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    if _PATTERNS.get(pre) is _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, pre in _BOS_BY_DEFAULT


def _sentencepiece(tokens: Sequence[str], meta: Mapping[str, Any]) -> Tokenizer:
    scores = meta.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ConfigError("the GGUF's SentencePiece vocabulary has no scores (tokenizer.ggml.scores)")
    unknown = meta.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = _bpe(
        tokens, _merges_of_scores(tokens, scores), unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
    )
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    marks = normalizers.Replace(" ", _SPACE_MARK)
    spaces = decoders.Replace(_SPACE_MARK, " ")
    steps = [spaces, decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), marks])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = marks
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _bpe(tokens: Sequence[str], merges: Sequence[Any], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=list(merges), **options))
    except Exception as e:  # the library raises nothing more special
        raise ConfigError(f"the GGUF's vocabulary cannot be built: {e}") from e


def _merges_of_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair that makes the best-scored token; BPE needs that order written as merges."""
    ids = {token: i for i, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-scores[i], ids[left], ids[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], meta: Mapping[str, Any]) -> None:
    """Tell the tokenizer which tokens are taken whole wherever they are written."""
    types = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    special = [t for t, kind in zip(tokens, types, strict=False) if kind in (_CONTROL, _UNKNOWN) and t]
    plain = [t for t, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED and t]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in plain])
