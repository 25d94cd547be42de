"""Our CUDA kernels keep the contracts of their ops, thread by thread on a CPU."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.cuda import library
from kernelhub.backends.cuda.nvrtc import SOURCES
from kernelhub.ops.fused_quant.inputs import norm_inputs
from kernelhub.ops.kv_cache.inputs import write_kv_cache_inputs
from kernelhub.ops.quant.inputs import activations
from kernelhub.testing import cases
from tests.cuda import emulated
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
    "rms_norm_quant rows": ("fp8_group with residual", "nvfp4, zeros, large values and NaN", "fp8_token, 8200 wide"),
    "silu_and_mul_quant rows": ("None, 129 wide", "fp8_token, bfloat16", "mxfp8, zeros, large values and NaN"),
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


def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, line: str, fault: str) -> None:
    """Let kernels be compiled from sources with a fault in one of them."""
    for path in SOURCES.iterdir():
        shutil.copy(path, tmp_path)
    text = (tmp_path / file).read_text()
    assert line in text
    (tmp_path / file).write_text(text.replace(line, fault))
    wrong = lambda source, constants, device: emulated.EmulatedLibrary(source, constants, tmp_path)  # noqa: E731
    monkeypatch.setattr(library, "library", wrong)


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
