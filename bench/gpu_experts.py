"""Times the kernels of a mixture of experts on the GPU at hand: ours at each tile, and torch's product of groups.

    python -m bench.gpu_experts [--tokens 1,4,16,64,256,512,1024,2048,4096]

One layer of Qwen3-30B-A3B (128 experts, 8 per token), several copies of it in one CUDA graph, so that nothing stays
in the L2 cache. Prints, per number of tokens, microseconds of the whole layer, and the least time that reading the
experts that are hit and multiplying by them could take. It is what `layers/moe.py` takes its threshold from, and
`kernels/grouped_linear.py` its tiles.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu import measure_ceilings
from bench.gpu_kernels import time_graph
from services.scheduler.engine.kernels import grouped_linear
from services.scheduler.engine.layers import moe
from services.scheduler.engine.layers.norm import RMSNorm

HIDDEN, INNER, EXPERTS, PER_TOKEN, LAYERS = 2048, 768, 128, 8, 4


def make_layers() -> list[moe.Experts]:
    """Several layers of random weights."""
    layers = []
    for _ in range(LAYERS):
        layer = moe.Experts(
            HIDDEN,
            INNER,
            EXPERTS,
            PER_TOKEN,
            normalise=True,
            activation_name="silu",
            dtype=torch.bfloat16,
            device=torch.device("cuda"),
        )
        layer.router.tensor.normal_(0, HIDDEN**-0.5)
        layer._gate_up.normal_(0, HIDDEN**-0.5)
        layer._down.normal_(0, INNER**-0.5)
        layers.append(layer)
    return layers


def time_layers(body: Callable[[moe.Experts], Any], layers: list[moe.Experts]) -> float:
    """Microseconds of one layer."""
    return round(time_graph(lambda: [body(layer) for layer in layers] and None) * 1e3 / len(layers), 1)


def main() -> None:
    """Run what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512,1024,2048,4096")
    flags = parser.parse_args()
    ceilings, layers = measure_ceilings(), make_layers()
    norm = RMSNorm(HIDDEN, 1e-6, torch.bfloat16, torch.device("cuda"))
    norm.weight.tensor.fill_(1.0)
    tile_for, grouped = grouped_linear.tile_for, moe.Experts._is_grouped
    with torch.inference_mode():
        for count in (int(part) for part in flags.tokens.split(",")):
            x = torch.randn(count, HIDDEN, device="cuda").bfloat16()
            hit = EXPERTS * (1 - (1 - PER_TOKEN / EXPERTS) ** count)
            reads = hit * 3 * HIDDEN * INNER * 2 / ceilings.bytes_per_s
            products = count * PER_TOKEN * 3 * HIDDEN * INNER * 2 / ceilings.flops_per_s
            line: dict[str, Any] = {"tokens": count, "floor_us": round(1e6 * max(reads, products), 1)}
            line["chosen"] = time_layers(lambda layer, x=x: layer(x), layers)
            if count <= 4:
                weight = (norm.weight.tensor, norm.eps)
                line["few"] = time_layers(lambda layer, x=x, w=weight: layer.add_few(x, w, None), layers)
            moe.Experts._is_grouped = lambda self, num_pairs: False  # type: ignore[method-assign]
            for tile in (16, 32, 64):
                grouped_linear.tile_for = lambda num_pairs, num_experts, tile=tile: tile
                line[f"tile_{tile}"] = time_layers(lambda layer, x=x: layer(x), layers)
            if count >= 64:
                moe.Experts._is_grouped = lambda self, num_pairs: True  # type: ignore[method-assign]
                line["grouped"] = time_layers(lambda layer, x=x: layer(x), layers)
            grouped_linear.tile_for, moe.Experts._is_grouped = tile_for, grouped  # type: ignore[method-assign]
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
