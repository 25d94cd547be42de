"""The compiled libraries whose operators are called, and what adapters pass to them."""

from __future__ import annotations

from typing import Any

from kernelhub.probes.package import Library

# The first since it is built against torch's stable interface.
VLLM = Library("vllm", "_C", 'pip install "vllm>=0.33"', ("_C_stable_libtorch*.so", "_C.abi3.so"))
# Both builds are compiled for all devices; fast math distinguishes them.
_ON_HOPPER = (((9, 0), ("sm90/common_ops*.so", "common_ops*.so")),)
_ELSEWHERE = ("sm100/common_ops*.so", "common_ops*.so")
SGL = Library("sgl_kernel", "sgl_kernel", "pip install sglang-kernel", _ELSEWHERE, _ON_HOPPER)
SGL_OLD = Library("sgl_kernel", "sgl_kernel", 'pip install "sgl-kernel==0.3.21"', _ELSEWHERE, _ON_HOPPER)

# What adapters pass, as the libraries declare it: vLLM 0.33.0 (its wheel), sgl-kernel 0.3.21, sglang-kernel 0.4.10.
SCHEMAS = {
    "cutlass_scaled_mm": ("(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()"),
    "cutlass_scaled_mm_supports_fp8": "(int cuda_device_capability) -> bool",
    "cutlass_scaled_mm_supports_block_fp8": "(int cuda_device_capability) -> bool",
    "cutlass_scaled_fp4_mm": (
        "(Tensor! out, Tensor a, Tensor b, Tensor block_scale_a, Tensor block_scale_b, Tensor alpha) -> ()"
    ),
    "cutlass_fp4_group_mm": (
        "(Tensor! out, Tensor a, Tensor b, Tensor a_blockscale, Tensor b_blockscales, Tensor alphas,"
        " Tensor problem_sizes, Tensor expert_offsets, Tensor sf_offsets) -> ()"
    ),
    "cutlass_mxfp4_group_mm": (
        "(Tensor! out, Tensor a, Tensor b, Tensor a_blockscale, Tensor b_blockscales,"
        " Tensor problem_sizes, Tensor expert_offsets, Tensor sf_offsets) -> ()"
    ),
    "cutlass_scaled_mm_supports_fp4": "(int cuda_device_capability) -> bool",
    "fp8_scaled_mm": (
        "(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, ScalarType out_dtype, Tensor? bias) -> Tensor"
    ),
    "fp8_blockwise_scaled_mm": (
        "(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, ScalarType out_dtype) -> Tensor"
    ),
}


def operator(library: Library, name: str, capability: tuple[int, int]) -> Any:
    """An operator of `SCHEMAS`, loaded if need be.

    Raises:
        ImportError: the library cannot be loaded beside what is loaded, or its operator takes other calls than ours.
    """
    from kernelhub.backends.shared import operators  # needs torch, which the records do not

    return operators.operator(library, name, SCHEMAS[name], capability)


def supports(library: Library, predicate: str, capability: tuple[int, int]) -> None:
    """Whether the library was compiled for the device, by its own answer.

    Raises:
        ImportError: it says no.
    """
    if not operator(library, predicate, capability)(10 * capability[0] + capability[1]):
        sm = f"sm_{capability[0]}{capability[1]}"
        raise ImportError(
            f"this {library.package} was compiled without {sm}, according to {predicate}; {library.install}"
        )
