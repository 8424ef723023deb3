"""Checkpoints that are whole, and those that are not."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.scheduler.engine.engine import EngineConfig, build_engine
from services.scheduler.engine.local import LocalEngine
from services.scheduler.engine.models.config import read_config
from services.scheduler.engine.weights.gguf import open_gguf
from shared.errors import ConfigError
from shared.model_files import EMBEDDED_NAME, locate
from tests.engine.conftest import SHAPE, write_checkpoint
from tests.engine.driver import Driver
from tests.engine.test_engine import PROMPTS

Build = Callable[..., LocalEngine]


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "action", "words"),
    [
        ("model.norm.weight", "drop", "lacks model.norm.weight"),
        ("model.layers.1.self_attn.v_proj.weight", "drop", r"lacks model.layers.1.self_attn.v_proj.weight"),
        ("model.layers.9.mlp.up_proj.weight", "add", "does not know: model.layers.9.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "cut", r"up_proj.weight' has shape \(79, 48\).*\(80, 48\)"),
        ("model.embed_tokens.weight", "cut", r"embed_tokens.weight' has shape"),
    ],
)
def test_damaged_checkpoints_are_refused_by_name(
    name: str, action: str, words: str, tmp_path: Path, build: Build
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if action == "drop":
            del tensors[name]
        elif action == "add":
            tensors[name] = torch.zeros(1)
        else:
            tensors[name] = tensors[name][:-1].contiguous()

    folder = change(write_checkpoint(tmp_path, "llama"), edit)
    with pytest.raises(ConfigError, match=words):
        build(folder)


def test_a_head_that_is_not_tied_must_be_there(tmp_path: Path, build: Build) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]

    folder = change(write_checkpoint(tmp_path, "qwen2"), drop)
    with pytest.raises(ConfigError, match=r"lacks lm_head.weight"):
        build(folder)


def test_a_tied_head_may_be_repeated(tmp_path: Path, build: Build, checkpoint: Callable[[str], Path]) -> None:
    def repeat(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)

    folder = change(write_checkpoint(tmp_path, "llama"), repeat)
    found = Driver(build(folder)).run(PROMPTS[:2], 4)
    expected = Driver(build("llama")).run(PROMPTS[:2], 4)
    assert [seq.output for seq in found] == [seq.output for seq in expected]


def test_shards_are_read_and_a_lost_one_is_named(tmp_path: Path, build: Build) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i in range(2):
        shard = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[i::2]}, folder / shard)
        weight_map |= dict.fromkeys(names[i::2], shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    whole = Driver(build("llama")).run(PROMPTS[:2], 4)
    assert [s.output for s in Driver(build(folder)).run(PROMPTS[:2], 4)] == [s.output for s in whole]
    (folder / shard).unlink()
    with pytest.raises(ConfigError, match="00002-of-00002"):
        build(folder)


def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path, build: Build) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors").write_bytes(b"not a checkpoint at all")
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        build(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        build(folder)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate.": "ffn_gate_inp.",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_gguf(path: Path, folder: Path, arch: str = "llama") -> Path:
    """A checkpoint of a folder as a GGUF: queries and keys of Llama interleaved, experts stacked, as llama.cpp does."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(SHAPE["hidden_size"])
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config.get("head_dim") or SHAPE["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(SHAPE["vocab_size"])])
    writer.add_eos_token_id(2)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if num_experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name and arch == "llama":
                values = values.reshape(count, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        new = name.replace("model.layers.", "blk.")
        if expert := re.fullmatch(r"(blk\.\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", new):
            stacks.setdefault(f"{expert[1]}.ffn_{expert[3]}_exps.weight", {})[int(expert[2])] = values
            continue
        for old, short in GGUF_NAMES.items():
            new = new.replace(old, short)
        writer.add_tensor(new, np.ascontiguousarray(values))
    for name, experts in stacks.items():
        writer.add_tensor(name, np.stack([experts[i] for i in range(len(experts))]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("family", "arch", "changes"),
    [
        ("mistral", "llama", {"rms_norm_eps": 1e-6}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {}),
        ("qwen3-moe", "qwen3moe", {"mlp_only_layers": []}),
    ],
)
def test_gguf_of_every_family_equals_safetensors(
    family: str, arch: str, changes: dict[str, object], tmp_path: Path, build: Build
) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    folder = write_checkpoint(tmp_path / "folder", family, rope_parameters=rope, **changes)
    found = Driver(build(write_gguf(tmp_path / "model.gguf", folder, arch))).run(PROMPTS[3:], 6)
    expected = Driver(build(folder)).run(PROMPTS[3:], 6)
    assert [seq.output for seq in found] == [seq.output for seq in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_equals_safetensors(tied: bool, tmp_path: Path, build: Build) -> None:
    """Also the order of query and key rows, and the head that is not there when it is tied."""
    changes = {"tie_word_embeddings": tied, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    folder = write_checkpoint(tmp_path / "folder", "llama", **changes)
    path = write_gguf(tmp_path / "model.gguf", folder)
    found = Driver(build(path)).run(PROMPTS[3:], 6)
    expected = Driver(build(folder)).run(PROMPTS[3:], 6)
    assert [seq.output for seq in found] == [seq.output for seq in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_four_bit_groups_are_the_values_of_the_file() -> None:
    files = locate(EMBEDDED_NAME)
    sources = open_gguf(files.path, read_config(files.config))
    for name in ("model.layers.3.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        groups = sources[name].read_int4()
        assert groups is not None and groups.q.max() <= 15
        scale, zero = groups.scale.repeat_interleave(32, 1), groups.zero.repeat_interleave(32, 1)
        assert torch.allclose((groups.q.float() - 8) * scale + zero, sources[name].read(), atol=1e-6)
    assert sources["model.embed_tokens.weight"].read_int4() is None


def test_dummy_weights_need_no_file_and_are_always_the_same(tmp_path: Path, build: Build) -> None:
    folder = write_checkpoint(tmp_path, "qwen3")
    (folder / "model.safetensors").unlink()
    first, second = (Driver(build(folder, load_format="dummy")).run(PROMPTS[:3], 5) for _ in range(2))
    assert [seq.output for seq in first] == [seq.output for seq in second]
    assert len({tuple(seq.output) for seq in first}) > 1
    assert build(folder, load_format="dummy").limits.fingerprint.startswith("dummy")


def test_the_byte_model_has_no_weights() -> None:
    with pytest.raises(ConfigError):
        build_engine(EngineConfig(), locate("bytes"))
