"""The output head in bfloat16: the order of the likeliest tokens is that of float32, whatever bfloat16 rounds alike."""

import torch

from services.scheduler.engine.layers.embedding import Embedding, Head

VOCAB, HIDDEN = 2048, 64
CPU = torch.device("cpu")


def make_head(seed: int) -> tuple[Head, torch.Tensor]:
    embedding = Embedding(VOCAB, HIDDEN, torch.bfloat16, CPU)
    generator = torch.Generator().manual_seed(seed)
    embedding.weight.tensor.copy_(torch.randn(VOCAB, HIDDEN, generator=generator))
    head = Head(VOCAB, HIDDEN, torch.bfloat16, CPU, embedding)
    head.finish()
    return head, embedding.weight.tensor


def test_the_likeliest_are_ordered_as_in_float32() -> None:
    head, weight = make_head(1)
    hidden = (3 * torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(2))).bfloat16()
    exact = hidden.float() @ weight.float().T
    assert (exact.bfloat16().argmax(-1) != exact.argmax(-1)).any(), "bfloat16 rounds no two likeliest alike here"
    found = head(hidden)
    assert torch.equal(found.argmax(-1), exact.argmax(-1))
    near = exact >= exact.amax(-1, keepdim=True) - 0.5
    assert torch.allclose(found[near], exact[near], rtol=1e-5)


def test_rows_that_are_flat_or_not_numbers_are_left_as_they_are() -> None:
    head, _ = make_head(1)
    hidden = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
    assert torch.equal(head(hidden), torch.zeros(2, VOCAB))
    hidden[0, 0] = torch.nan
    assert head(hidden)[0].isnan().all()
