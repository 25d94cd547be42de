"""Sizes that the order of kernels depends on: few and many tokens of experts, short and long sequences of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.dispatch.problem import Schema, bucket, facet
from kernelhub.errors import ConfigurationError
from kernelhub.ops.attention.problem import LONG_TOKENS, DenseAttentionProblem
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp4.problem import Fp4GemmProblem
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.problem import Fp8GemmProblem
from kernelhub.ops.indexer.problem import TopKProblem
from kernelhub.ops.models.batches import counts_of, need_of
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.problem import MOST_FEW, ExpertsProblem
from kernelhub.ops.moe.experts.tolerance import compare
from kernelhub.probes.device import DeviceFacts, simulated
from kernelhub.warming.forms import forms_of

CPU, MACHINE = simulated("CPU"), SimulatedMachine({"triton": "3.7.1"})
SMALL = {"num_experts": 3, "top_k": 2, "hidden_size": 32, "intermediate_size": 16}
FP8 = {"weights": "fp8_block", "activation_dtype": "float8_e4m3fn"}


def sequences(tokens: int, keys: int | None = None) -> dict[str, Any]:
    k = torch.empty(2, keys or tokens, 1, 8)
    return {"q": torch.empty(2, tokens, 2, 8), "k": k, "v": k}


def test_a_record_need_not_mention_a_size() -> None:
    @dataclass(frozen=True)
    class Problem:
        device: DeviceFacts = facet("where")
        rows: str = bucket("rows", ("few", "many"), "few")

    schema = Schema(Problem)
    assert schema.structural == {"device"}
    assert schema.features_used(Problem(CPU, "many")) == []
    assert (schema.facets["rows"].size, schema.facets["device"].size) == (True, False)
    assert schema.facets["rows"].wrong_with("some") == "it takes few, many"


@pytest.mark.parametrize(("tokens", "rows"), [(0, "few"), (MOST_FEW, "few"), (MOST_FEW + 1, "many"), (5000, "many")])
def test_a_call_of_experts_has_few_tokens_or_many(tokens: int, rows: str) -> None:
    assert kernelhub.fused_moe.explain(**moe_inputs(tokens=tokens, **SMALL)).problem.rows == rows


def test_calls_of_experts_have_two_keys_whatever_the_number_of_tokens() -> None:
    given = [moe_inputs(tokens=tokens, **SMALL) for tokens in (0, 1, 7, 64, 500, 512, 513, 3000)]
    assert len({kernelhub.fused_moe.op.parse(None, (), one).key for one in given}) == 2


@pytest.mark.parametrize("prepared", [3, MOST_FEW + 1])
def test_a_plan_of_experts_takes_both(prepared: int) -> None:
    layer = moe_inputs(tokens=prepared, **SMALL)
    plan = kernelhub.fused_moe.prepare(**layer)
    for tokens in (5, MOST_FEW + 2):
        given = {
            **layer,
            **{name: moe_inputs(tokens=tokens, **SMALL)[name] for name in ("x", "topk_weights", "topk_ids")},
        }
        out = plan.run(given["x"], given["topk_weights"], given["topk_ids"])
        assert compare(out, given).ok
        assert torch.equal(out, kernelhub.fused_moe(**given, backend=plan.selection.selected))


@pytest.mark.parametrize(
    ("given", "length"),
    [
        (sequences(1, LONG_TOKENS), "short"),
        (sequences(LONG_TOKENS - 1), "short"),
        (sequences(LONG_TOKENS), "long"),
        (sequences(LONG_TOKENS + 9) | {"causal": True, "window": 4}, "long"),
    ],
)
def test_queries_of_every_sequence_are_long_or_short(given: dict[str, Any], length: str) -> None:
    problem = kernelhub.attention.explain(**given).problem
    assert (problem.length, problem.q_len) == (length, "one" if given["q"].shape[1] == 1 else "many")


def test_ragged_sequences_are_not_long() -> None:
    offsets = torch.tensor([0, LONG_TOKENS, LONG_TOKENS + 3], dtype=torch.int32)
    q, k = torch.empty(LONG_TOKENS + 3, 2, 8), torch.empty(LONG_TOKENS + 3, 1, 8)
    given = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": LONG_TOKENS}
    assert kernelhub.attention.explain(q, k, k, **given).problem.length == "short"
    for others in ({"ragged": True}, {"q_len": "one"}):
        with pytest.raises(ConfigurationError, match="not ragged"):
            kernelhub.explain("attention", device="H200", length="long", **others)


def test_long_sequences_have_an_order_of_their_own_where_it_was_measured() -> None:
    def order(**facets: Any) -> tuple[str | None, bool]:
        selection = kernelhub.explain("attention", device="H200", machine=MACHINE, length="long", **facets)
        return selection.selected, "hopper/long_prefill" in str(selection)

    pipelined = "gluon.prefill_pipelined"
    assert order(causal=True) == (pipelined, True)
    assert order(causal=False) == (pipelined, False)
    assert order(causal=True, head_dim_qk=64) == (pipelined, False)
    with kernelhub.use(disable=pipelined):
        assert order(causal=True) == ("torch.sdpa", True)
        assert order(causal=False) == ("torch.sdpa", False)
        assert order(causal=True, head_dim_qk=64) == ("torch.sdpa", False)
        short = kernelhub.explain("attention", device="H200", machine=MACHINE, causal=True)
        assert short.selected == "torch.sdpa"


@pytest.mark.parametrize("device", ["A100", "L40S", "B200", "RTX5090"])
def test_elsewhere_long_sequences_have_the_order_of_others(device: str) -> None:
    long, short = (
        [item.kernel for item in kernelhub.explain("attention", device=device, causal=True, length=of).decisions]
        for of in ("long", "short")
    )
    assert long == short


def test_many_tokens_go_to_the_kernel_that_was_measured_faster() -> None:
    found = [
        kernelhub.explain("fused_moe", device=device, machine=MACHINE, rows=rows, **FP8).selected
        for device in ("H200", "A100")
        for rows in ("few", "many")
    ]
    assert found == ["triton.experts", "gluon.experts", "triton.experts", "triton.experts"]


@pytest.mark.parametrize(("rows", "word"), [(0, "few"), (31, "few"), (32, "many"), (900, "many")])
def test_a_call_of_topk_has_few_rows_or_many(rows: int, word: str) -> None:
    logits = torch.randn(rows, 40)
    assert kernelhub.topk_indices.explain(logits, 3).problem.rows == word
    plan = kernelhub.topk_indices.prepare(torch.randn(5, 40), 3)
    assert torch.equal(plan.run(logits, 3), kernelhub.topk_indices.reference(logits, 3))


def test_rows_of_logits_go_to_the_kernel_that_was_measured_faster() -> None:
    machine = SimulatedMachine({"triton": "3.7.1", "cuda": "13.0.3"})
    found = [
        kernelhub.explain("topk_indices", device=device, machine=machine, rows=rows).selected
        for device in ("H200", "A100")
        for rows in ("few", "many")
    ]
    assert found == ["cuda.select", "cuda.select", "triton.search", "triton.search"]


@pytest.mark.parametrize(
    ("rows", "word"), [(0, "few"), (64, "few"), (65, "some"), (256, "some"), (257, "many"), (900, "many")]
)
def test_a_call_of_float4_products_has_few_rows_some_or_many(rows: int, word: str) -> None:
    given = fp4_gemm_inputs(tokens=rows, n=16, k=32)
    assert kernelhub.fp4_gemm.explain(**given).problem.rows == word
    if rows % 4 == 0:
        leading = {**given, "a": given["a"].reshape(4, rows // 4, 32)}
        assert kernelhub.fp4_gemm.explain(**leading).problem.rows == word
    plan = kernelhub.fp4_gemm.prepare(**fp4_gemm_inputs(tokens=5, n=16, k=32))
    weight = {name: given[name] for name in ("b", "b_scale", "b_global_scale")}
    assert torch.equal(plan.run(given["a"], **weight), kernelhub.fp4_gemm(**given, backend=plan.kernel))


def test_rows_of_float4_products_go_to_the_kernel_that_was_measured_faster() -> None:
    machine = SimulatedMachine({"triton": "3.7.1", "cuda": "13.0.3"})
    rows = ("few", "some", "many")

    def found(**facets: Any) -> list[str | None]:
        facets = {"device": "H200", "machine": machine, **facets}
        return [kernelhub.explain("fp4_gemm", rows=one, **facets).selected for one in rows]

    cuda, triton = "cuda.fp4_gemm", "triton.fp4_gemm"
    assert found() == [triton, cuda, cuda]
    assert found(b_format="mxfp4") == [triton, cuda, triton]
    assert found(a_format="nvfp4") == found(device="A100") == found(weight_layout="fp4.tiles64x128.v1") == [triton] * 3


@pytest.mark.parametrize(("rows", "word"), [(0, "few"), (16, "few"), (17, "some"), (64, "some"), (65, "many")])
def test_a_call_of_float8_products_has_few_rows_some_or_many(rows: int, word: str) -> None:
    given = fp8_gemm_inputs(tokens=rows, n=16, k=256)
    assert kernelhub.fp8_gemm.explain(**given).problem.rows == word
    plan = kernelhub.fp8_gemm.prepare(**fp8_gemm_inputs(tokens=5, n=16, k=256))
    run = plan.run(given["a"], given["b"], given["a_scale"], given["b_scale"])
    assert torch.equal(run, kernelhub.fp8_gemm(**given, backend=plan.kernel))


def test_some_rows_of_float8_products_have_an_order_of_their_own_where_it_was_measured() -> None:
    own = {"triton": "3.7.1", "cuda": "13.0.3", "torch": "2.11.0"}

    def found(machine: dict[str, str], **facets: Any) -> list[str | None]:
        facets = {"device": "H200", "machine": SimulatedMachine(machine), **facets}
        return [kernelhub.explain("fp8_gemm", rows=rows, **facets).selected for rows in ("few", "some", "many")]

    triton, deep, cuda = "triton.fp8_gemm", "deep_gemm.fp8_blocks", "cuda.fp8_gemm"
    assert found(own, k=1920) == [triton, triton, cuda]
    assert found(own, k=2048) == found(own, k=4096) == [triton, cuda, cuda]
    with_deep = {**own, "deep_gemm": "2.5.0"}
    assert found(with_deep, k=1920) == [triton, triton, deep]
    assert found(with_deep, k=2048) == [triton, deep, deep]
    assert found(with_deep, k=4096) == [triton, cuda, deep]
    for facets in ({"scaling": "row"}, {"device": "A100"}, {"device": "B200"}, {"device": "RTX5090"}):
        few, some, _ = found(with_deep, k=4096, **facets)
        assert few == some


@pytest.mark.parametrize(
    ("op", "problem", "counts"),
    [
        ("fp4_gemm", Fp4GemmProblem(CPU), (1,)),
        ("fp4_gemm", Fp4GemmProblem(CPU, rows="some"), ()),
        ("fp4_gemm", Fp4GemmProblem(CPU, rows="many"), (511, 512, 4095, 4096, 8192)),
        ("fp8_gemm", Fp8GemmProblem(CPU), (1,)),
        ("fp8_gemm", Fp8GemmProblem(CPU, rows="some"), ()),
        ("fp8_gemm", Fp8GemmProblem(CPU, rows="many"), (511, 512, 4095, 4096, 8192)),
        ("topk_indices", TopKProblem(CPU, row_ends=True), (1,)),
        ("topk_indices", TopKProblem(CPU, row_ends=True, rows="many"), (511, 512, 4095, 4096, 8192)),
        ("fused_moe", ExpertsProblem(CPU, rows="few"), (1, 511)),
        ("fused_moe", ExpertsProblem(CPU, rows="many"), (512, 4095, 4096, 8192)),
        ("attention", DenseAttentionProblem(CPU), (511, 512, 4095, 4096, 8192)),
        ("attention", DenseAttentionProblem(CPU, length="long"), (4096, 8192)),
    ],
)
def test_warm_up_calls_a_class_with_its_own_sizes(op: str, problem: Any, counts: tuple[int, ...]) -> None:
    assert counts_of(need_of(op, problem), (1, 511, 512, 4095, 4096, 8192)) == counts
    assert len(forms_of([need_of(op, problem)])) == (3 if op in ("fp4_gemm", "fp8_gemm") else 2)


ROTATES = {"rope": "neox", "q": True, "rotary_dim": 128}


@pytest.mark.parametrize(
    ("op", "facets", "on_hopper", "elsewhere"),
    [
        ("quantize_fp8", {"granularity": "group"}, "cuda.quantize", "triton.quantize"),
        ("quantize_fp8", {"granularity": "token"}, "cuda.quantize", "triton.quantize"),
        ("write_kv_cache", ROTATES, "cuda.rope_write", "triton.rope_write"),
        ("write_kv_cache", {}, "cuda.write", "triton.write"),
        ("write_kv_cache", {"kv_scale": "value"}, "cuda.write", "triton.write"),
        ("rms_norm_quant", {"format": "fp8_group"}, "cuda.rows", "triton.rows"),
        ("rms_norm_quant", {"format": "fp8_token"}, "cuda.rows", "triton.rows"),
        ("rms_norm_quant", {"format": "none"}, "triton.rows", "triton.rows"),
        ("silu_and_mul_quant", {"format": "fp8_group"}, "cuda.rows", "triton.rows"),
        ("silu_and_mul_quant", {"format": "nvfp4"}, "triton.rows", "triton.rows"),
        ("merge_attention_states", {}, "cuda.merge", "triton.merge"),
        ("concat_mla_k", {}, "cuda.concat", "triton.concat"),
    ],
)
def test_small_ops_run_in_the_kernel_that_was_measured_faster(op, facets, on_hopper, elsewhere) -> None:
    machine = SimulatedMachine({"triton": "3.7.1", "cuda": "13.0.3"})
    for device, expected in (("H200", on_hopper), ("A100", elsewhere)):
        assert kernelhub.explain(op, device=device, machine=machine, **facets).selected == expected, device
