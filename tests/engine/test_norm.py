"""The norm on a CPU against float64."""

import pytest
import torch

from services.scheduler.engine.layers.norm import RMSNorm

SIZE, EPS = 576, 1e-5


@pytest.mark.parametrize("rows", [(1,), (7,), (5, 3)])
@pytest.mark.parametrize(("dtype", "rel"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("size_of_input", [1e-3, 1.0, 30.0])
def test_equals_the_formula(dtype: torch.dtype, rel: float, rows: tuple[int, ...], size_of_input: float) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    norm = RMSNorm(SIZE, EPS, dtype, torch.device("cpu"))
    norm.weight.tensor.copy_(1 + torch.randn(SIZE, generator=generator) / 4)
    x = (size_of_input * torch.randn(*rows, SIZE, generator=generator)).to(dtype)
    before = x.clone()
    found = norm(x)
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * norm.weight.tensor.double()
    assert found.dtype == dtype and torch.equal(x, before)
    torch.testing.assert_close(found.double(), expected, rtol=rel, atol=rel * 1e-3)


def test_adding_to_the_stream_comes_first() -> None:
    norm = RMSNorm(SIZE, EPS, torch.bfloat16, torch.device("cpu"))
    norm.weight.tensor.fill_(1.0)
    x, stream = torch.randn(2, 4, SIZE).bfloat16()
    total = x + stream
    found, after = norm.add(x, stream)
    assert after is stream and torch.equal(stream, total) and torch.equal(found, norm(total))
