"""The kernels of mixtures of experts against plain torch, in Triton's interpreter (no GPU needed)."""

import pytest

from tests.engine.snippets import run_snippet

SETUP = """
        import torch
        from services.scheduler.engine.kernels.few_experts import add_few_experts
        from services.scheduler.engine.kernels.grouped_linear import combine, multiply
        from services.scheduler.engine.kernels.route import Routing, route, sort_pairs
        from tests.engine.kernels.references import experts_reference, route_reference
        torch.manual_seed(11)

        # The interpreter cuts bfloat16 where a GPU rounds, and multiplies its bits as integers.
        import numpy as np
        import triton.language as tl
        from triton.runtime import interpreter
        convert, builder = interpreter._convert_float, interpreter.InterpreterBuilder
        plain_dot = builder.create_dot
        def round_right(data, source, target, mode):
            if (source, target) != (tl.float32, tl.bfloat16):
                return convert(data, source, target, mode)
            numbers = torch.from_numpy(np.array(data, dtype=np.float32))
            return numbers.bfloat16().view(torch.int16).numpy().view(np.uint16)
        def dot(self, a, b, *rest):
            wide = [self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
            return plain_dot(self, *wide, *rest)
        interpreter._convert_float, builder.create_dot = round_right, dot

        def error(found, wanted):
            return float((found.float() - wanted.float()).norm() / wanted.float().norm())
        def weights(experts, size, inner, dtype):
            return (torch.randn(experts, 2 * inner, size) / size**0.5).to(dtype), (
                torch.randn(experts, size, inner) / inner**0.5).to(dtype)
        def run(x, first, second, routing, tile):
            pairs = sort_pairs(routing, tile)
            inner = multiply(x, first, pairs, per_token=routing.per_token, gated=True)
            return combine(multiply(inner, second, pairs), pairs, routing)
"""


def test_routing_equals_its_reference() -> None:
    run_snippet(f"""{SETUP}
        for experts, per_token, normalise in ((6, 2, True), (128, 8, True), (5, 5, False), (60, 1, False)):
            logits = torch.randn(9, experts + 3)[:, :experts]
            mapping = torch.tensor([0, 5, -1, 7, 8, 9, 1, -1, -1], dtype=torch.int32)
            for live in (None, mapping):
                found = route(logits, per_token, normalise=normalise, mapping=live)
                wanted = route_reference(logits, per_token, normalise=normalise, mapping=live)
                assert torch.equal(found.experts, wanted.experts)
                assert torch.allclose(found.weights, wanted.weights, atol=1e-6)
        tied = torch.zeros(1, 40)
        tied[0, [31, 7]] = 1.0
        assert route(tied, 3, normalise=True).experts.tolist() == [[7, 31, 0]]
        broken = torch.randn(3, 40)
        broken[0], broken[1, 5], broken[2, :38] = torch.nan, torch.nan, -torch.inf
        found = route(broken, 4, normalise=False)
        assert ((found.experts >= 0) & (found.experts < 40)).all()
        assert all(len(set(row)) == 4 for row in found.experts.tolist())
        assert found.weights[:2].isnan().all() and torch.isfinite(found.weights[2]).all()
    """)


def test_pairs_are_sorted_and_tiles_hold_each_once() -> None:
    run_snippet(f"""{SETUP}
        from services.scheduler.engine.kernels import route as module
        module._BLOCK = 64  # several blocks
        for num_tokens, per_token, experts, tile, skew in (
            (1, 1, 4, 16, 0), (40, 4, 6, 16, 0), (33, 8, 9, 16, 0),
            (70, 3, 3, 16, 0), (50, 1, 7, 16, 1), (8, 2, 64, 32, 0),
        ):
            chosen = torch.stack([torch.randperm(experts)[:per_token] for _ in range(num_tokens)]).int()
            if skew:
                chosen[:] = 3  # all to one
            chosen[torch.rand(num_tokens) < 0.2] = experts
            pairs = sort_pairs(Routing(chosen, torch.ones(chosen.shape), experts), tile)
            flat = chosen.flatten()
            assert torch.equal(pairs.order.long(), flat.long().argsort(stable=True))
            assert torch.equal(pairs.order[pairs.places.long()].long(), torch.arange(len(flat)))
            assert torch.equal(pairs.ends.long(), torch.bincount(flat.long(), minlength=experts + 1).cumsum(0))
            seen = []
            for expert, first, end, _ in pairs.tiles.tolist():
                assert -1 <= expert < experts
                if expert >= 0:
                    assert first < end
                    seen += [(place, expert) for place in range(first, min(first + tile, end))]
            num_real = int((flat < experts).sum())
            assert sorted(seen) == [(place, int(flat[pairs.order[place]])) for place in range(num_real)]
    """)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_equal_their_reference_for_any_routing(dtype: str) -> None:
    run_snippet(f"""{SETUP}
        dtype, limit = torch.{dtype}, 2e-6 if torch.{dtype} == torch.float32 else 1e-2
        size, inner = 72, 40  # no multiples of a block
        for num_tokens, per_token, experts, tile in (
            (3, 8, 8, 16), (37, 1, 5, 16), (21, 4, 30, 16), (90, 3, 3, 32), (60, 5, 6, 64),
        ):
            first, second = weights(experts, size, inner, dtype)
            x = torch.randn(num_tokens, size + 8).to(dtype)[:, :-8]
            mapping = torch.arange(num_tokens, dtype=torch.int32)
            mapping[1::4] = -1
            x[1::4] = torch.nan
            routing = route(torch.randn(num_tokens, experts), per_token, normalise=True, mapping=mapping)
            found = run(x, first, second, routing, tile)
            real = mapping >= 0
            wanted = experts_reference(x.float(), first.float(), second.float(), routing)
            assert error(found[real], wanted[real]) < limit, (num_tokens, error(found[real], wanted[real]))
            assert (found[~real] == 0).all()
    """)


def test_one_expert_may_have_all_tokens_and_company_changes_nothing() -> None:
    run_snippet(f"""{SETUP}
        experts, size, inner = 6, 48, 32
        first, second = weights(experts, size, inner, torch.bfloat16)
        x = torch.randn(40, size).bfloat16()
        logits = torch.randn(40, experts)
        logits[:, 2] = 100.0
        routing = route(logits, 1, normalise=True)
        assert (routing.experts == 2).all()
        assert error(run(x, first, second, routing, 16), experts_reference(x, first, second, routing)) < 1e-2
        logits = torch.randn(40, experts)
        whole = run(x, first, second, route(logits, 3, normalise=True), 16)
        some = torch.tensor([39, 4, 17])
        alone = run(x[some], first, second, route(logits[some], 3, normalise=True), 16)
        assert torch.equal(alone, whole[some])
    """)


def test_few_tokens_go_through_their_experts_unsorted() -> None:
    run_snippet(f"""{SETUP}
        import torch.nn.functional as F
        size, inner, experts = 80, 48, 9
        for num_tokens, per_token in ((1, 8), (2, 1), (4, 3)):
            first, second = weights(experts, size, inner, torch.bfloat16)
            stream = (torch.randn(num_tokens, size) * 0.1).bfloat16()
            norm = torch.rand(size).bfloat16()
            mapping = torch.arange(num_tokens, dtype=torch.int32)
            if num_tokens == 4:
                mapping[2] = -1
                stream[2] = torch.nan
            routing = route(torch.randn(num_tokens, experts), per_token, normalise=False, mapping=mapping)
            found = stream.clone()
            add_few_experts(found, first, second, routing, (norm, 1e-6))
            x = F.rms_norm(stream.float(), (size,), norm.float(), 1e-6).bfloat16()
            answers = experts_reference(x.float(), first.float(), second.float(), routing)
            real = mapping >= 0
            wanted = stream.float() + answers
            assert error(found[real], wanted[real]) < 1e-2, (num_tokens, error(found[real], wanted[real]))
            assert found[~real].isnan().all()
    """)


def test_a_layer_computes_on_a_gpu_what_it_computes_on_a_cpu() -> None:
    run_snippet(f"""{SETUP}
        from services.scheduler.engine.kernels import few_experts
        from services.scheduler.engine.layers.moe import Experts
        import torch.nn.functional as F
        for normalise, activation in ((True, "silu"), (False, "gelu")):
            layer = Experts(48, 32, 6, 3, normalise=normalise, activation_name=activation, dtype=torch.float32,
                device=torch.device("cpu"))
            for tensor in (layer.router.tensor, layer._gate_up, layer._down):
                tensor.normal_(0, 0.15)
            x = torch.randn(30, 48)
            mapping = torch.arange(30, dtype=torch.int32)
            mapping[20:] = -1
            logits = F.linear(x, layer.router.tensor)
            wanted = layer(x)
            assert error(layer._on_gpu(x, logits, None), wanted) < 1e-5
            found = layer._on_gpu(x, logits, mapping)
            assert error(found[:20], wanted[:20]) < 1e-5 and (found[20:] == 0).all()
            grouped = layer._is_grouped
            layer._is_grouped = lambda num_pairs: True
            def product(rows, weight, *, offs):
                out, first = torch.full((len(rows), weight.shape[2]), torch.nan), 0
                for expert, end in enumerate(offs.tolist()):
                    out[first:end], first = rows[first:end] @ weight[expert], end
                return out
            torch._grouped_mm = product
            found = layer._on_gpu(x, logits, mapping)
            assert error(found[:20], wanted[:20]) < 1e-5 and (found[20:] == 0).all()
    """)
