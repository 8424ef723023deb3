"""Small model folders and GGUF files, made on the spot, for tests of files, vocabularies and templates."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CONFIG: Mapping[str, Any] = {"model_type": "llama", "max_position_embeddings": 128, "eos_token_id": 1}
SPACE = "\u2581"


def byte_level_tokenizer(*, bos: bool = False) -> Tokenizer:
    """A byte-level BPE: <s>=0, </s>=1, <think>=2 (not special), then the bytes, then a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<s>", "</s>", "<think>", *alphabet, "he", "ll", "hell", "hello", "Ġhello"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello")]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """What Llama 2 has: marks for blanks, byte fallback, one leading blank that decoding drops."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), SPACE, "h", "i", SPACE + "h", SPACE + "hi"]
    merges = [(SPACE, "h"), (SPACE + "h", "i")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer


def write_folder(
    path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    config: Mapping[str, Any] = CONFIG,
    generation: Mapping[str, Any] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    template: str | None = None,
) -> Path:
    """Write a model folder; what is None is left out. `template` goes into chat_template.jinja."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer_config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def write_gguf(
    path: Path,
    *,
    arch: str = "llama",
    kind: str = "gpt2",
    pre: str | None = "gpt-2",
    tokens: Sequence[str] = (),
    types: Sequence[int] = (),
    merges: Sequence[str] = (),
    scores: Sequence[float] = (),
    eos: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write a GGUF file with metadata and no tensor."""
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if tokens:
        writer.add_token_list(list(tokens))
        writer.add_token_types(list(types) or [1] * len(tokens))
    if merges:
        writer.add_token_merges(list(merges))
    if scores:
        writer.add_token_scores(list(scores))
    if eos is not None:
        writer.add_eos_token_id(eos)
    for key, value in (extra or {}).items():
        writer.add_key_value(key, value, _type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _type(value: Any) -> gguf.GGUFValueType:
    kinds = {bool: gguf.GGUFValueType.BOOL, str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32}
    return kinds[type(value)]
