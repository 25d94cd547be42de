"""Which parts of FlashInfer are installed: the functions that a feature of vLLM calls, found in FlashInfer's source."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernelhub.compat.env import flag
from kernelhub.compat.vllm.answer import Answer, answer, first_bad
from kernelhub.compat.vllm.flashinfer.presence import has_flashinfer
from kernelhub.compat.vllm.here import allowed, capability, on_device
from kernelhub.dispatch.hub import HUB
from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.package import package
from kernelhub.probes.signature import Call, takes
from kernelhub.probes.source import defines

_UPDATE = 'install a newer one: pip install -U "kernelhub[flashinfer]"'
_FIRST_CUDNN_FP8 = 91701  # cuDNN 9.17.1, the first whose fp8 attention gives bf16 or fp16
_MULTIPLE_OF_N, _MULTIPLE_OF_K = 64, 128  # of block-scaled fp8 products; DeepGEMM's are the same


def _here(*targets: str) -> Finding:
    """FlashInfer is installed and defines all of these."""
    present = has_flashinfer.why()
    if not present.ok:
        return present
    return first_bad(*(HUB.machine.ask(("defines", target), _defines(target)) for target in targets))


def _defines(target: str) -> Callable[[], Finding]:
    return lambda: defines(target, remedy=_UPDATE)


def _either(*targets: str) -> Finding:
    """FlashInfer is installed and defines one of these: old and new names of one function."""
    answers = [_here(target) for target in targets]
    return next((item for item in answers if item.ok), answers[0])


def _cute_dsl(*targets: str) -> Finding:
    """As `_here`, for names that FlashInfer defines only with NVIDIA's CuTe DSL, whose package is called cutlass."""
    wanted = "nvidia-cutlass-dsl"
    dsl = HUB.machine.ask(wanted, lambda: package("cutlass", distribution=wanted))
    return first_bad(dsl, _here(*targets))


def _part(name: str, meaning: str, question: Callable[[], Finding]) -> Answer[[]]:
    """A query without arguments."""

    def asked() -> Finding:
        return question()

    asked.__name__ = asked.__qualname__ = name
    asked.__doc__ = meaning
    return answer(asked)


has_flashinfer_moe = _part(
    "has_flashinfer_moe", "FlashInfer has mixture-of-experts kernels.", lambda: _here("flashinfer.fused_moe")
)
has_flashinfer_comm = _part("has_flashinfer_comm", "FlashInfer has collectives.", lambda: _here("flashinfer.comm"))
has_flashinfer_cutedsl = _part(
    "has_flashinfer_cutedsl", "FlashInfer has kernels in CuTe DSL.", lambda: _here("flashinfer.cute_dsl")
)
has_flashinfer_bf16_gemm = _part(
    "has_flashinfer_bf16_gemm", "FlashInfer has bf16 matrix products.", lambda: _here("flashinfer:mm_bf16")
)
has_flashinfer_autotune_v2 = _part(
    "has_flashinfer_autotune_v2",
    "FlashInfer tunes into a cache that it manages itself.",
    lambda: _here("flashinfer:autotune_v2", "flashinfer:autotune_v2_reload"),
)
has_flashinfer_packed_fused_kda_decode = _part(
    "has_flashinfer_packed_fused_kda_decode",
    "FlashInfer has the packed decode of Kimi delta attention.",
    lambda: _here("flashinfer:packed_fused_kda_decode"),
)
has_flashinfer_recurrent_kda = _part(
    "has_flashinfer_recurrent_kda",
    "FlashInfer has the prefill of Kimi delta attention.",
    lambda: _here("flashinfer.kda:recurrent_kda"),
)
has_flashinfer_fused_kda_decode = _part(
    "has_flashinfer_fused_kda_decode",
    "FlashInfer has the fused decode of Kimi delta attention, which is in CuTe DSL.",
    lambda: _cute_dsl("flashinfer.kda_decode:fused_kda_decode"),
)
has_flashinfer_nvlink_two_sided = _part(
    "has_flashinfer_nvlink_two_sided",
    "FlashInfer has the two-sided all-to-all over NVLink.",
    lambda: _here(
        "flashinfer.comm:Mapping",
        "flashinfer.comm.mnnvl:MnnvlMemory",
        "flashinfer.comm.trtllm_alltoall:MnnvlMoe",
        "flashinfer.comm.trtllm_alltoall:MoEAlltoallInfo",
    ),
)
# vLLM up to 0.14 had only this one.
has_flashinfer_all2all = _part(
    "has_flashinfer_all2all", "As `has_flashinfer_nvlink_two_sided`.", lambda: has_flashinfer_nvlink_two_sided.why()
)
has_flashinfer_nvlink_one_sided = _part(
    "has_flashinfer_nvlink_one_sided",
    "FlashInfer has the one-sided all-to-all over NVLink, with a dispatch format.",
    lambda: _here(
        *(
            f"flashinfer.moe_ep:{name}"
            for name in (
                *("BootstrapConfig", "NVLinkOneSidedAlltoAll", "NVLinkOneSidedConfig", "create_communication"),
                "MoEEpCommParams.dispatch_format",
            )
        )
    ),
)
has_flashinfer_trtllm_fused_moe = _part(
    "has_flashinfer_trtllm_fused_moe",
    "FlashInfer has TensorRT-LLM's mixture-of-experts kernels in every format that vLLM can switch on.",
    lambda: _here(
        *(
            f"flashinfer.fused_moe:trtllm_{name}"
            for name in (
                *("fp8_block_scale_moe", "fp8_per_tensor_scale_moe", "fp4_block_scale_moe"),
                *("mxint4_block_scale_moe", "bf16_moe"),
            )
        )
    ),
)
has_flashinfer_cutlass_fused_moe = _part(
    "has_flashinfer_cutlass_fused_moe",
    "FlashInfer has CUTLASS's NVFP4 experts, the preparation of their weights, and TensorRT-LLM's NVFP4 experts.",
    lambda: first_bad(
        _here(
            "flashinfer.fused_moe:cutlass_fused_moe",
            "flashinfer:fp4_quantize",
            "flashinfer.fused_moe:trtllm_fp4_block_scale_moe",
        ),
        _either("flashinfer.fp4_quantization:block_scale_interleave", "flashinfer:nvfp4_block_scale_interleave"),
    ),
)
has_flashinfer_cutedsl_grouped_gemm_nt_masked = _part(
    "has_flashinfer_cutedsl_grouped_gemm_nt_masked",
    "FlashInfer has masked grouped products in CuTe DSL, and their quantisation.",
    lambda: _cute_dsl(
        "flashinfer.cute_dsl.blockscaled_gemm:grouped_gemm_nt_masked",
        "flashinfer:scaled_fp4_grouped_quantize",
        "flashinfer:silu_and_mul_scaled_nvfp4_experts_quantize",
    ),
)
has_flashinfer_cutedsl_moe_nvfp4 = _part(
    "has_flashinfer_cutedsl_moe_nvfp4",
    "FlashInfer has NVFP4 experts in CuTe DSL.",
    lambda: _cute_dsl("flashinfer:cute_dsl_fused_moe_nvfp4"),
)
has_flashinfer_b12x_gemm = _part(
    "has_flashinfer_b12x_gemm",
    "FlashInfer has fp4 products for sm_120, under the name of 0.6.11 or the one before.",
    lambda: first_bad(
        _cute_dsl("flashinfer.gemm"),
        _either(
            "flashinfer.gemm:Sm120B12xBlockScaledDenseGemmKernel", "flashinfer.gemm:Sm120BlockScaledDenseGemmKernel"
        ),
    ),
)
has_flashinfer_b12x_moe = _part(
    "has_flashinfer_b12x_moe",
    "FlashInfer has mixture-of-experts kernels for sm_120.",
    lambda: _cute_dsl("flashinfer.fused_moe:b12x_fused_moe", "flashinfer.cute_dsl.utils:convert_sf_to_mma_layout"),
)
has_flashinfer_bf16_fp4 = _part(
    "has_flashinfer_bf16_fp4",
    "FlashInfer has products of bf16 activations with fp4 weights.",
    lambda: _cute_dsl("flashinfer.gemm:mm_bf16_fp4", "flashinfer.gemm:prepare_bf16_fp4_weights"),
)
has_flashinfer_sm90_nope_mla = _part(
    "has_flashinfer_sm90_nope_mla",
    "FlashInfer's latent attention on Hopper takes an fp8 cache without a rotary part (ckv_scale_arr, from 0.6.18 on).",
    lambda: first_bad(has_flashinfer.why(), _takes_ckv_scale()),
)
has_flashinfer_sparse_mla_sm120 = _part(
    "has_flashinfer_sparse_mla_sm120",
    "FlashInfer has the decode of sparse latent attention.",
    lambda: _here(
        "flashinfer.decode:trtllm_batch_decode_sparse_mla_dsv4",
        "flashinfer.decode:trtllm_batch_decode_with_kv_cache_mla",
        "flashinfer.autotuner:autotune",
    ),
)
has_flashinfer_fp8_blockscale_gemm = _part(
    "has_flashinfer_fp8_blockscale_gemm",
    "FlashInfer has block-scaled fp8 products for this device, which is a Hopper.",
    lambda: first_bad(
        _here("flashinfer.gemm:fp8_blockscale_gemm_sm90"),
        on_device("FlashInfer's block-scaled fp8 products", exactly=((9, 0),)),
    ),
)


@answer
def has_flashinfer_sparse_mla_sm120_config(num_q_heads: int, top_k: int) -> Finding:
    """FlashInfer has the sparse decode for these sizes, by an internal table without a public query."""
    present = has_flashinfer_sparse_mla_sm120.why()
    if not present.ok:
        return present
    from kernelhub.compat.vllm.flashinfer.calls import sparse_mla_sizes

    sizes = sparse_mla_sizes()
    asked = (int(num_q_heads), int(top_k))
    if asked in sizes:
        return found("sparse MLA", None, f"compiled for {asked[0]} heads and {asked[1]} tokens")
    return lacking("sparse MLA", "value", f"not compiled for {asked[0]} heads and {asked[1]} tokens", "")


@answer
def is_flashinfer_bf16_gemm_supported(backend: str, compute_capability: int | None = None) -> Finding:
    """FlashInfer's own result whether this backend of its bf16 products runs on the device; imports FlashInfer."""
    subject = f"FlashInfer's bf16 products by {backend}"
    present = has_flashinfer_bf16_gemm.why()
    sm = capability()
    if not present.ok or sm is None:
        return present if not present.ok else lacking(subject, "vendor", "there is no NVIDIA GPU", "")
    from kernelhub.compat.vllm.flashinfer.calls import mm_bf16

    asks = getattr(mm_bf16.function(), "is_backend_supported", None)
    if asks is None:
        return lacking(subject, "symbol_missing", "this FlashInfer does not report supported backends", _UPDATE)
    number = sm[0] * 10 + sm[1] if compute_capability is None else compute_capability
    try:
        if asks(backend, number):
            return found(subject, None, f"FlashInfer reports support for sm_{number}")
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
        return lacking(subject, "symbol_unknown", f"FlashInfer's query failed: {error}", _UPDATE)
    return lacking(subject, "capability", f"FlashInfer reports no support for sm_{number}", "")


@answer
def is_flashinfer_cutedsl_bf16_gemm_supported() -> Finding:
    """FlashInfer's bf16 products in CuTe DSL run on this device, an sm_100."""
    subject = "FlashInfer's bf16 products in CuTe DSL"
    first = first_bad(_cute_dsl("flashinfer:mm_bf16"), on_device(subject, families=(10,)))
    return first if not first.ok else is_flashinfer_bf16_gemm_supported.why("cute-dsl")


@answer
def is_flashinfer_fp8_blockscale_gemm_supported() -> Finding:
    """The products are available, and neither vLLM's variable nor kernelhub's settings disable them."""
    if not flag("VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER", True):
        name = "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"
        return lacking("fp8_blockscale_gemm_sm90", "disabled", f"disabled by {name}", f"unset {name}")
    return first_bad(allowed("flashinfer", "fp8_gemm"), has_flashinfer_fp8_blockscale_gemm.why())


def should_use_flashinfer_for_blockscale_fp8_gemm(
    is_flashinfer_supported: bool,
    output_dtype: torch.dtype,
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    weight_shape: tuple[int, int],
) -> bool:
    """FlashInfer supports this block-scaled fp8 product: bf16 in and out, e4m3 weights, N % 64 == 0, K % 128 == 0."""
    n, k = weight_shape
    return (
        is_flashinfer_supported
        and input_dtype == output_dtype == torch.bfloat16
        and weight_dtype == torch.float8_e4m3fn
        and n % _MULTIPLE_OF_N == 0
        and k % _MULTIPLE_OF_K == 0
    )


@answer
def is_flashinfer_cudnn_fp8_prefill_attn_supported() -> Finding:
    """cuDNN supports fp8 attention of a vision encoder: sm_100 or newer, cuDNN 9.17.1 or newer."""
    subject = "cuDNN's fp8 attention"
    present, sm = has_flashinfer.why(), capability()
    if not present.ok:
        return present
    if sm is None or sm < (10, 0):
        return lacking(subject, "capability", f"needs sm_100 or newer; this is {sm}", "")
    version = torch.backends.cudnn.version()
    if version is not None and version < _FIRST_CUDNN_FP8:
        return lacking(
            subject, "package_version", f"needs cuDNN 9.17.1; this is {version}", "update cuDNN", str(version)
        )
    return found(subject, str(version), f"cuDNN {version}")


def _takes_ckv_scale() -> Finding:
    # From 0.7 on the class is in its own module, and flashinfer.mla re-exports all names of that module.
    calls = [
        Call(f"{module}:BatchMLAPagedAttentionWrapper.run", keywords=("ckv_scale_arr",))
        for module in ("flashinfer.mla", "flashinfer.mla._core")
    ]
    call = calls[0]

    def ask() -> Finding:
        answers = [takes(item, remedy=_UPDATE) for item in calls]
        finding = next((item for item in answers if item.code != "symbol_missing"), answers[0])
        # Only a missing ckv_scale_arr matters here; the caller passes the other parameters.
        if finding.code == "signature_changed" and "has no parameter" not in finding.reason:
            return found(call.target, None, "takes ckv_scale_arr")
        return finding

    return HUB.machine.ask(call, ask)
