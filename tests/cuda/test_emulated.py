"""Our CUDA kernels keep the contracts of their ops, thread by thread on a CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.cuda import library
from kernelhub.backends.cuda.fused_quant import rows
from kernelhub.backends.cuda.indexer.topk import TopK, blocks_and_threads
from kernelhub.backends.cuda.kv_cache import write as kv
from kernelhub.backends.cuda.kv_cache.write import Write, spread
from kernelhub.backends.cuda.mla import concat as mla
from kernelhub.backends.cuda.quant import fp8
from kernelhub.ops.fused_quant.inputs import activation_inputs, norm_inputs
from kernelhub.ops.fused_quant.problem import ActivationProblem
from kernelhub.ops.indexer.inputs import topk_inputs
from kernelhub.ops.indexer.problem import TopKProblem
from kernelhub.ops.kv_cache.inputs import write_kv_cache_inputs
from kernelhub.ops.kv_cache.problem import KvCacheProblem
from kernelhub.ops.kv_cache.rope import Rope
from kernelhub.ops.mla.concat.inputs import concat_inputs
from kernelhub.ops.quant.inputs import activations
from kernelhub.probes.device import simulated
from kernelhub.testing import cases
from tests.cuda import emulated
from tests.cuda.emulated import planted
from tests.dispatch.backends import register

pytestmark = pytest.mark.skipif(not emulated.COMPILER.ok, reason=emulated.COMPILER.reason)

# A few cases of each kernel, since each form is compiled on its own; a GPU runs all of them.
CASES = {
    "write_kv_cache write": ("bfloat16", "special values to e4m3", "HND, e5m2, scales as head", "widths 7 and 3"),
    "write_kv_cache rope_write": (
        "rope neox",
        "rope interleaved of 12 of 40 columns to e4m3, scales as head",
        "rope of padding without positions",
    ),
    "concat_mla_k concat": ("bfloat16, 5 heads", "float8_e4m3fn, 5 heads"),
    "paged_attention paged_decode": (
        "window_left, causal, width 64",
        "softcap, causal, width 64",
        "sinks, causal, width 64",
        "fp8, scales by head, width 128",
        "e5m2, float16, width 64",
        "float16, width 64, lse",
        "width 256 x 256",
        "5 heads on 1",
        "ragged, one query each, width 64, padded",
        "ragged, few queries each, sinks, lse",
        "ragged, few queries each, fp8, scales by head",
    ),
    "merge_attention_states merge": ("bfloat16, lse", "float32"),
    "topk_indices select": (
        "ranges, 300 of each row",
        "3 values, 300 of each row",
        "values of every kind, 300 of each row",
        "ranges without columns and past the row",
    ),
    "route_experts routing": (
        "deepseek-v3.2",
        "NaN and infinities, softmax",
        "3 of 8 groups of 20, 6 experts",
        "softmax, biased",
    ),
    "quantize_fp8 quantize": (
        "token, bfloat16",
        "token, 2049 wide",
        "group, zeros, tiny and huge values",
        "group as e8m0, column by column, 7 x 300",
    ),
    "rms_norm_quant rows": (
        "fp8_group with residual",
        "nvfp4, zeros, large values and NaN",
        "fp8_token, 8200 wide",
        "fp8_tensor, 129 wide",
        "mxfp8 with residual",
    ),
    "silu_and_mul_quant rows": (
        "None, 129 wide",
        "fp8_token, bfloat16",
        "mxfp8, zeros, large values and NaN",
        "nvfp4, 2064 wide",
        "fp8_tensor, zeros, large values and NaN",
        "fp8_group, column by column",
    ),
}


def identity(op: str, kernel: str) -> str:
    return f"{op} {kernel.removeprefix('emulated.')}"


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(library, "library", emulated.library)
    handle = register("emulated", *emulated.KERNELS)
    yield
    handle.remove()


def test_every_kernel_is_among_those_that_are_run() -> None:
    assert {identity(kernel.op, kernel.name) for kernel in emulated.KERNELS} == set(CASES)


@pytest.mark.parametrize(("op", "kernel"), [(kernel.op, kernel.name) for kernel in emulated.KERNELS])
def test_cases_of_the_op_pass(op: str, kernel: str) -> None:
    found = {case.label: case for case in cases(op, kernel=kernel, device="cpu")}
    for label in CASES[identity(op, kernel)]:
        found[label].check()


def test_tokens_may_have_any_strides_and_any_address() -> None:
    arguments = write_kv_cache_inputs(tokens=5, num_kv_heads=2, num_q_heads=1, head_dim_qk=16)
    want = kernelhub.write_kv_cache.reference(**arguments)
    k, v = arguments["k"], arguments["v"]
    shifted = torch.zeros(v.numel() + 1, dtype=v.dtype)[1:].view(v.shape)
    moved = {"k": k.permute(2, 1, 0).contiguous().permute(2, 1, 0), "v": shifted.copy_(v)}
    got = kernelhub.write_kv_cache(**arguments | moved, backend="emulated.write")
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_a_row_that_is_no_whole_vector_and_strided_results_are_written_in_elements() -> None:
    x = activations(3, 2 * 100)[:, ::2]
    wide = torch.zeros(3, 200, dtype=torch.uint8).view(torch.float8_e4m3fn)
    want, want_scale = kernelhub.quantize_fp8.reference(x, "group")
    got, scale = kernelhub.quantize_fp8(x, "group", out=wide[:, ::2], backend="emulated.quantize")
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scale, want_scale)
    assert not wide[:, 1::2].view(torch.uint8).any()


def test_a_residual_is_updated_in_place() -> None:
    arguments = norm_inputs(tokens=3, width=256)
    want = kernelhub.rms_norm_quant.reference(**arguments)
    residual = arguments["residual"]
    got = kernelhub.rms_norm_quant(**arguments, out_residual=residual, backend="emulated.rows")
    assert got[2] is residual
    assert torch.equal(residual, want[2])


def shared_row(monkeypatch: pytest.MonkeyPatch, k: int, blocks: int, threads: int) -> TopK:
    """Selection of rows that so many blocks share, on a GPU that has clusters."""
    adapter = TopK(TopKProblem(device=simulated("H200"), k=k, row_starts=True, row_ends=True))
    monkeypatch.setattr(adapter, "_blocks_and_threads", lambda rows, columns: (blocks, threads))
    return adapter


def selected(adapter: TopK, logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    wide = torch.full((logits.shape[0], 2 * adapter.problem.k), -7, dtype=torch.int32)  # a fault writes behind it
    out = wide[:, : adapter.problem.k]
    adapter.launch(logits, starts, ends, out)
    return out


@pytest.mark.parametrize(("blocks", "threads"), [(2, 128), (4, 64), (8, 64)])
def test_blocks_of_a_cluster_share_a_row(blocks: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = shared_row(monkeypatch, 300, blocks, threads)
    for columns, levels in ((4097, None), (3001, 3), (301, None)):
        arguments = topk_inputs(tokens=3, keys=columns, k=300, levels=levels)
        logits, starts, ends = (arguments[name] for name in ("logits", "row_starts", "row_ends"))
        logits[0, 5], logits[1, 7], logits[2, 3:50] = torch.nan, torch.inf, -torch.inf
        some = torch.tensor([0, 3, columns + 5], dtype=torch.int32), torch.tensor([columns + 9, 303, 3]).int()
        for one in (logits, logits.T.contiguous().T, torch.cat([logits, logits], 1)[:, 1 : 1 + columns]):
            for bounds in ((starts, ends), some):
                want = kernelhub.topk_indices.reference(one, 300, *bounds)
                assert torch.equal(selected(adapter, one, *bounds), want)


def test_a_cluster_that_does_not_wait_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = "    team.sync();\n    all = {0, 0};\n"  # for how much other blocks have chosen
    planted(tmp_path, monkeypatch, "topk_indices.cu", wait, wait.replace("team.sync", "__syncthreads"))
    adapter, found = shared_row(monkeypatch, 300, 4, 64), []
    bounds = torch.zeros(1, dtype=torch.int32), torch.full((1,), 4000, dtype=torch.int32)
    for _ in range(2):  # in the second launch the last block is the first to come there, and finds what the first left
        logits = torch.randn(1, 4000).sort().values if found else torch.randn(1, 4000)
        want = kernelhub.topk_indices.reference(logits, 300, *bounds)
        found.append(torch.equal(selected(adapter, logits, *bounds), want))
    assert not all(found)


@pytest.mark.parametrize("columns", [1, 2049, 8192, 8193, 32768, 500_000])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 31, 33, 66, 67, 300])
def test_blocks_share_rows_only_while_all_have_a_place(rows: int, columns: int) -> None:
    for shares in (False, True):
        blocks, threads = blocks_and_threads(rows, columns, 132, shares)
        assert blocks in ((1, 2, 4, 8) if shares else (1,))
        assert threads in (256, 512, 1024)  # a thread has whole bins
        assert blocks == 1 or rows * blocks * threads <= 132 * 1024
        assert blocks == 1 or columns >= 512 * blocks


@pytest.mark.parametrize("few", [True, False])
def test_a_thread_turns_one_head_of_few_tokens_and_four_of_many(few: bool) -> None:
    arguments = write_kv_cache_inputs(tokens=40, num_kv_heads=2, num_q_heads=7, rope="neox", skipped=4)
    assert spread(8, 9, 40, 132 if few else 2).heads == (1 if few else 4)
    want = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    kernelhub.write_kv_cache(**arguments | want, backend="torch.rope_scatter")
    facts = simulated("H200") if few else dataclasses.replace(simulated("H200"), num_sms=2)
    problem = KvCacheProblem(device=facts, num_kv_heads=2, rope="neox", q=True, rotary_dim=128)
    names = ("k", "v", "k_cache", "v_cache", "slot_mapping")
    turned = Rope(*(arguments[name] for name in ("positions", "cos_sin_cache", "q")))
    Write(problem).launch(*(arguments[name] for name in names), None, None, turned)
    assert all(torch.equal(arguments[name], want[name]) for name in ("q", "k_cache", "v_cache"))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("wide", [1, 2, 4])
@pytest.mark.parametrize(("rows", "columns"), [(9, 1024), (5, 1160), (1, 136)])
def test_groups_are_the_same_however_much_of_one_a_thread_has(
    wide: int, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "wide_of", lambda vectors, num_sms: wide)
    x = activations(rows, columns)
    x[0, :130], x[-1, 5], x[-1, 7] = 0.0, torch.inf, torch.nan
    want, want_scale = kernelhub.quantize_fp8.reference(x, "group")
    got, scale = kernelhub.quantize_fp8(x, "group", backend="emulated.quantize")
    assert torch.equal(bits(got), bits(want))
    assert torch.equal(scale, want_scale)


@pytest.mark.parametrize("times", mla._TIMES)
def test_keys_are_joined_alike_however_many_vectors_a_thread_has(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "times_of", lambda vectors, num_sms: times)
    for tokens in (1, 7):
        arguments = concat_inputs(tokens=tokens, num_heads=5)
        want = kernelhub.concat_mla_k.reference(**arguments)
        assert torch.equal(kernelhub.concat_mla_k(**arguments, backend="emulated.concat"), want)


@pytest.mark.parametrize("times", kv._TIMES)
def test_tokens_are_written_alike_however_many_vectors_a_thread_has(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "times_of", lambda vectors, num_sms: times)
    for tokens, kv_dtype in ((1, None), (13, None), (13, torch.float8_e4m3fn)):
        arguments = write_kv_cache_inputs(tokens=tokens, num_kv_heads=3, num_q_heads=1, kv_dtype=kv_dtype, skipped=1)
        want = kernelhub.write_kv_cache.reference(**arguments)
        got = kernelhub.write_kv_cache(**arguments, backend="emulated.write")
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize(("each", "lanes"), [(1, 160), (2, 96), (4, 64)])
def test_norms_are_the_same_however_many_vectors_a_thread_has(
    each: int, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "layout_of", lambda vectors, whole, few: rows.Layout(each, lanes, 1, 1))
    arguments = norm_inputs(tokens=3, width=1160)
    results = kernelhub.rms_norm_quant(**arguments, backend="emulated.rows")
    for got, want in zip(results, kernelhub.rms_norm_quant.reference(**arguments), strict=True):
        assert torch.allclose(got.float(), want.float(), rtol=2**-3 if got.itemsize == 1 else 1e-5, atol=2**-9)


@pytest.mark.parametrize("num_sms", [1, 132])
def test_activations_are_the_same_by_blocks_of_every_size(num_sms: int) -> None:
    facts = dataclasses.replace(simulated("H200"), num_sms=num_sms)
    arguments = activation_inputs(tokens=3, width=1160)
    want, want_scale = kernelhub.silu_and_mul_quant.reference(**arguments)
    out, scale = torch.empty_like(want), torch.full_like(want_scale, -1.0)
    rows.Activation(ActivationProblem(device=facts, width=1160)).launch(arguments["x"], None, out, scale)
    assert torch.allclose(scale, want_scale, rtol=1e-5)
    assert torch.allclose(out.float(), want.float(), rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize("scale", [1.0, 0.013, 3e-39, 1e-27, 5e37, 448.0])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_codes_of_a_cache_are_those_of_a_division(dtype: torch.dtype, scale: float) -> None:
    arguments = write_kv_cache_inputs(tokens=40, num_kv_heads=2, num_q_heads=1, kv_dtype=dtype, skipped=0)
    k = arguments["k"]
    k.view(torch.int16).copy_(torch.arange(k.numel()).view(k.shape) * 6 + 1)  # of all magnitudes, infinities and NaN
    arguments["v"].copy_(torch.randn(k.shape) * 30)
    arguments |= {"k_scale": scale, "v_scale": scale}
    want = kernelhub.write_kv_cache.reference(**arguments)
    got = kernelhub.write_kv_cache(**arguments, backend="emulated.write")
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("tokens", [1, 40, 10_000])
@pytest.mark.parametrize("heads", [1, 9, 72, 300])
@pytest.mark.parametrize("across", [1, 6, 8, 100, 192, 256])
def test_threads_that_share_a_token_have_whole_heads(across: int, heads: int, tokens: int) -> None:
    lanes, parts, of_block, _ = spread(across, heads, tokens, 132)
    assert lanes % across == 0
    assert lanes * of_block <= 256
    assert parts * lanes <= 2 * across * heads


def test_a_missing_barrier_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(tmp_path, monkeypatch, "reduce.h", "  __syncthreads();\n", "")
    x = activations(3, 2049)
    want, _ = kernelhub.quantize_fp8.reference(x)
    made = [kernelhub.quantize_fp8(x, backend="emulated.quantize")[0] for _ in range(2)]
    assert any(not torch.equal(one.view(torch.uint8), want.view(torch.uint8)) for one in made)


def test_a_warp_that_diverges_before_a_shuffle_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "  float scale = scale_of(largest_of_lanes<WARP>(magnitude(x)));\n"
    planted(tmp_path, monkeypatch, "quantize_fp8.cu", line, f"  if (lane == 5) __syncthreads();\n{line}")
    with pytest.raises(AssertionError, match="diverge"):
        kernelhub.quantize_fp8(activations(3, 2049), "group", backend="emulated.quantize")
