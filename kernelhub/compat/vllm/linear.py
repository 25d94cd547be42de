"""Kernels of vLLM's quantised linear layers that call kernelhub; this module imports vLLM.

vLLM quantises the activations, and kernelhub multiplies: `fp8_gemm` for weights in float8 with one scale, a scale per
channel, or per block of 128 x 128; `fp4_gemm` for NVFP4 and MXFP4 weights times activations that are not quantised. The
products are operators of torch.library, so that they are one node of a graph that vLLM compiles.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels import linear as vllm_linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.platforms import current_platform

from kernelhub.compat.start import Rows
from kernelhub.compat.vllm.start import ENGINE, follow
from kernelhub.dispatch.explain import explain
from kernelhub.errors import KernelhubError, NotWarmed
from kernelhub.ops.gemm.fp4.op import fp4_gemm
from kernelhub.ops.gemm.fp8.op import fp8_gemm

Answer = tuple[bool, str | None]
GROUP = 128
_NATIVE_FLOAT4 = 100  # capability from which vLLM's own kernels also quantise activations to float4

LIBRARY = torch.library.Library("kernelhub_vllm", "FRAGMENT")
LIBRARY.define(
    "fp8_product(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, ScalarType out_dtype) -> Tensor"
)
LIBRARY.define("fp4_product(Tensor a, Tensor b, Tensor b_scale, Tensor? b_global_scale, Tensor? bias) -> Tensor")


def fp8_product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """`kernelhub.fp8_gemm`; a call that the warm-up did not cover is logged and runs."""
    per_row = a_scale.numel() > 1
    form = b.shape, b_scale.shape, b_scale.dtype, a_scale.shape[1:] if per_row else None, bias is None, out_dtype
    ENGINE.noted.note(form, lambda: _fp8_rows(b, a_scale, b_scale, bias, out_dtype))
    return _served(lambda: fp8_gemm(a, b, a_scale, b_scale, bias, out_dtype))


def fp4_product(a: Tensor, b: Tensor, b_scale: Tensor, b_global_scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """`kernelhub.fp4_gemm` of activations that are not quantised."""
    form = b.shape, b_scale.shape, b_scale.dtype, a.dtype, b_global_scale is None, bias is None
    ENGINE.noted.note(form, lambda: _fp4_rows(a, b, b_scale, b_global_scale, bias))
    factor = None if b_global_scale is None else b_global_scale.reshape(1)
    return _served(lambda: fp4_gemm(a, b, b_scale=b_scale, b_global_scale=factor, bias=bias, out_dtype=a.dtype))


def _served(call: Callable[[], Tensor]) -> Tensor:
    try:
        return call()
    except NotWarmed as error:
        result: Tensor = ENGINE.serve(call, error)
        return result


def _fp8_rows(b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Rows:
    (n, k), device = b.shape, b.device
    transposed = a_scale.ndim == 2 and a_scale.shape[1] > 1 and a_scale.stride(0) == 1
    single, columns = a_scale.numel() == 1, a_scale.shape[1:]

    def arguments(tokens: int) -> dict[str, Any]:
        shape = a_scale.shape if single else (tokens, *columns)
        scale = torch.ones(shape[::-1] if transposed else shape, dtype=torch.float32, device=device)
        a = torch.zeros(tokens, k, dtype=torch.float8_e4m3fn, device=device)
        scales = {"a_scale": scale.t() if transposed else scale, "b_scale": b_scale}
        return {"a": a, "b": b, **scales, "bias": bias, "out_dtype": out_dtype}

    return Rows(fp8_gemm, [f"fp8_gemm {n} x {k}"], arguments)


def _fp4_rows(a: Tensor, b: Tensor, b_scale: Tensor, b_global_scale: Tensor | None, bias: Tensor | None) -> Rows:
    k, dtype = a.shape[-1], a.dtype
    factor = None if b_global_scale is None else b_global_scale.reshape(1)

    def arguments(tokens: int) -> dict[str, Any]:
        rows = torch.zeros(tokens, k, dtype=dtype, device=b.device)
        named = {"b_scale": b_scale, "b_global_scale": factor, "bias": bias, "out_dtype": dtype}
        return {"a": rows, "b": b, **named}

    return Rows(fp4_gemm, [f"fp4_gemm {b.shape[0]} x {k}"], arguments)


def _fake_fp8(a: Tensor, b: Tensor, a_scale: Any, b_scale: Any, bias: Any, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def _fake_fp4(a: Tensor, b: Tensor, b_scale: Any, b_global_scale: Any, bias: Any) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[0])


torch.library.register_fake("kernelhub_vllm::fp8_product", _fake_fp8, lib=LIBRARY)
torch.library.register_fake("kernelhub_vllm::fp4_product", _fake_fp4, lib=LIBRARY)
LIBRARY.impl("fp8_product", fp8_product, "CompositeExplicitAutograd")
LIBRARY.impl("fp4_product", fp4_product, "CompositeExplicitAutograd")


def supported(op: Any, **facets: Any) -> Answer:
    """Whether kernelhub has a kernel for a layer, with the reason for vLLM's log."""
    try:
        selection = explain(op, **facets)
    except KernelhubError as error:
        return False, f"kernelhub: {error}"
    if selection.kernel is None:
        first = selection.decisions[0]
        return False, f"kernelhub has no kernel; {first.kernel}: {first.reason}"
    return True, None


class KernelhubFP8ScaledMMLinearKernel(FP8ScaledMMLinearKernel):  # type: ignore[misc]
    """Weights with one scale or one per channel, activations with one or one per token."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return supported(fp8_gemm, scaling="tensor")

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        rows, channels = c.activation_quant_key.scale.group_shape, c.weight_quant_key.scale.group_shape
        if not (rows.is_per_tensor() or rows.is_per_token()):
            return False, f"kernelhub needs activations with a scale per tensor or token, not {rows}"
        # A scale per channel is written (-1, 1) or (1, -1): weights are [K, N] or [N, K].
        if not (channels.is_per_tensor() or channels.is_per_channel() or channels.is_per_token()):
            return False, f"kernelhub needs weights with a scale per tensor or channel, not {channels}"
        single = rows.is_per_tensor() and channels.is_per_tensor()
        n, k = c.weight_shape
        scaling = "tensor" if single else "row"
        return supported(fp8_gemm, scaling=scaling, n=n, k=k, out_dtype=_name(c.out_dtype))

    def apply_scaled_mm(
        self,
        *,
        A: Tensor,
        B: Tensor,
        out_dtype: torch.dtype,
        As: Tensor,
        Bs: Tensor,
        bias: Tensor | None,
        output_shape: list[int],
    ) -> Tensor:
        product: Tensor = torch.ops.kernelhub_vllm.fp8_product(A, B.t(), As, Bs, bias, out_dtype)
        return product.view(*output_shape)


class KernelhubFp8BlockScaledMMLinearKernel(Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
    """Weights with a scale per 128 x 128, activations with one per token and 128 columns."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        scale = config.activation_quant_key.scale
        # The layout that Hopper's tensor memory accelerator reads; kernels without it read any strides.
        self.quant_fp8 = QuantFP8(static=scale.static, group_shape=scale.group_shape, column_major_scales=True)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return supported(fp8_gemm, scaling="block")

    @classmethod
    def can_implement(cls, config: Any) -> Answer:
        base, reason = super().can_implement(config)
        if not base:
            return False, reason
        groups = tuple(config.activation_quant_key.scale.group_shape), tuple(config.weight_quant_key.scale.group_shape)
        if groups != ((1, GROUP), (GROUP, GROUP)):
            return False, f"kernelhub needs scales per 1 x 128 and 128 x 128, not {groups[0]} and {groups[1]}"
        n, k = config.weight_shape
        return supported(fp8_gemm, scaling="block", n=n, k=k, out_dtype=_name(config.out_dtype))

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        product: Tensor = torch.ops.kernelhub_vllm.fp8_product(A, B, As, Bs, None, self.config.out_dtype)
        return product


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype or torch.get_default_dtype()).removeprefix("torch.")


class _Float4:
    """What the kernels of float4 weights share: weights stay as in the checkpoint, and nothing is repacked."""

    b_format: str

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        if current_platform.has_device_capability(_NATIVE_FLOAT4):
            return False, "kernelhub's hook does not quantise activations; this device multiplies float4 by float4"
        return supported(fp4_gemm, b_format=cls.b_format)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """The weights are multiplied as they are."""

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        factor = getattr(layer, "weight_global_scale", None) if self.b_format == "nvfp4" else None
        product: Tensor = torch.ops.kernelhub_vllm.fp4_product(x, layer.weight, layer.weight_scale, factor, bias)
        return product


@functools.cache
def float4_kernel(b_format: str) -> type[Any]:
    """The class for NVFP4 or MXFP4; vLLM before 0.22 has no base class for MXFP4."""
    short = {"nvfp4": "NvFp4", "mxfp4": "MxFp4"}[b_format]
    base = getattr(importlib.import_module(f"{vllm_linear.__name__}.{b_format}.base"), f"{short}LinearKernel")

    def can_implement(cls: type, config: Any) -> Answer:
        quantised = getattr(config, "activation_quant_key", None)
        # compressed-tensors asks for MXFP4 activations of every checkpoint; before sm_100 vLLM's Marlin ignores that.
        if quantised is None or (b_format == "mxfp4" and quantised == _mxfp4_activations()):
            return True, None
        return False, f"kernelhub's hook multiplies activations that are not quantised, not {quantised}"

    body = {"b_format": b_format, "can_implement": classmethod(can_implement), "__module__": __name__}
    return type(f"Kernelhub{short}LinearKernel", (_Float4, base), body)


def _mxfp4_activations() -> Any:
    """vLLM's key of activations that a kernel quantises to MXFP4; None in releases without it."""
    keys = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
    return getattr(keys, "kMxfp4Dynamic", None)


def install(hook: str) -> None:
    """Put kernelhub's class at the head of vLLM's lists, once."""
    if hook == "fp8_linear":
        _first("_POSSIBLE_FP8_KERNELS", KernelhubFP8ScaledMMLinearKernel)
        _first("_POSSIBLE_FP8_BLOCK_KERNELS", KernelhubFp8BlockScaledMMLinearKernel)
    else:
        b_format = hook.removesuffix("_linear")
        _first(f"_POSSIBLE_{b_format.upper()}_KERNELS", float4_kernel(b_format))
    ENGINE.noted.at_first(follow)


def _first(name: str, kernel: type[Any]) -> None:
    for kernels in getattr(vllm_linear, name).values():
        if kernel not in kernels:
            kernels.insert(0, kernel)
