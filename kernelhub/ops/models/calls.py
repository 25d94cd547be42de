"""From a problem class to calls of it: `calls_of` makes a need's calls, with tensors, for the token counts of serving.

How a number of new tokens T becomes a call:

================================  ============================================================================
of                                the call
================================  ============================================================================
decode (``q_len`` one)            T sequences of one new token; a CUDA graph of size T is such a call
speculation (``q_len`` few)       T / n sequences of n new tokens, n being ``queries`` of the need's sizes, or 4; one
                                  of T where these are fewer and the call is ragged
prefill (``q_len`` many)          as many sequences as `sequences` says, by default one for each `context_len` tokens;
                                  a ragged call says that its longest sequence has at least 17
mixed (``q_len`` any)             half of the tokens, up to 256, are decoded, the others are one sequence's chunk; the
                                  call does not say how long its longest sequence is
paged logits, top-k with ends     decode: T sequences of one new token
logits, top-k with starts         prefill
products, quantisers, routing,    T rows, whatever the phase; a class of few rows or of many has the counts that are
experts, writing to a cache       such
================================  ============================================================================

Sequences of paged ops and of the indexer's have `context_len` tokens, or as many as are new; those of `attention`
have as many as are new. Block tables have room for `max_context_len`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.load import load_attribute
from kernelhub.dispatch.problem import CHECKPOINT, WEIGHT_LAYOUT
from kernelhub.errors import ConfigurationError, InvalidArgument, KernelUnavailable, NoKernel
from kernelhub.ops.attention.problem import MANY
from kernelhub.ops.models.batches import batch_of, batches_of_every_size
from kernelhub.ops.models.batches import counts_of as counts_of
from kernelhub.ops.models.batches import need_of as need_of
from kernelhub.ops.models.problems import GRAPH_SIZES as GRAPH_SIZES
from kernelhub.ops.models.problems import Need
from kernelhub.ops.serving import Arguments, Calls, Values

_LOAD_TIMEOUT_S = 60.0

MAKERS = {
    "attention": "kernelhub.ops.attention.serving:attention_calls",
    "paged_attention": "kernelhub.ops.attention.serving:paged_attention_calls",
    "merge_attention_states": "kernelhub.ops.merge.serving:merge_calls",
    "write_kv_cache": "kernelhub.ops.kv_cache.serving:write_kv_cache_calls",
    "mla_attention": "kernelhub.ops.mla.serving:mla_attention_calls",
    "write_mla_cache": "kernelhub.ops.mla.serving:write_mla_cache_calls",
    "concat_mla_k": "kernelhub.ops.mla.serving:concat_mla_k_calls",
    "mqa_logits": "kernelhub.ops.indexer.serving:mqa_logits_calls",
    "paged_mqa_logits": "kernelhub.ops.indexer.serving:paged_mqa_logits_calls",
    "topk_indices": "kernelhub.ops.indexer.serving:topk_indices_calls",
    "linear_attention": "kernelhub.ops.linear_attention.serving:linear_attention_calls",
    "all_reduce": "kernelhub.ops.comm.serving:all_reduce_calls",
    "all_reduce_rms_norm": "kernelhub.ops.comm.serving:all_reduce_rms_norm_calls",
    "moe_dispatch": "kernelhub.ops.comm.experts.serving:moe_dispatch_calls",
    "moe_combine": "kernelhub.ops.comm.experts.serving:moe_combine_calls",
    "reduce_scatter": "kernelhub.ops.comm.serving:reduce_scatter_calls",
    "all_gather": "kernelhub.ops.comm.serving:all_gather_calls",
    "quantize_fp8": "kernelhub.ops.quant.serving:quantize_fp8_calls",
    "quantize_nvfp4": "kernelhub.ops.quant.serving:quantize_nvfp4_calls",
    "quantize_mxfp4": "kernelhub.ops.quant.serving:quantize_mx_calls",
    "quantize_mxfp8": "kernelhub.ops.quant.serving:quantize_mx_calls",
    "dequantize_fp8": "kernelhub.ops.quant.serving:dequantize_fp8_calls",
    "dequantize_nvfp4": "kernelhub.ops.quant.serving:dequantize_nvfp4_calls",
    "dequantize_mxfp4": "kernelhub.ops.quant.serving:dequantize_mxfp4_calls",
    "dequantize_mxfp8": "kernelhub.ops.quant.serving:dequantize_mxfp8_calls",
    "rms_norm_quant": "kernelhub.ops.fused_quant.serving:norm_calls",
    "silu_and_mul_quant": "kernelhub.ops.fused_quant.serving:activation_calls",
    "fp8_gemm": "kernelhub.ops.gemm.fp8.serving:fp8_gemm_calls",
    "bmm_fp8": "kernelhub.ops.gemm.fp8.serving:bmm_fp8_calls",
    "fp4_gemm": "kernelhub.ops.gemm.fp4.serving:fp4_gemm_calls",
    "grouped_gemm": "kernelhub.ops.gemm.grouped.serving:grouped_gemm_calls",
    "route_experts": "kernelhub.ops.moe.serving:route_experts_calls",
    "fused_moe": "kernelhub.ops.moe.serving:fused_moe_calls",
    "expert_parallel_moe": "kernelhub.ops.moe.parallel.serving:expert_parallel_moe_calls",
}


@dataclass(frozen=True, eq=False)
class OpCall:
    """One call of an op, ready for ``HUB.function(op)(**arguments)``.

    Attributes:
        op: name of the op.
        tokens: new tokens.
        label: the op, the tokens and what else distinguishes it from other calls of its need.
        arguments: by the op's parameters; weights are shared with the need's other calls.
    """

    op: str
    tokens: int
    label: str
    arguments: Arguments

    @property
    def problem(self) -> Any:
        """The problem of the call."""
        function = HUB.function(self.op)
        parsed = function.op.parse(None, (), self.arguments)
        return function.op.contract.problem_of(parsed.key, parsed.device)


def calls_of(
    need: Need,
    tokens: Sequence[int],
    device: torch.device | str | None = None,
    *,
    context_len: int = 1024,
    max_context_len: int | None = None,
    sequences: int | None = None,
    seed: int = 0,
    filled: bool = True,
    cache_bytes: int = 1 << 30,
    scale_bits: int | None = None,
    every_size: bool = False,
) -> Iterator[OpCall]:
    """Calls of a problem class with tensors, as serving makes them; every call's problem is the need's.

    Args:
        need: as of `problems_of`, or `need_of` a problem.
        tokens: numbers of new tokens. One that the class has no call of is left out: 65 rows of a product with few.
        device: where the tensors are; the first GPU unless given, else the CPU.
        context_len: tokens of a sequence of a paged cache, the new ones among them.
        max_context_len: what block tables have room for; `context_len` unless given.
        sequences: among how many sequences a prefill's tokens are shared out.
        seed: equal seeds give equal tensors on devices of one kind.
        filled: whether tensors get random values. Otherwise floats are left as memory came; lengths, tables and indices
            are valid all the same.
        cache_bytes: most memory for one paged cache; beyond it sequences share pages.
        scale_bits: significant bits of scales in float32, for layouts that hold no more: 8 or 1; all unless given.
        every_size: of a ragged class, add a call for each number of sequences and longest sequence that the largest
            number of tokens allows, as powers of two: what a kernel with `compiles_sizes` compiles for.

    Yields:
        One call for each kind of `need.sizes` and number of tokens. The weights of the last kind stay alive until the
        next one's are made, so a caller that keeps no call uses the memory of one layer.

    Raises:
        ConfigurationError: the need's weights are packed, which only the plan that packs them can make; or its op's
            calls are not known.

    Example:
        >>> from kernelhub.ops.models.calls import calls_of
        >>> from kernelhub.ops.models.problems import problems_of
        >>> (need,) = problems_of("llama-3.1-8b", tp=8, phases=["decode"])
        >>> [tuple(call.arguments["q"].shape) for call in calls_of(need, (1, 4), "cpu", context_len=32)]
        [(1, 4, 128), (4, 4, 128)]
    """
    where = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    problem = need.problem(where)
    if getattr(problem, WEIGHT_LAYOUT, CHECKPOINT) != CHECKPOINT:
        raise ConfigurationError(
            f"{need.op}: weights in layout {problem.weight_layout} are made by the plan that packs them; request "
            f"weight_layout={CHECKPOINT!r} and pack"
        )
    if need.op not in MAKERS:
        raise ConfigurationError(f"{need.op}: its calls are not known; they are of {', '.join(MAKERS)}")
    make = load_attribute(MAKERS[need.op], _LOAD_TIMEOUT_S)
    for sizes in need.sizes or ((),):
        given = dict(sizes)
        values = Values(where, seed=seed, filled=filled, cache_bytes=cache_bytes, scale_bits=scale_bits)
        calls: Calls = make(problem, given, values)
        for count in tokens:
            batch = batch_of(need.op, problem, given, count, context_len, max_context_len or context_len, sequences)
            if batch is not None:
                said = "".join(f", {name} {value}" for name, value in sizes)
                yield OpCall(need.op, batch.tokens, f"{need.op}, {batch.tokens} tokens{said}", calls(batch))
        if every_size and getattr(problem, "ragged", False):
            says = getattr(problem, "q_len", None) == MANY
            for batch in batches_of_every_size(
                max(tokens, default=0), says, context_len, max_context_len or context_len
            ):
                label = f"{need.op}, {batch.num_seqs} sequences, {batch.tokens} tokens, at most {batch.max_q_len}"
                yield OpCall(need.op, batch.tokens, label, calls(batch))


def holds(kernel: Kernel, call: OpCall) -> bool:
    """Whether the packed layout of a kernel supports the weights of a call; also true where that is unknown."""
    try:
        HUB.function(call.op).prepare(**call.arguments, backend=kernel.name, packing=True)
    except InvalidArgument:
        return False
    except (NoKernel, KernelUnavailable):
        return True
    return True
