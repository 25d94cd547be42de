"""DeepGEMM's functions under vLLM's names, imported at their first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernelhub.compat.vllm.deep_gemm.support import copy, is_deep_gemm_e8m0_used
from kernelhub.compat.vllm.here import capability
from kernelhub.compat.vllm.library import load
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import KernelUnavailable

_functions: dict[tuple[str, str], Callable[..., Any]] = {}
_prepared: set[str] = set()
_rounds_on: dict[tuple[int, int] | None, bool] = {}  # by device, until settings change
HUB.on_change(_rounds_on.clear)


def deep_gemm(*names: str) -> Callable[..., Any]:
    """DeepGEMM's function of the first of these names that exists; later names are older spellings.

    Raises:
        KernelUnavailable: none exists, or DeepGEMM is not installed; a RuntimeError. The next call searches again.
    """
    module = copy().value or ""
    function = _functions.get((module, names[0]))
    if function is not None:
        return function
    failures = []
    for name in names:
        try:
            found: Callable[..., Any] = load(f"{module or 'deep_gemm'}:{name}", copy)
        except KernelUnavailable as failure:
            failures.append(str(failure))
            continue
        _prepare(module)
        _functions[module, names[0]] = found
        return found
    raise KernelUnavailable("; ".join(failures))


def cublaslt_gemm_nt(*args: Any, **kwargs: Any) -> Any:
    """cuBLASLt's product through DeepGEMM."""
    return deep_gemm("cublaslt_gemm_nt")(*args, **kwargs)


def fp8_gemm_nt(*args: Any, **kwargs: Any) -> Any:
    """DeepGEMM's fp8 product; ``is_deep_gemm_e8m0_used=`` overrides the setting of how scales are rounded."""
    run = deep_gemm("fp8_gemm_nt")
    rounds = kwargs.pop("is_deep_gemm_e8m0_used", None)
    rounds = _rounds() if rounds is None else rounds
    return run(*args, disable_ue8m0_cast=not rounds, **kwargs)


def fp8_einsum(*args: Any, **kwargs: Any) -> Any:
    """DeepGEMM's fp8 einsum."""
    return deep_gemm("fp8_einsum")(*args, **kwargs)


def m_grouped_fp8_gemm_nt_contiguous(*args: Any, **kwargs: Any) -> Any:
    """DeepGEMM's grouped fp8 product over rows in order of their groups."""
    return _rounding("m_grouped_fp8_gemm_nt_contiguous")(*args, **kwargs)


def m_grouped_fp8_fp4_gemm_nt_contiguous(*args: Any, **kwargs: Any) -> Any:
    """The same with fp4 weights."""
    return _rounding("m_grouped_fp8_fp4_gemm_nt_contiguous")(*args, **kwargs)


def fp8_m_grouped_gemm_nt_masked(*args: Any, **kwargs: Any) -> Any:
    """DeepGEMM's grouped fp8 product over a masked number of rows per group; 2.8 dropped the name with fp8."""
    return _rounding("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked")(*args, **kwargs)


def transform_sf_into_required_layout(*args: Any, **kwargs: Any) -> Any:
    """Scales in the layout that DeepGEMM reads on this device."""
    return _rounding("transform_sf_into_required_layout")(*args, **kwargs)


def get_num_sms() -> int:
    """Multiprocessors that DeepGEMM uses."""
    return int(deep_gemm("get_num_sms")())


def set_num_sms(num_sms: int) -> None:
    """Limit the multiprocessors that DeepGEMM uses in this process."""
    deep_gemm("set_num_sms")(num_sms)


def get_col_major_tma_aligned_tensor(x: Tensor) -> Tensor:
    """Column-major scales, each column aligned for the tensor memory accelerator."""
    return _tensor(deep_gemm("get_mn_major_tma_aligned_tensor")(x))


def pack_ue8m0_to_int(x: Tensor) -> Tensor:
    """Four UE8M0 scales in an int32."""
    return _tensor(deep_gemm("pack_ue8m0_to_int")(x))


def get_mn_major_tma_aligned_packed_ue8m0_tensor(x: Tensor) -> Tensor:
    """Packed and column-major scales."""
    return _tensor(deep_gemm("get_mn_major_tma_aligned_packed_ue8m0_tensor")(x))


def get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: Tensor, ks_tensor: Tensor, ks: list[int], gran_k: int
) -> Tensor:
    """The same for the scales of every expert, ``[experts, N, K / gran_k]``."""
    name = "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor"
    return _tensor(deep_gemm(name)(sf, ks_tensor, ks, gran_k))


def tf32_hc_prenorm_gemm(x: Tensor, fn: Tensor, out: Tensor, sqrsum: Tensor, num_split: int) -> Any:
    """``out = x @ fn.T`` in tf32, and the sums of squares of x's rows, in `num_split` parts."""
    return deep_gemm("tf32_hc_prenorm_gemm")(x, fn, out, sqrsum, num_split)


def mega_mhc(*args: Any, **kwargs: Any) -> None:
    """DeepGEMM's fused hyper-connections, written to tensors of the caller."""
    deep_gemm("mega_mhc")(*args, **kwargs)


def bf16_mega_gate(
    x: Tensor,
    weight: Tensor,
    num_topk: int,
    *,
    scoring_func: str,
    routed_scaling_factor: float,
    ep_rank: int,
    bias: Tensor | None = None,
    image_bias: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    fix_routing_mask: Tensor | None = None,
    unmapped_topk_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Route tokens ``x [T, H]`` by ``weight [E, H]``: weights ``[T, num_topk]``, float32, and ids, int64.

    The results are allocated here and not by DeepGEMM, so that they are in a CUDA graph's pool.
    """
    run = deep_gemm("bf16_mega_gate")
    ids = torch.empty((x.shape[0], num_topk), dtype=torch.int64, device=x.device)
    weights = torch.empty((x.shape[0], num_topk), dtype=torch.float32, device=x.device)
    run(
        x,
        weight,
        num_topk,
        use_shared_as_routed=False,
        num_shared_experts=0,
        routed_scaling_factor=routed_scaling_factor,
        ep_rank=ep_rank,
        scoring_func=scoring_func,
        bias=bias,
        image_bias=image_bias,
        image_token_mask=image_token_mask,
        fix_routing_mask=fix_routing_mask,
        unmapped_topk_idx=unmapped_topk_idx,
        out=(ids, weights),
    )
    return weights, ids


def _rounding(*names: str) -> Callable[..., Any]:
    """Pass to a function whether to round scales to powers of two."""
    run, rounds = deep_gemm(*names), _rounds()
    return lambda *args, **kwargs: run(*args, disable_ue8m0_cast=not rounds, **kwargs)


def _rounds() -> bool:
    """`is_deep_gemm_e8m0_used`, cached, since every product reads it."""
    sm = capability()
    rounds = _rounds_on.get(sm)
    if rounds is None:
        rounds = _rounds_on[sm] = is_deep_gemm_e8m0_used()
    return rounds


def _prepare(module: str) -> None:
    """Enable programmatic dependent launch of DeepGEMM's kernels, as vLLM does, if the device supports it."""
    sm = capability()
    if module in _prepared or sm is None or sm < (9, 0):
        return
    _prepared.add(module)
    try:
        load(f"{module}:set_pdl", copy)(True)
    except KernelUnavailable:
        return  # earlier releases do not have this setting


def _tensor(result: Tensor) -> Tensor:
    return result
