"""Every form of a matrix product against the plain one."""

import pytest
import torch
import torch.nn.functional as F

from services.scheduler.engine.kernels import packed_linear
from services.scheduler.engine.kernels.packed_linear import GROUP, MAX_INT4_TOKENS, Int4Groups, pack

TOKENS = [1, 2, MAX_INT4_TOKENS, MAX_INT4_TOKENS + 1, 40]


def random_groups(rows: int, columns: int) -> tuple[Int4Groups, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    q = torch.randint(0, 16, (rows, columns), generator=generator).to(torch.uint8)
    scale = torch.rand(rows, columns // GROUP, generator=generator) * 0.1
    zero = torch.randn(rows, columns // GROUP, generator=generator) * 0.1
    weight = (q.float() - 8) * scale.repeat_interleave(GROUP, 1) + zero.repeat_interleave(GROUP, 1)
    return Int4Groups(q, scale, zero), weight


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("four_bit", [True, False])
@pytest.mark.parametrize("shape", [(96, 64), (48, 160)])
def test_packed_forms_agree_with_the_plain_one(tokens: int, four_bit: bool, shape: tuple[int, int]) -> None:
    groups, weight = random_groups(*shape)
    x = torch.randn(tokens, shape[1], generator=torch.Generator().manual_seed(tokens)).to(torch.bfloat16)
    product = pack(weight.to(torch.bfloat16), None, groups if four_bit else None)
    expected = F.linear(x.float(), weight)
    assert torch.allclose(product(x, tokens).float(), expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("num_decode", [0, 1, 5, MAX_INT4_TOKENS, MAX_INT4_TOKENS + 4])
def test_a_token_s_result_depends_on_its_kind_and_on_no_other_token(num_decode: int) -> None:
    groups, weight = random_groups(576, 1536)
    product = pack(weight.to(torch.bfloat16), None, groups)
    x = torch.randn(40, 1536, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    together = product(x, num_decode)
    narrow = num_decode <= MAX_INT4_TOKENS
    for place in (0, max(0, num_decode - 1), num_decode, 39):
        alone = product(x[place : place + 1].contiguous(), 1 if place < num_decode and narrow else 0)
        assert torch.equal(alone[0], together[place]), place


def test_bias_is_added() -> None:
    _, weight = random_groups(32, 64)
    bias = torch.randn(32).to(torch.bfloat16)
    x = torch.randn(5, 64).to(torch.bfloat16)
    found = pack(weight.to(torch.bfloat16), bias)(x, 0)
    assert torch.allclose(found.float(), F.linear(x.float(), weight, bias.float()), rtol=0.02, atol=0.05)


def test_float32_stays_plain_and_exact() -> None:
    groups, weight = random_groups(96, 64)
    x = torch.randn(3, 64)
    assert torch.equal(pack(weight, None, groups)(x, 2), F.linear(x, weight))


def test_a_build_without_the_private_operations_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, weight = random_groups(96, 64)
    x = torch.randn(3, 64).to(torch.bfloat16)
    packed_linear.has_reordered.cache_clear()
    packed_linear.has_int4.cache_clear()
    monkeypatch.setattr(packed_linear, "_reordered", _missing)
    monkeypatch.setattr(packed_linear, "_int4", _missing)
    try:
        assert not packed_linear.has_reordered() and not packed_linear.has_int4()
        found = pack(weight.to(torch.bfloat16), None, groups)(x, 2)
        assert torch.equal(found, F.linear(x, weight.to(torch.bfloat16)))
    finally:
        packed_linear.has_reordered.cache_clear()
        packed_linear.has_int4.cache_clear()


def _missing(*_: object) -> object:
    raise AttributeError("no such operation")
