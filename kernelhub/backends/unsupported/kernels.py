"""Records of kernels of other libraries for which there is no adapter: each gives its reason, and is never selected."""

from __future__ import annotations

from typing import NamedTuple

from kernelhub.dispatch.constraint import Rule, anything
from kernelhub.dispatch.kernel import Backend, Band, Kernel
from kernelhub.ops.moe.experts.problem import ACTIVATIONS

BACKEND = Backend("unsupported", "communication of other libraries that kernelhub does not call, with the reason")

NO_ADAPTER = "no_adapter"
_SUMS = ("all_reduce", "all_reduce_rms_norm")
_EXPERTS = ("moe_dispatch", "moe_combine")
_CONNECTED = ("dtype", "world_size", "group_backend", "link", "peers")
_ROUTED = (*_CONNECTED, "hidden_size", "top_k", "num_experts", "capacity", "format")
_FACETS = {
    "all_reduce": (*_CONNECTED, "message"),
    "all_reduce_rms_norm": (*_CONNECTED, "message", "hidden_size", "weight_dtype", "format", "scale_dtype"),
    "moe_dispatch": _ROUTED,
    "moe_combine": (*_ROUTED, "rows"),
    "expert_parallel_moe": (
        *("dtype", "weights", "activation_dtype", "num_experts", "top_k", "hidden_size", "intermediate_size"),
        *("world_size", "group_backend", "capacity", "link", "peers"),
    ),
}
_FEATURES = {
    "moe_dispatch": frozenset({"scales"}),
    "all_reduce_rms_norm": frozenset({"ue8m0", "column"}),
    "expert_parallel_moe": frozenset({*(f"activation={name}" for name in ACTIVATIONS[1:]), "w13_bias", "w2_bias"}),
}
_OTHER_SUMS = "select triton.one_shot or torch.symm_mem_two_shot, which use no multicast"
_OTHER_EXPERTS = "leave backend= out, or select triton.push over NVLink"
_MULTICAST = (
    "it creates NVLink multicast objects, which kernelhub never does: where a GPU cannot join one, the ranks hang"
)


class Unsupported(NamedTuple):
    """One line of the table.

    Attributes:
        name: of the record.
        ops: for which it would be a kernel.
        library: its name and what of it is meant.
        reason: why there is no adapter.
        remedy: what to do instead.
    """

    name: str
    ops: tuple[str, ...]
    library: str
    reason: str
    remedy: str


LIBRARIES = (
    Unsupported(
        "deep_ep_low_latency",
        _EXPERTS,
        "DeepEP 1, low latency (Buffer.low_latency_dispatch)",
        "it sends no weights of the router, which the handle of a dispatch has for each received row, and no float8 "
        "that is given; the rows of an expert come in no fixed order, where moe_dispatch promises that of ranks and "
        "tokens; it has two buffers, of which its results are said to be parts; it requires NVSHMEM with "
        "IBGDA, also over NVLink alone (allow_nvlink_for_low_latency_mode leaves NVSHMEM's peer access on, no more)",
        _OTHER_EXPERTS,
    ),
    Unsupported(
        "low_latency_masked",
        ("expert_parallel_moe",),
        "DeepEP's low-latency dispatch with masked grouped products",
        "no kernel of moe_dispatch is that dispatch: see unsupported.deep_ep_low_latency of moe_dispatch",
        "select moe_pairs.masked or moe_pairs.masked_fp8, the same format by other kernels",
    ),
    Unsupported(
        "trtllm_routed",
        ("expert_parallel_moe",),
        "TensorRT-LLM's experts that route tokens themselves",
        "they take the router's logits of all tokens, after a gather or on one rank; this op takes ids and weights",
        "select moe_pairs.tokens: fused_moe runs TensorRT-LLM's experts by ids",
    ),
    Unsupported(
        "deep_ep_elastic",
        _EXPERTS,
        "DeepEP 2 (ElasticBuffer)",
        "it requires NCCL 2.30.4 (torch 2.11 has 2.28.9), and runs nvcc for each shape",
        _OTHER_EXPERTS,
    ),
    Unsupported(
        "flashinfer_mnnvl_moe",
        _EXPERTS,
        "FlashInfer's two-sided all-to-all (MnnvlMoe)",
        "release 0.7.1 deprecates it, and the one-sided exchange sends the same rows without counting them first",
        "select flashinfer.moe_a2a, the one-sided exchange",
    ),
    Unsupported(
        "torch_all_to_all_vdev_2d",
        _EXPERTS,
        "torch.ops.symm_mem.all_to_all_vdev_2d",
        "a block overwrites offsets that others may still read (pytorch#192300), and a rank may have 16 experts; it "
        "requires NVSHMEM as the process's backend of symmetric memory, whose barriers do nothing (pytorch#191858), "
        "where other kernels require CUDA's",
        _OTHER_EXPERTS,
    ),
    Unsupported(
        "nixl_ep",
        _EXPERTS,
        "NIXL-EP",
        "it requires UCX, and its packages are built for single releases of torch",
        _OTHER_EXPERTS,
    ),
    Unsupported(
        "nccl_ep",
        _EXPERTS,
        "NCCL-EP (nccl-extensions)",
        "it requires NCCL 2.30.7 (torch 2.11 has 2.28.9), and communicators of its own",
        _OTHER_EXPERTS,
    ),
    Unsupported(
        "mori",
        _EXPERTS,
        "MoRI",
        "it is for AMD's gfx942 and gfx950, on which kernelhub has no kernels over peer memory",
        "leave backend= out: torch's kernels run there over RCCL",
    ),
    Unsupported(
        "pplx",
        _EXPERTS,
        "pplx-kernels and pplx-garden",
        "no package contains them",
        _OTHER_EXPERTS,
    ),
    Unsupported(
        "flashinfer_mnnvl",
        _SUMS,
        'FlashInfer\'s all-reduce with backend="mnnvl" or "auto"',
        _MULTICAST,
        f"{_OTHER_SUMS}, or flashinfer.trtllm_one_shot",
    ),
    Unsupported(
        "torch_multimem",
        ("all_reduce",),
        "torch.ops.symm_mem.multimem_all_reduce_",
        _MULTICAST,
        _OTHER_SUMS,
    ),
)
BY_NAME = {item.name: item for item in LIBRARIES}


def _kernel(op: str, item: Unsupported) -> Kernel:
    reason = f"kernelhub does not call {item.library}: {item.reason}"
    return Kernel(
        op=op,
        name=f"unsupported.{item.name}",
        target="kernelhub.backends.unsupported.refusal:refuse",
        summary=f"{item.library}: no adapter",
        band=Band.REFERENCE,
        constraints=(
            Rule(("device",), lambda problem: reason, NO_ADAPTER, item.remedy),  # on no device
            anything(*_FACETS[op]),
        ),
        features=_FEATURES.get(op, frozenset()),
    )


KERNELS = tuple(_kernel(op, item) for item in LIBRARIES for op in item.ops)
