"""Vocabularies that the `tokenizers` library encodes: from tokenizer.json, or built from GGUF metadata.

It finds out, once, what the library's parts mean in bytes, so that decoding needs the library no more.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from shared.errors import ConfigError
from shared.gguf_vocab import build_tokenizer
from shared.model_files import ModelFiles
from shared.vocabulary import Vocabulary

SPACE_MARK: Final = "\u2581"
"""SentencePiece writes a blank as this."""
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NFC_SHRINK: Final = 4
"""Composed text has at least a quarter of the bytes it had before (Hangul: a third)."""
_KEEPING_NORMALIZERS: Final = frozenset({"NFC", "Prepend", "Replace"})
_KEEPING_SPLITTERS: Final = frozenset({"ByteLevel", "Digits", "Metaspace", "Split"})
_DOCUMENT_START: Final = "<|endoftext|>"

Json = Mapping[str, Any]

# The library's own threads are one pool for all: two very long texts would fill it, and every short one would wait
# behind them. Without it each text is encoded on the thread that asks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class _HubEncoder:
    """A tokenizer that is never changed after this, which is what makes it safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # The batch call, even for one text: it alone lets other threads run meanwhile.
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]


def load_hub_vocabulary(files: ModelFiles) -> Vocabulary:
    """Load the vocabulary of a folder or a GGUF file.

    Raises:
        ConfigError: it is missing, broken, or of a kind that is not supported; names it.
    """
    add_bos: bool | None
    if files.gguf is not None:
        try:
            tokenizer, add_bos = build_tokenizer(files.gguf.metadata)
            parts = json.loads(tokenizer.to_str())
        except ConfigError as e:
            raise ConfigError(f"{files.path}: {e}") from e
    else:
        tokenizer, parts = _read(files)
        add_bos = files.tokenizer_config.get("add_bos_token")
    try:
        return _describe(tokenizer, parts, files, add_bos)
    except ConfigError as e:
        raise ConfigError(f"{files.path}: {e}") from e


def _read(files: ModelFiles) -> tuple[Tokenizer, Json]:
    path = files.path / "tokenizer.json"
    try:
        text = path.read_text("utf-8")
        parts = json.loads(text)
        tokenizer = Tokenizer.from_str(text)
    except FileNotFoundError as e:
        raise ConfigError(f"{files.path}: tokenizer.json is missing; only this form of a tokenizer is read") from e
    except Exception as e:  # the library raises nothing more special
        raise ConfigError(f"{path}: not a readable tokenizer: {e}") from e
    late = sorted((int(i), token) for i, token in (files.tokenizer_config.get("added_tokens_decoder") or {}).items())
    for _, token in late:
        if tokenizer.token_to_id(token["content"]) is None:
            added = AddedToken(token["content"], normalized=False, special=bool(token.get("special")))
            (tokenizer.add_special_tokens if token.get("special") else tokenizer.add_tokens)([added])
    return tokenizer, parts


def _describe(tokenizer: Tokenizer, parts: Json, files: ModelFiles, add_bos: bool | None) -> Vocabulary:
    added = tokenizer.get_added_tokens_decoder()
    byte_level = _is_byte_level(parts)
    tokens = _token_table(tokenizer, byte_level, {i: token.content for i, token in added.items()})
    special = frozenset(i for i, token in added.items() if token.special)
    bos_text = files.special_texts.get("bos_token")
    bos_id = tokenizer.token_to_id(bos_text) if bos_text else None
    prefix = _prefix_ids(tokenizer, bos_id, add_bos)
    start = tokenizer.token_to_id(_DOCUMENT_START)
    empty = prefix or tuple(i for i in (start, bos_id, *files.eos_token_ids) if i is not None)[:1]
    bound, dropped = _text_bound(tokenizer, parts, tokens, byte_level)
    return Vocabulary(
        encoder=_HubEncoder(tokenizer),
        tokens=tokens,
        special_ids=special | frozenset(files.eos_token_ids),
        prefix_ids=prefix,
        bos_id=bos_id,
        eos_ids=files.eos_token_ids or _eos_of(tokenizer, files),
        strips_leading_space=_strips_leading_space(parts),
        empty_ids=empty,
        max_token_bytes=bound,
        dropped_bytes=dropped,
    )


def _eos_of(tokenizer: Tokenizer, files: ModelFiles) -> tuple[int, ...]:
    text = files.special_texts.get("eos_token")
    eos = tokenizer.token_to_id(text) if text else None
    return () if eos is None else (eos,)


def _prefix_ids(tokenizer: Tokenizer, bos_id: int | None, add_bos: bool | None) -> tuple[int, ...]:
    """What the tokenizer puts in front of every text, unless the model's settings overrule it."""
    if add_bos is not None:
        return (bos_id,) if add_bos and bos_id is not None else ()
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a").ids
    for i in range(len(full)):
        if full[i : i + len(bare)] == bare:
            return tuple(full[:i])
    return ()


def _flatten(part: Any, members: str) -> Iterator[Json]:
    """Walk a part of tokenizer.json that may be a sequence of parts."""
    if not part:
        return
    if part["type"] == "Sequence":
        for inner in part[members]:
            yield from _flatten(inner, members)
    else:
        yield part


def _is_byte_level(parts: Json) -> bool:
    kinds = [step["type"] for step in _flatten(parts.get("decoder"), "decoders")]
    if "ByteLevel" in kinds:
        return True
    if set(kinds) & {"ByteFallback", "Metaspace", "Replace"}:
        return False
    raise ConfigError(f"a tokenizer with decoder {'+'.join(kinds) or 'none'} is not supported")


def _strips_leading_space(parts: Json) -> bool:
    for step in _flatten(parts.get("decoder"), "decoders"):
        if step["type"] == "Strip" and step.get("start", 0) > 0:
            return True
        if step["type"] == "Metaspace":
            return bool(step.get("prepend_scheme", "always") != "never")
    return False


def _token_table(tokenizer: Tokenizer, byte_level: bool, added: Mapping[int, str]) -> list[bytes | None]:
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
    to_bytes = _byte_level_bytes if byte_level else _piece_bytes
    for text, i in vocab.items():
        table[i] = added[i].encode() if i in added else to_bytes(text)
    return table


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's way to write every byte as a visible character: code point -> byte."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    return {b: b for b in visible} | {256 + i: b for i, b in enumerate(hidden)}


_ALPHABET: Final = _byte_alphabet()


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes(_ALPHABET[ord(c)] for c in text)
    except KeyError:  # a token outside the byte alphabet stands for itself
        return text.encode()


def _piece_bytes(text: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else text.replace(SPACE_MARK, " ").encode()


def _text_bound(
    tokenizer: Tokenizer, parts: Json, tokens: Sequence[bytes | None], byte_level: bool
) -> tuple[int | None, bytes]:
    """Find how many bytes of text a token can stand for at most, and the bytes that are dropped on the way.

    Nothing can be proven where a step may shorten the text by any amount.
    """
    normalizers = [step["type"] for step in _flatten(parts.get("normalizer"), "normalizers")]
    splitters = list(_flatten(parts.get("pre_tokenizer"), "pretokenizers"))
    shrinks = (
        not set(normalizers) <= _KEEPING_NORMALIZERS
        or any(step["type"] == "Replace" and step.get("content") != SPACE_MARK for step in _norm_steps(parts))
        or not {step["type"] for step in splitters} <= _KEEPING_SPLITTERS
        or any(step.get("behavior") == "Removed" for step in splitters)
        or any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    )
    if shrinks or not (byte_level or parts["model"].get("byte_fallback")):
        return None, b""
    longest = max((len(token) for token in tokens if token), default=1)
    if byte_level:
        known = {token[0] for token in tokens if token and len(token) == 1}
        dropped = bytes(b for b in range(256) if b not in known)
    else:
        dropped = b""
    return longest * (_NFC_SHRINK if "NFC" in normalizers else 1), dropped


def _norm_steps(parts: Json) -> Iterator[Json]:
    return _flatten(parts.get("normalizer"), "normalizers")
