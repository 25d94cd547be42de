"""What torch's operator scaled by block is given, on a machine that has not the operator: its layouts are its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernelhub
from kernelhub.backends.torch.gemm.fp8.scaled_mm import ScaledMm, ScaledMmBlockwise, ScaledMmRowwise
from kernelhub.dispatch.constraint import TorchBuilt
from kernelhub.dispatch.machine import Machine
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.fp8.problem import Fp8GemmProblem
from kernelhub.ops.gemm.fp8.tolerance import compare
from kernelhub.probes.device import simulated

if not hasattr(torch.ops.aten, "_scaled_mm_v2"):
    pytest.skip(f"torch {torch.__version__} has not the operator", allow_module_level=True)


def operator(
    a, b, a_scales, a_recipe, a_swizzle, b_scales, b_recipe, b_swizzle, bias, dtype, contraction, fast, *, out
):
    """As the one on a Hopper GPU: refuses what that refuses, and reads scales where that reads them."""
    (a_scale,), (b_scale,) = a_scales, b_scales
    (rows, k), n = a.shape, b.shape[1]
    assert (a_recipe, b_recipe, a_swizzle, b_swizzle) == ([4], [5], [0], [0]), "numbers of torch's enumerations"
    assert (bias, contraction, fast) == (None, [], False)
    assert not any(tensor.data_ptr() % 16 for tensor in (a, b, a_scale, b_scale, out)), "CUBLAS_STATUS_NOT_SUPPORTED"
    assert rows % 4 == 0, "CUBLAS_STATUS_NOT_SUPPORTED"
    assert (a.stride(), b.stride()) == ((k, 1), (1, k))
    assert (out.shape, out.dtype, out.is_contiguous()) == ((rows, n), dtype, True)
    blocks = -(-k // 128)
    whole = -(-blocks // 4) * 4
    assert (tuple(a_scale.shape), a_scale.stride()) == ((rows, blocks), (1, rows))
    assert (tuple(b_scale.shape), b_scale.stride()) == ((whole, -(-n // 128)), (1, whole))
    spread_a = a_scale.repeat_interleave(128, 1)[:, :k]
    spread_b = b_scale[:blocks].repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
    out.copy_((a.float() * spread_a) @ (b.float() * spread_b))
    return out


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 64, 130])
@pytest.mark.parametrize(("n", "k"), [(576, 768), (256, 512), (16, 128)])
@pytest.mark.parametrize("strided", [False, True], ids=["rows", "columns"])
def test_the_operator_is_given_what_it_takes(rows: int, n: int, k: int, strided: bool) -> None:
    arguments = fp8_gemm_inputs(tokens=rows, n=n, k=k, scaling="block")
    adapter = ScaledMmBlockwise(Fp8GemmProblem(device=simulated("H200"), scaling="block", n=n, k=k))
    adapter._multiply = operator
    if strided:
        arguments["a_scale"] = arguments["a_scale"].t().contiguous().t()
        arguments["a"] = arguments["a"].view(torch.uint8).t().contiguous().t().view(arguments["a"].dtype)
    out = torch.full((rows, 2 * n) if strided else (rows, n), torch.nan, dtype=torch.bfloat16)
    place = out[:, ::2] if strided else out
    adapter.launch(*(arguments[name] for name in ("a", "b", "a_scale", "b_scale")), None, place)
    agreement = compare(place, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=False)
    assert agreement.ok, str(agreement)
    assert not strided or out[:, 1::2].isnan().all()
    assert adapter.workspace_bytes(num_tokens=rows) >= 8 * rows


def test_another_torch_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Fp8GemmProblem(device=dataclasses.replace(simulated("H200"), simulated=False))
    for version, built, fine in (
        ("2.11.0+cu128", "12.8", False),
        ("2.11.0+cu129", "12.9", True),
        ("2.14.0", "13.0", True),
        ("2.10.0", "13.0", False),
        ("2.11.0+cpu", None, False),
    ):
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.version, "cuda", built)
        rejection = TorchBuilt("12.9", at_least="2.11").reject(problem, Machine())
        assert (rejection is None) == fine
        if rejection is not None:
            assert rejection.code == "package_version"
            assert "pip install" in rejection.remedy
            assert version in rejection.reason


def off(tensor: torch.Tensor) -> torch.Tensor:
    """The same from an address that is no multiple of 16 bytes."""
    raw = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    memory = raw.new_empty(raw.numel() + 1)
    memory[1:].view(raw.shape).copy_(raw)
    return memory[1:].view(raw.shape).view(tensor.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_addresses_that_libraries_read_are_multiples_of_16_bytes(
    scaling: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else cuBLASLt ends the call with CUBLAS_STATUS_NOT_SUPPORTED."""

    def older(a, b, a_scale, b_scale, *, bias, out_dtype, use_fast_accum, out):
        assert not any(tensor.data_ptr() % 16 for tensor in (a, b, a_scale, b_scale, bias, out))
        out.copy_((a.float() * a_scale) @ (b.float() * b_scale) + bias)

    monkeypatch.setattr(torch, "_scaled_mm", older)
    made = {"tensor": ScaledMm, "row": ScaledMmRowwise, "block": ScaledMmBlockwise}[scaling]
    takes_bias = scaling != "block"
    arguments = fp8_gemm_inputs(tokens=16, n=64, k=256, scaling=scaling, bias=takes_bias, out_dtype=dtype)
    problem = Fp8GemmProblem(device=simulated("H200"), scaling=scaling, n=64, k=256, out_dtype=str(dtype)[6:])
    adapter = made(problem)
    if scaling == "block":
        adapter._multiply = operator
    given = {name: off(value) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    out = off(torch.zeros(16, 64, dtype=dtype))
    adapter.launch(*(given.get(name) for name in ("a", "b", "a_scale", "b_scale", "bias")), out)
    agreement = compare(out, kernelhub.fp8_gemm.reference, arguments, matrix_instructions=False)
    assert agreement.ok, str(agreement)
