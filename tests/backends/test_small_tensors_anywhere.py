"""Scales, learned scores and metadata that start at any address, or lie apart, reach libraries as they can read them.

The stand-ins ask of each that it is contiguous and starts at 16 bytes (`fake/addresses.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.ops.attention.inputs import paged_attention_inputs
from kernelhub.ops.gemm.fp8.batched.inputs import bmm_fp8_inputs
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.indexer.inputs import paged_logits_inputs
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.ops.moe.experts.inputs import moe_inputs
from tests.backends.test_deep_gemm import OnTheCpu
from tests.backends.test_flashinfer import OnFake
from tests.backends.test_flashinfer_experts import MODEL
from tests.contract.indexer import shaped


def off_by_one(tensor: Tensor) -> Tensor:
    """An element past an aligned address."""
    wide = torch.full((tensor.numel() + 1,), _garbage(tensor), dtype=tensor.dtype)
    wide[1:] = tensor.reshape(-1)
    assert wide.data_ptr() % 16 == 0
    return wide[1:].view(tensor.shape)


def apart(tensor: Tensor) -> Tensor:
    """Every third element of what holds NaN between."""
    wide = torch.full((3 * tensor.numel() + 2,), _garbage(tensor), dtype=tensor.dtype)
    wide[2::3] = tensor.reshape(-1)
    return wide[2::3].view(tensor.shape)


def _garbage(tensor: Tensor) -> float:
    return torch.nan if tensor.is_floating_point() else -(1 << 20)


PLACED = pytest.mark.parametrize("placed", [off_by_one, apart])
Place = Callable[[Tensor], Tensor]


def same(op: Any, arguments: dict[str, Any], kernel: str, placed: Place, *names: str) -> None:
    want = op(**arguments, backend=kernel)
    moved = {name: placed(arguments[name]) for name in names}
    got = op(**arguments | moved, backend=kernel)
    assert torch.equal(got, want)


@PLACED
class TestFlashInfer(OnFake):
    @pytest.mark.parametrize("runner", ["cublas", "cudnn", "cutlass"])
    def test_scales_of_whole_matrices(self, placed: Place, runner: str) -> None:
        arguments = fp8_gemm_inputs(tokens=3, n=64, k=64, scaling="tensor")
        same(kernelhub.fp8_gemm, arguments, f"flashinfer.fp8_{runner}", placed, "a_scale", "b_scale")
        batch = bmm_fp8_inputs(batch=2, tokens=3, n=64, k=64)
        same(kernelhub.bmm_fp8, batch, f"flashinfer.bmm_{runner}", placed, "a_scale", "b_scale")

    @pytest.mark.parametrize("kernel", ["flashinfer.fa2_sinks", "flashinfer.xqa", "flashinfer.trtllm_context"])
    def test_sinks(self, placed: Place, kernel: str) -> None:
        queries = {} if kernel == "flashinfer.xqa" else {"q_lens": 3}
        model = AttentionModel("wide", 8, 2, 64, 64)
        arguments = paged_attention_inputs(model, seq_lens=(40, 9), **queries, page_size=16)
        arguments |= {"sinks": torch.linspace(-1, 4, 8)}
        if kernel == "flashinfer.trtllm_context":
            arguments |= {"causal": True}
        same(kernelhub.paged_attention, arguments, kernel, placed, "sinks")

    def test_static_scales_of_experts(self, placed: Place) -> None:
        arguments = moe_inputs(model=MODEL, tokens=3, weights="fp8_tensor")
        arguments |= {"a1_scale": torch.tensor([3.0 / 448]), "a2_scale": torch.tensor([1.0 / 448])}
        same(kernelhub.fused_moe, arguments, "flashinfer.cutlass_experts_fp8", placed, "a1_scale", "a2_scale")

    def test_global_scales(self, placed: Place) -> None:
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        codes, scale, factor = kernelhub.quantize_nvfp4(x, backend="torch.quantize")
        given = {"x": codes, "scale": scale, "global_scale": factor.reshape(1), "out_dtype": torch.float16}
        same(kernelhub.dequantize_nvfp4, given, "flashinfer.dequantize", placed, "global_scale")

    @pytest.mark.parametrize(
        "kernel", ["xqa", "trtllm_gen", "trtllm_context", "cudnn_decode", "cudnn_prefill", "fa2_prefill"]
    )
    def test_metadata_of_pages(self, placed: Place, kernel: str) -> None:
        ragged = kernel in ("trtllm_context", "cudnn_prefill", "fa2_prefill")
        queries: dict[str, Any] = {"q_lens": (3, 2)} if ragged else {}
        arguments = paged_attention_inputs(AttentionModel("wide", 8, 2, 128, 128), seq_lens=(40, 9), **queries)
        arguments |= {name: arguments[name].nan_to_num() for name in ("k_cache", "v_cache")}  # cuDNN reads unused rows
        names = ("block_table", "seq_lens", *(("cu_seqlens_q",) if queries else ()))
        same(kernelhub.paged_attention, arguments, f"flashinfer.{kernel}", placed, *names)

    @pytest.mark.parametrize("kernel", ["mla_trtllm", "mla_xqa", "mla_cutlass", "mla_fa2", "mla_trtllm_listed"])
    def test_metadata_of_latents(self, placed: Place, kernel: str) -> None:
        listed = {"topk": 24} if kernel.endswith("listed") else {}
        arguments = mla_attention_inputs("deepseek-v3", num_heads=128, seq_lens=(70, 5), **listed)
        names = ("block_table", "seq_lens", *(("topk_indices",) if listed else ()))
        same(kernelhub.mla_attention, arguments, f"flashinfer.{kernel}", placed, *names)


@PLACED
class TestDeepGemm(OnTheCpu):
    def test_metadata_of_pages(self, placed: Place) -> None:
        arguments = paged_logits_inputs(shaped(32, 64), seq_lens=(70, 5), next_n=2)
        same(kernelhub.paged_mqa_logits, arguments, "fake.logits", placed, "block_table", "seq_lens")
