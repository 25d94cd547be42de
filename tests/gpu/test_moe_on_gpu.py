"""What only a GPU can show of mixtures of experts: graphs, syncs, recompilation, real sizes, memory beyond 2^31."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.shared.pairs import count_kernel
from kernelhub.backends.triton.moe.matmul import experts_kernel
from kernelhub.backends.triton.moe.quantize import quantize_kernel
from kernelhub.backends.triton.moe.reduction import reduce_kernel
from kernelhub.backends.triton.moe.routing import routing_kernel
from kernelhub.backends.triton.moe.sorting import sort_kernel
from kernelhub.backends.triton.moe.tiles import rows_of_a_tile
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.tolerance import compare
from kernelhub.ops.moe.routing.inputs import routing_inputs
from tests.gpu.test_attention_on_gpu import captured

pytestmark = pytest.mark.gpu

FORMATS = ("plain", "fp8_channel", "fp8_block", "mxfp4", "nvfp4", "mxint4")
KERNEL = "triton.experts"


def layer(tokens: int, weights: str = "plain", **sizes: Any) -> dict[str, Any]:
    small = {"num_experts": 16, "top_k": 4, "hidden_size": 512, "intermediate_size": 256}
    return moe_inputs(tokens=tokens, weights=weights, device="cuda", **small | sizes)


def agrees(out: torch.Tensor, arguments: dict[str, Any], dtype: torch.dtype = torch.float64) -> None:
    agreement = compare(out, arguments, dtype)
    assert agreement.ok, str(agreement)


def variants(*kernels: Any) -> int:
    """Compiled variants of kernels on the current device."""
    return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)


class TestChoice:
    def test_the_gpu_is_served_by_our_kernels(self) -> None:
        expected = "cuda.routing" if importlib.util.find_spec("cuda.bindings") else "triton.routing"
        assert kernelhub.route_experts.explain(**routing_inputs(device="cuda")).selected == expected
        for weights in FORMATS:
            assert kernelhub.fused_moe.explain(**layer(4, weights)).selected == KERNEL


class TestGraphs:
    def test_a_captured_routing_sees_new_logits(self) -> None:
        arguments = routing_inputs(tokens=100, device="cuda")
        weights = torch.empty(100, 8, device="cuda")
        ids = torch.empty(100, 8, dtype=torch.int32, device="cuda")
        graph = captured(lambda: kernelhub.route_experts(**arguments, out_weights=weights, out_ids=ids))
        for _ in range(2):
            arguments["logits"].normal_()
            graph.replay()
            want, want_ids = kernelhub.route_experts(**arguments)
            assert torch.equal(weights, want)
            assert torch.equal(ids, want_ids)

    @pytest.mark.parametrize("tokens", [3, 600, 2500])
    @pytest.mark.parametrize("weights", FORMATS)
    def test_captured_experts_read_the_ids_of_each_replay(self, weights: str, tokens: int) -> None:
        arguments = layer(tokens, weights)
        out = torch.empty_like(arguments["x"])
        graph = captured(lambda: kernelhub.fused_moe(**arguments, out=out, backend=KERNEL))
        for spread in ("even", "one", "none of some"):
            arguments["x"].normal_()
            ids = arguments["topk_ids"]
            if spread == "one":
                ids.fill_(-1)  # one place a token: the same expert twice would round alike, which no bound is made for
                ids[:, 0] = 7
            elif spread == "even":
                ids.copy_(torch.rand(tokens, 16, device="cuda").topk(4, 1).indices)
            else:
                ids.copy_(torch.rand(tokens, 16, device="cuda").topk(4, 1).indices % 5 - 1)
            out.fill_(torch.nan)
            graph.replay()
            agrees(out, arguments)


class TestSyncs:
    @pytest.mark.parametrize("weights", FORMATS)
    def test_no_call_waits_for_the_gpu(self, weights: str) -> None:
        routing = routing_inputs("minimax-m2.5", tokens=50, device="cuda")
        for tokens in (50, 3000):
            arguments = layer(tokens, weights)
            table = torch.arange(16, dtype=torch.int32, device="cuda")
            arguments |= {"expert_map": table, "residual": torch.randn_like(arguments["x"])}
            kernelhub.route_experts(**routing)
            kernelhub.fused_moe(**arguments)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                kernelhub.route_experts(**routing)
                out = kernelhub.fused_moe(**arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            agrees(out, arguments)


class TestVariants:
    def test_routings_of_other_sizes_compile_nothing(self) -> None:
        seen = set()
        for tokens in (64, 1, 3, 1000):
            kernelhub.route_experts(**routing_inputs(tokens=tokens, device="cuda"), backend="triton")
            seen.add(variants(routing_kernel))
        assert len(seen) == 1

    @pytest.mark.parametrize("weights", FORMATS)
    def test_other_sizes_of_a_class_of_tiles_compile_nothing(self, weights: str) -> None:
        kernels = (experts_kernel, quantize_kernel, reduce_kernel, sort_kernel, count_kernel)
        for class_of in ((1, 2, 17, 64), (2049, 2500, 4095)):
            assert len({rows_of_a_tile(tokens * 4, 16) for tokens in class_of}) == 1
            base = layer(1, weights)
            seen = set()
            for tokens in class_of:
                step = layer(tokens)
                arguments = base | {name: step[name] for name in ("x", "topk_weights", "topk_ids")}
                kernelhub.fused_moe(**arguments, backend=KERNEL)
                seen.add(variants(*kernels))
            assert len(seen) == 1, "a batch of another size compiled a kernel"

    def test_calls_that_differ_in_what_triton_compiles_for_do_not_meet(self) -> None:
        base = layer(9)
        x, w13 = base["x"], base["w13"]
        shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x)
        calls = [
            {},
            {"x": shifted.copy_(x)},
            {"x": x.t().contiguous().t()},
            {"w13": torch.cat([w13, w13], 2)[..., :512]},
            {"topk_ids": base["topk_ids"].t().contiguous().t()},
            {"w13_bias": torch.randn(16, 512, device="cuda")},
            {"w13_bias": torch.randn(16, 512, device="cuda").bfloat16()},
            {"activation": "swiglu_oai", "alpha": 1, "limit": 1},
        ]
        for change in (*calls, *reversed(calls)):
            arguments = base | change
            agrees(kernelhub.fused_moe(**arguments, backend=KERNEL), arguments)


class TestRealSizes:
    @pytest.mark.parametrize("tokens", [1, 33, 700])
    @pytest.mark.parametrize("weights", ["plain", "fp8_tensor", "fp8_channel", "nvfp4"])
    def test_qwen3_30b(self, weights: str, tokens: int) -> None:
        arguments = moe_inputs("qwen3-30b-a3b", tokens=tokens, weights=weights, device="cuda")
        agrees(kernelhub.fused_moe(**arguments, backend=KERNEL), arguments)

    @pytest.mark.parametrize("tokens", [1, 100])
    @pytest.mark.parametrize("weights", ["fp8_block", "fp8_block_ue8m0"])
    def test_deepseek_on_one_of_eight(self, weights: str, tokens: int) -> None:
        arguments = moe_inputs(
            "deepseek-v3.2", tokens=tokens, tensor_parallel=8, weights=weights, num_experts=64, device="cuda"
        )
        agrees(kernelhub.fused_moe(**arguments, backend=KERNEL), arguments)
        wide = arguments | {"activation_dtype": torch.bfloat16}
        agrees(kernelhub.fused_moe(**wide, backend=KERNEL), wide)

    @pytest.mark.parametrize("tokens", [1, 300])
    def test_gpt_oss(self, tokens: int) -> None:
        arguments = moe_inputs("gpt-oss-120b", tokens=tokens, num_experts=32, device="cuda")
        agrees(kernelhub.fused_moe(**arguments, backend=KERNEL), arguments)

    def test_both_kernels_and_sixteen_thousand_tokens(self) -> None:
        arguments = layer(16384, "fp8_block")
        for kernel in (KERNEL, "torch.experts"):
            agrees(kernelhub.fused_moe(**arguments, backend=kernel), arguments, torch.float32)

    def test_the_same_bits_every_time(self) -> None:
        for weights in FORMATS:
            arguments = layer(999, weights)
            want = kernelhub.fused_moe(**arguments, backend=KERNEL)
            for _ in range(3):
                assert torch.equal(kernelhub.fused_moe(**arguments, backend=KERNEL), want)


class TestMemory:
    def test_experts_beyond_two_to_the_31_elements(self) -> None:
        base = layer(5, num_experts=4, top_k=2)
        table = torch.full((1023,), -1, dtype=torch.int32, device="cuda")
        wide = torch.zeros(1023, 2 * 512, 2 * 2560, dtype=torch.bfloat16, device="cuda")
        assert wide.numel() > 1 << 31
        w13, w2 = wide[:, :512, :512], torch.zeros(1023, 512, 256, dtype=torch.bfloat16, device="cuda")
        places = (1, 500, 1000, 1022)
        for place, expert in enumerate(places):
            w13[expert].copy_(base["w13"][place])
            w2[expert].copy_(base["w2"][place])
            table[place] = expert
        arguments = base | {"w13": w13, "w2": w2, "expert_map": table}
        want = kernelhub.fused_moe(**base, backend=KERNEL)
        assert torch.equal(kernelhub.fused_moe(**arguments, backend=KERNEL), want)

    def test_more_tokens_than_a_round_holds(self) -> None:
        arguments = layer(40_000, top_k=8, hidden_size=2048, intermediate_size=64)
        out = kernelhub.fused_moe(**arguments, backend=KERNEL)
        for part in (slice(0, 50), slice(32_700, 32_800), slice(39_950, 40_000)):
            some = arguments | {name: arguments[name][part] for name in ("x", "topk_weights", "topk_ids")}
            agrees(out[part], some)
