"""The embedded model as transformers computes it, dequantised here, independently of our own reader of weights.

transformers reads such files itself, but takes minutes for it on a busy machine.
"""

import re
from typing import Any

import gguf
import torch
import transformers

from shared.model_files import EMBEDDED_NAME, locate


def load_transformers_model() -> Any:
    """Make a LlamaForCausalLM in float32 with the embedded file's weights."""
    files = locate(EMBEDDED_NAME)
    config = transformers.LlamaConfig(**files.config)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tensors = {}
    for tensor in gguf.GGUFReader(files.path).tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            # The converter paired dimension i with i + 32 of each head; here the pairs are taken apart again.
            values = values.view(-1, 32, 2, 576).transpose(1, 2).reshape(-1, 576)
        tensors[_hf_name(tensor.name)] = values
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def _hf_name(name: str) -> str:
    renames = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "blk.": "model.layers.",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
    }
    for old, new in renames.items():
        name = name.replace(old, new)
    name = re.sub(r"attn_([qkv])\.", r"self_attn.\1_proj.", name)
    return re.sub(r"ffn_(gate|up|down)\.", r"mlp.\1_proj.", name)
