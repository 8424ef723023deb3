"""Loading takes little more memory than what it leaves behind, of a whole model and of a rank's piece."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

HIDDEN, INNER, LAYERS, VOCAB = 1024, 3072, 10, 8000
LIMIT = 1.3
CHILD = """
import sys
from services.scheduler.engine.engine import EngineConfig, load_model, plan_model
from services.scheduler.engine.kernels.packed_linear import has_int4, has_reordered
from services.scheduler.engine.parallel.comm import SoloComm
from services.scheduler.engine.parallel.state import Ranks
from shared.model_files import locate

def memory(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))

size, comm = int(sys.argv[3]), SoloComm()
comm.ranks = Ranks(size - 1, size)
has_reordered(), has_int4()
files = locate(sys.argv[1])
plan = plan_model(EngineConfig(dtype=sys.argv[2], num_pages=8, threads=1), files, comm.ranks)
before = memory("VmRSS")
model = load_model(plan, files, comm)
print(memory("VmHWM") - before)
"""


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """A checkpoint of some hundred megabytes in two shards: folder, dtype, bytes."""
    dtype, folder = request.param, tmp_path_factory.mktemp("large")
    name = str(dtype).removeprefix("torch.")
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qo"}
        shapes |= {f"{layer}.self_attn.{part}_proj.weight": (HIDDEN // 4, HIDDEN) for part in "kv"}
        shapes |= {f"{layer}.mlp.{part}_proj.weight": (INNER, HIDDEN) for part in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER)}
    norms = ["model.norm.weight"]
    norms += [f"model.layers.{i}.{n}_layernorm.weight" for i in range(LAYERS) for n in ("input", "post_attention")]
    tensors = {key: torch.full(shape, 0.01, dtype=dtype) for key, shape in shapes.items()}
    tensors |= {key: torch.ones(HIDDEN, dtype=dtype) for key in norms}
    names, weight_map = sorted(tensors), {}
    for part in range(2):
        shard = f"model-{part}.safetensors"
        save_file({key: tensors[key] for key in names[part::2]}, folder / shard)
        weight_map |= dict.fromkeys(names[part::2], shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 4,
        "vocab_size": VOCAB, "max_position_embeddings": 128, "rope_theta": 10000.0, "eos_token_id": 2, "dtype": name,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder, name, sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_peak_memory_of_a_load(large: tuple[Path, str, int], ranks: int) -> None:
    folder, dtype, num_bytes = large
    command = [sys.executable, "-c", CHILD, str(folder), dtype, str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    ratio = int(done.stdout) / (num_bytes / ranks)
    assert ratio < LIMIT, f"{ratio:.2f} of the weights of a rank"
