"""`calls_of`: for every published model and phase, calls with tensors whose problem is the need's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.dispatch.explain import problem_from
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import ConfigurationError
from kernelhub.ops.models.calls import GRAPH_SIZES, MAKERS, calls_of, need_of
from kernelhub.ops.models.problems import PHASES, Need, problems_of
from kernelhub.ops.models.published import CONFIGS
from kernelhub.probes.device import facts

TOKENS = (1, 3, 16, 17, 64, 65, 200)
CPU = facts(torch.device("cpu"))


def need(op: str, sizes: dict[str, int] | None = None, **facets: Any) -> Need:
    """A need for the op's usual problem with these facets."""
    function = HUB.function(op)
    found = need_of(op, problem_from(function.op.contract, CPU, facets))
    return Need(found.op, found.facets, found.phases, (), (tuple(sizes.items()),) if sizes else ())


class TestEveryModel:
    @pytest.mark.parametrize("phase", PHASES)
    @pytest.mark.parametrize("quantization", [None, "fp8_block", "fp8_tensor", "fp8_channel", "nvfp4"])
    @pytest.mark.parametrize("model", CONFIGS)
    def test_a_calls_problem_is_the_needs(self, model, quantization, phase):
        for asked in problems_of(model, tp=8, quantization=quantization, phases=[phase]):
            problem = asked.problem("cpu")
            many = asked.op in ("fp4_gemm", "fused_moe") and problem.rows == "many"
            tokens = (1024,) if many else TOKENS
            calls = list(calls_of(asked, tokens, "cpu", context_len=32, filled=False))
            assert calls, asked
            assert {call.tokens for call in calls} <= set(tokens)
            for call in calls:
                assert call.problem == problem, call.label

    @pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3.2"])
    def test_float8_caches_and_shared_experts_too(self, model):
        for asked in problems_of(model, tp=8, ep=8, kv_dtype="float8_e4m3fn", page_size=32):
            for call in calls_of(asked, (1, 65), "cpu", context_len=32, filled=False):
                assert call.problem == asked.problem("cpu"), call.label

    def test_a_ranks_share_is_padded_as_the_weights_format_wants(self):
        experts, _ = [item for item in problems_of("minimax-m2.5", tp=8) if item.op == "fused_moe"]
        assert dict(experts.facets)["intermediate_size"] == 256, "1536 / 8 = 192, in whole blocks of 128"
        widths = [
            dict(sizes)["width"]
            for item in problems_of("deepseek-v2-lite", tp=8, quantization="nvfp4")
            if item.op == "quantize_nvfp4"
            for sizes in item.sizes
        ]
        assert 1376 in widths, "10944 / 8 = 1368, in whole groups of 16"

    @pytest.mark.parametrize("model", ["gpt-oss-120b", "gemma-2-9b", "deepseek-v2-lite", "qwen3-30b-a3b"])
    def test_they_run(self, model):
        for asked in problems_of(model, tp=8 if model != "gpt-oss-120b" else 64 // 8, phases=["decode"]):
            if asked.op == "fused_moe":
                continue  # too much work for a CPU; its calls are run below
            for call in calls_of(asked, (2,), "cpu", context_len=20):
                result = HUB.function(call.op)(**call.arguments)
                first = result[0] if isinstance(result, tuple) else result
                assert torch.isfinite(first.float()).all(), call.label


SMALL: dict[str, dict[str, Any]] = {
    "attention": {"num_q_heads": 4, "num_kv_heads": 2, "ragged": True, "causal": True, "sinks": True, "lse": True},
    "paged_attention": {
        "num_q_heads": 4, "num_kv_heads": 2, "kv_dtype": "fp8", "window_left": True, "softcap": True,
        "causal": False,
    },
    "mla_attention": {"num_heads": 4, "sparse": True, "ragged": True, "q_len": "any", "causal": True},
    "merge_attention_states": {"num_heads": 2, "parts": "many", "lse": True},
    "linear_attention": {"num_heads": 2, "head_dim": 32, "value_dim": 32, "state": True, "state_indices": True},
    "grouped_gemm": {"num_groups": 3, "n": 64, "k": 128, "b_scale": "nvfp4", "global_scale": True, "bias": True},
    "fp8_gemm": {"n": 64, "k": 160, "scaling": "mx"},
    "bmm_fp8": {"n": 32, "k": 32, "a_scaling": "batch"},
    "fp4_gemm": {"n": 32, "k": 64, "a_format": "mxfp8", "b_format": "mxfp4"},
    "fused_moe": {
        "num_experts": 4, "top_k": 2, "hidden_size": 128, "intermediate_size": 128, "weights": "mxfp4",
        "w13_bias": True, "w2_bias": True, "activation": "swiglu_oai", "expert_map": True, "residual": True,
    },
    "route_experts": {"num_experts": 32, "num_groups": 4, "topk_groups": 2, "scoring": "sigmoid"},
    "topk_indices": {"k": 8, "row_ends": True},
    "concat_mla_k": {"num_heads": 4},
    "quantize_fp8": {"granularity": "group", "group_size": 64, "column": True, "static": False},
    "dequantize_fp8": {"granularity": "group", "group_size": 64},
    "write_kv_cache": {"num_kv_heads": 2, "kv_scale": "head", "kv_layout": "HND"},
    "rms_norm_quant": {"width": 256, "format": "nvfp4", "residual": True, "unit_offset": True},
    "silu_and_mul_quant": {"width": 256, "format": "fp8_tensor"},
    "moe_dispatch": {"num_experts": 8, "top_k": 2, "hidden_size": 64, "link": "none"},
    "moe_combine": {"num_experts": 8, "top_k": 2, "hidden_size": 64, "link": "none"},
    "expert_parallel_moe": {
        "num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 32, "link": "none",
    },
    **{op: {"link": "none"} for op in ("all_reduce", "all_reduce_rms_norm", "reduce_scatter", "all_gather")},
}  # fmt: skip

# Other ways in which an op is asked.
MORE: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("fp8_gemm", {"n": 64, "k": 128, "scaling": of, "weight_only": "bfloat16"}) for of in ("tensor", "row", "block")),
    *(("grouped_gemm", {"num_groups": 3, "n": 64, "k": 128, "a_scale": rows, "b_scale": weights, "masked": masked})
      for rows, weights in (("mxfp8", "mxfp4"), ("mxfp8", "mxfp8"), ("mxfp4", "mxfp4")) for masked in (False, True)),
    *(("all_reduce_rms_norm", {"link": "none", "format": form}) for form in ("fp8_tensor", "fp8_group", "nvfp4")),
    ("write_kv_cache", {"num_kv_heads": 2, "head_dim_qk": 32, "rope": "interleaved", "rotary_dim": 16, "q": True}),
    ("grouped_gemm", {"num_groups": 3, "n": 64, "k": 128, "a_global_scale": True, "global_scale": True}),
    ("grouped_gemm", {"num_groups": 3, "n": 64, "k": 256, "a_scale": "group", "b_scale": "block"}),
)  # fmt: skip


class TestEveryOp:
    def test_has_calls(self):
        _ = HUB.settings
        assert set(MAKERS) == set(HUB.registry.contracts)

    @pytest.mark.parametrize(("op", "facets"), [*((op, SMALL.get(op, {})) for op in MAKERS), *MORE], ids=str)
    def test_with_features_they_are_what_is_asked_and_run(self, op, facets):
        sizes = {"width": 256} if "quantize" in op else {"batch": 3} if op == "bmm_fp8" else {}
        if op == "fused_moe":
            sizes = {"global_experts": 8}
        asked = need(op, sizes, **facets)
        calls = list(calls_of(asked, (1, 5, 20), "cpu", context_len=40, max_context_len=100))
        assert calls
        for call in calls:
            assert call.problem == asked.problem("cpu"), call.label
            result = HUB.function(op)(**call.arguments)
            first = result[0] if isinstance(result, tuple) else result
            if facets.get("masked"):  # rows of no group are not written
                first = torch.cat([of[:size] for of, size in zip(first, call.arguments["group_sizes"], strict=True)])
            first = first.view(torch.uint8) if first.dtype == getattr(torch, "float8_e8m0fnu", None) else first
            assert torch.isfinite(first.float()).all() or op in ("mqa_logits", "paged_mqa_logits"), call.label


class TestTokens:
    def test_a_graph_of_a_size_is_a_decode_of_as_many_sequences(self):
        asked = need("paged_attention", num_q_heads=4, num_kv_heads=2)
        rows = [call.arguments["q"].shape[0] for call in calls_of(asked, GRAPH_SIZES, "cpu", context_len=16)]
        assert rows == list(GRAPH_SIZES)

    def test_few_rows_have_no_call_of_many(self):
        few, some, many = (need("fp8_gemm", n=64, k=128, rows=rows) for rows in ("few", "some", "many"))
        counts = (1, 16, 17, 64, 65, 512)
        assert [call.tokens for call in calls_of(few, counts, "cpu")] == [1, 16]
        assert [call.tokens for call in calls_of(some, counts, "cpu")] == [17, 64]
        assert [call.tokens for call in calls_of(many, counts, "cpu")] == [65, 512]

    def test_speculation_has_as_many_queries_as_its_sizes_say(self):
        asked = need("paged_attention", {"queries": 8}, num_q_heads=4, num_kv_heads=2, q_len="few")
        shapes = [tuple(call.arguments["q"].shape) for call in calls_of(asked, (4, 8, 32), "cpu", context_len=16)]
        assert shapes == [(1, 8, 4, 128), (4, 8, 4, 128)]

    def test_prefill_is_shared_out_among_sequences(self):
        asked = need("attention", num_q_heads=4, num_kv_heads=2, ragged=True)
        (call,) = calls_of(asked, (100,), "cpu", sequences=3)
        assert call.arguments["cu_seqlens_q"].tolist() == [0, 33, 66, 100]
        (call,) = calls_of(asked, (100,), "cpu", context_len=25)
        assert call.arguments["cu_seqlens_q"].tolist() == [0, 25, 50, 75, 100]

    def test_mixed_batches_decode_beside_a_chunk(self):
        asked = need("paged_attention", num_q_heads=4, num_kv_heads=2, ragged=True, q_len="any")
        (call,) = calls_of(asked, (10,), "cpu", context_len=16)
        assert call.arguments["cu_seqlens_q"].diff().tolist() == [1, 1, 1, 1, 1, 5]
        assert call.arguments["max_seqlen_q"] is None


class TestMemory:
    def test_weights_are_made_once_for_all_token_counts(self):
        calls = list(calls_of(need("fp8_gemm", n=64, k=128), (1, 2, 4), "cpu"))
        assert len({call.arguments["b"].data_ptr() for call in calls}) == 1

    def test_a_cache_has_no_more_pages_than_it_may(self):
        asked = need("paged_attention", num_q_heads=4, num_kv_heads=2)
        page = 16 * 2 * 256 * 2
        (call,) = calls_of(asked, (8,), "cpu", context_len=64, max_context_len=4096, cache_bytes=10 * page)
        table = call.arguments["block_table"]
        assert call.arguments["k_cache"].shape[0] == 10
        assert tuple(table.shape) == (8, 256)
        assert 0 <= int(table.min()) <= int(table.max()) < 10
        (call,) = calls_of(asked, (8,), "cpu", context_len=64)
        assert len(call.arguments["block_table"].unique()) == 8 * 4, "every sequence has pages of its own"

    def test_equal_seeds_give_equal_calls(self):
        asked = need("quantize_fp8", {"width": 128})
        first, second, other = (next(calls_of(asked, (4,), "cpu", seed=seed)) for seed in (1, 1, 2))
        assert first.arguments["x"].equal(second.arguments["x"])
        assert not first.arguments["x"].equal(other.arguments["x"])

    def test_large_tensors_repeat_what_was_drawn(self):
        (call,) = calls_of(need("fp8_gemm", n=2048, k=1024), (1,), "cpu")
        b = call.arguments["b"]
        assert torch.isfinite(b.float()).all()
        assert (b[0] == b[1]).float().mean() < 0.2, "rows differ"
        assert len(b[-1].float().unique()) > 50


class TestErrors:
    def test_packed_weights_are_their_plans(self):
        asked = need("fp4_gemm", weight_layout="marlin-1")
        with pytest.raises(ConfigurationError, match="weights in layout marlin-1 are made by the plan that packs them"):
            next(calls_of(asked, (1,), "cpu"))

    def test_the_explained_problem_is_the_same(self):
        (call,) = calls_of(need("topk_indices", k=8, row_ends=True), (2,), "cpu")
        assert kernelhub.explain(call.op, **call.arguments).problem == call.problem
