"""Conversion of a launch to arguments of its op, so that every kind of call can be audited.

Every call of a kernel ends in a launch of its adapter: direct calls, `plan.run`, `step.run`, and calls of a compiled
graph. Each op has a reader here. It converts a launch's operands to the arguments of the op's reference and of
`OpCases.judge`, and names the results. A reader copies nothing and does not access the device. If a call reads a few
pages or slots of a large tensor, the reader lists them (`Rows`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.ops.attention.adapter import DenseStep, PagedStep
from kernelhub.ops.attention.arguments import arguments_of
from kernelhub.ops.case import Arguments
from kernelhub.ops.formats import E8M0
from kernelhub.ops.fused_quant.formats import GIVEN
from kernelhub.ops.fused_quant.problem import NONE
from kernelhub.ops.gemm.fp4.adapter import Activations, Weights
from kernelhub.ops.gemm.grouped.adapter import GroupedOperands
from kernelhub.ops.linear_attention.adapter import States
from kernelhub.ops.moe.experts.adapter import ExpertsAdapter
from kernelhub.ops.moe.experts.problem import (
    ASKED_FORMATS,
    BLOCK_FORMATS,
    FP8_BLOCK_UE8M0,
    FP8_TENSOR,
    MXFP4,
    NVFP4,
    PLAIN,
)
from kernelhub.ops.moe.experts.weights import Matrix
from kernelhub.ops.packed import PackedWeight, packed_at
from kernelhub.ops.quant.arguments import fp8_scale_shape
from kernelhub.ops.quant.problem import TENSOR

METHODS = ("launch", "compute", "launch_weights")  # of adapters; an op runs a kernel through them


class NotAudited(Exception):
    """This launch cannot be recomputed; the message is a key of `dispatch.audits.SKIPPED`."""


@dataclass(frozen=True)
class Rows:
    """The rows of a tensor that a call reads, copied together.

    Attributes:
        source: ``[N, ...]``.
        index: int64 ``[n]``, on the same device. A negative index gives a row of zeros in the copy; too large
            an index is clamped.
        keep: the valid tokens in each row, bool ``[n, tokens]``; the others are zeros in the copy.
        token_dim: the dimension of the row that contains tokens.
    """

    source: Tensor
    index: Tensor
    keep: Tensor | None = None
    token_dim: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy."""
        return self.index.numel() * (self.source[:1].numel() * self.source.itemsize if self.source.shape[0] else 0)

    def copied(self) -> Tensor:
        """A copy of the rows."""
        raw = self.source.view(torch.uint8) if self.source.itemsize == 1 else self.source
        made = raw.index_select(0, self.index.clamp(0, max(self.source.shape[0] - 1, 0)))
        made.masked_fill_((self.index < 0).view(-1, *(1 for _ in self.source.shape[1:])), 0)
        if self.keep is not None:
            form = [1] * made.ndim
            form[0], form[self.token_dim] = self.keep.shape
            made.masked_fill_(~self.keep.view(form), 0)
        return made.view(self.source.dtype)


@dataclass(frozen=True, eq=False)
class Unpacked:
    """A tensor of the checkpoint, recovered from a packed weight.

    Attributes:
        weight: the packed weight.
        place: index in `weight.unpack()`; the first is the weight itself.
    """

    weight: PackedWeight
    place: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight itself."""
        return self.weight.shape

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of all parts, counted with the first."""
        return 0 if self.place else self.weight.num_bytes

    @property
    def num_elements(self) -> int:
        """Of the weight itself."""
        return 0 if self.place else math.prod(self.shape) * (2 if self.weight.dtype is torch.uint8 else 1)


class Read(NamedTuple):
    """A launch as arguments and results of its op.

    Attributes:
        arguments: arguments by parameter, as before the launch.
        results: destinations of the launch, by the names of `OpCases.judge`.
        forms: shapes of results in the op, if those of the launch differ.
    """

    arguments: Arguments
    results: dict[str, Tensor | Rows]
    forms: Mapping[str, tuple[int, ...]] = MappingProxyType({})


Reader = Callable[[Any, tuple[Any, ...]], Read]


def _with_lse(out: Tensor | None, lse: Tensor | None) -> dict[str, Tensor | Rows]:
    made: dict[str, Tensor | Rows] = {} if out is None else {"out": out}
    return made if lse is None else made | {"lse": lse}


def _attention(problem: Any, given: tuple[Any, ...]) -> Read:
    q, k, v, step, values, out, lse = _padded(given, 7)
    arguments = {"q": q, "k": k, "v": v, **arguments_of(problem, values)}
    if problem.ragged:
        assert isinstance(step, DenseStep)
        arguments |= {
            "cu_seqlens_q": step.cu_seqlens_q,
            "cu_seqlens_k": step.cu_seqlens_k,
            "max_seqlen_q": step.max_seqlen_q,
            "max_seqlen_k": step.max_seqlen_k,
        }
    return Read(arguments, _with_lse(out, lse))


def _pages(step: PagedStep, page_size: int, *caches: tuple[Tensor, int]) -> tuple[Tensor, list[Rows]]:
    """The block table of the copies, and the pages of the caches that the sequences of a step use."""
    lengths = step._lengths  # lengths on the host, so that the device is not read
    columns = step.max_pages
    if lengths is not None:
        columns = min(columns, max((-(-length // page_size) for length in lengths), default=0))
    return _gathered(step.block_table, step.seq_lens, columns, page_size, caches)


def _gathered(
    block_table: Tensor, seq_lens: Tensor, columns: int, page_size: int, caches: Sequence[tuple[Tensor, int]]
) -> tuple[Tensor, list[Rows]]:
    """The block table and pages, from lengths and pages in tensors.

    Args:
        columns: number of columns of the block table that may be used.
        caches: caches, each with the dimension of a page that contains tokens.
    """
    device, num_seqs = block_table.device, block_table.shape[0]
    index = block_table[:, :columns].reshape(-1).long()
    place = torch.arange(columns * page_size, device=device).view(1, -1)
    keep = (place < seq_lens.view(-1, 1)).view(num_seqs * columns, page_size)
    table = torch.arange(num_seqs * columns, device=device, dtype=torch.int32).view(num_seqs, columns)
    return table, [Rows(cache, index, keep, dim) for cache, dim in caches]


def _paged_attention(problem: Any, given: tuple[Any, ...]) -> Read:
    q, k_cache, v_cache, step, values, out, lse = _padded(given, 7)
    tokens_at = 1 if problem.kv_layout == "NHD" else 2
    table, (k, v) = _pages(step, problem.page_size, (k_cache, tokens_at), (v_cache, tokens_at))
    arguments = {
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "block_table": table,
        "seq_lens": step.seq_lens,
        "kv_layout": problem.kv_layout,
        **arguments_of(problem, values),
    }
    if problem.ragged:
        arguments |= {"cu_seqlens_q": step.cu_seqlens_q, "max_seqlen_q": step.max_seqlen_q}
    return Read(arguments, _with_lse(out, lse))


def _mla_attention(problem: Any, given: tuple[Any, ...]) -> Read:
    q, kv_cache, topk_indices, step, values, out, lse = given
    table, (rows,) = _pages(step, problem.page_size, (kv_cache, 1))
    arguments = {
        "q": q,
        "kv_cache": rows,
        "block_table": table,
        "seq_lens": step.seq_lens,
        "scale": values.scale,
        "value_dim": problem.value_dim,
        "causal": problem.causal,
        "sinks": values.sinks,
        "kv_scale": values.kv_scale,
        "return_lse": problem.lse,
    }
    if topk_indices is not None:
        arguments["topk_indices"] = topk_indices.reshape(*q.shape[:-2], topk_indices.shape[-1])
    if problem.ragged:
        arguments |= {"cu_seqlens_q": step.cu_seqlens_q, "max_seqlen_q": step.max_seqlen_q}
    return Read(arguments, _with_lse(out, lse))


def _write_mla_cache(problem: Any, given: tuple[Any, ...]) -> Read:
    """The rows of the cache that are written, as pages of one token; the rest of the cache is not read."""
    kv_c, k_rope, kv_cache, slot_mapping, kv_scale = given
    pages, page_size, width = kv_cache.shape
    strides = kv_cache.stride()
    if strides[0] == page_size * strides[1]:
        flat = kv_cache.as_strided((pages * page_size, 1, width), (strides[1], strides[1], strides[2]))
    elif pages == 1:
        flat = kv_cache[0].unsqueeze(1)
    else:
        raise NotAudited("unread")  # non-contiguous pages cannot be read as rows without a copy of all
    rows = Rows(flat, slot_mapping)
    places = torch.arange(slot_mapping.shape[0], device=slot_mapping.device)
    slots = torch.where(slot_mapping < 0, slot_mapping, places)
    arguments = {"kv_c": kv_c, "k_rope": k_rope, "kv_cache": rows, "slot_mapping": slots, "kv_scale": kv_scale}
    if kv_scale is None:
        del arguments["kv_scale"]
    return Read(arguments, {"kv_cache": rows})


def _write_kv_cache(problem: Any, given: tuple[Any, ...]) -> Read:
    """As for `write_mla_cache`, of both caches; launches get pages of tokens whatever the layout is."""
    k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, rope = _padded(given, 8)
    if rope is not None and rope.q is not None:
        raise NotAudited("unread")  # what is rotated in place cannot be read again
    places = torch.arange(slot_mapping.shape[0], device=slot_mapping.device)
    arguments = {"k": k, "v": v, "slot_mapping": torch.where(slot_mapping < 0, slot_mapping, places)}
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        pages, page_size, *rest = cache.shape
        strides = cache.stride()
        if strides[0] != page_size * strides[1] and pages != 1:
            raise NotAudited("unread")  # such pages cannot be read as rows without a copy of all
        flat = cache.as_strided((pages * page_size, 1, *rest), (strides[1], *strides[1:]))
        arguments[name] = Rows(flat, slot_mapping)
    if k_scale is not None:
        arguments |= {"k_scale": k_scale, "v_scale": v_scale}
    if rope is not None:
        arguments |= {"positions": rope.positions, "cos_sin_cache": rope.cos_sin_cache}
        arguments["is_neox"] = problem.rope == "neox"
    return Read(arguments, {name: arguments[name] for name in ("k_cache", "v_cache")})


def _concat_mla_k(problem: Any, given: tuple[Any, ...]) -> Read:
    k_nope, k_rope, out = given
    return Read({"k_nope": out[..., : problem.nope_dim] if k_nope is None else k_nope, "k_rope": k_rope}, {"out": out})


def _merge(problem: Any, given: tuple[Any, ...]) -> Read:
    outs, lses, out, lse, out_scale = _padded(given, 5)
    arguments: Arguments = {"outs": list(outs), "lses": list(lses), "return_lse": lse is not None}
    if out_scale is not None:
        arguments["out_scale"] = out_scale
    return Read(arguments, {"out": out} | ({} if lse is None else {"out_lse": lse}))


def _mqa_logits(problem: Any, given: tuple[Any, ...]) -> Read:
    *operands, out = given
    names = ("q", "k", "k_scale", "weights", "cu_seqlen_ks", "cu_seqlen_ke")
    return Read(dict(zip(names, operands, strict=True)), {"out": out})


def _paged_mqa_logits(problem: Any, given: tuple[Any, ...]) -> Read:
    q, k_cache, k_scale_cache, weights, block_table, seq_lens, out = given
    columns = min(block_table.shape[1], -(-out.shape[1] // problem.page_size))
    caches = [(k_cache, 1)] + ([] if k_scale_cache is None else [(k_scale_cache, 1)])
    table, rows = _gathered(block_table, seq_lens, columns, problem.page_size, caches)
    arguments = {
        "q": q,
        "k_cache": rows[0],
        "k_scale_cache": rows[1] if len(rows) > 1 else None,
        "weights": weights,
        "block_table": table,
        "seq_lens": seq_lens,
        "max_seq_len": out.shape[1],
    }
    return Read(arguments, {"out": out})


def _topk_indices(problem: Any, given: tuple[Any, ...]) -> Read:
    logits, row_starts, row_ends, out = given
    return Read({"logits": logits, "k": problem.k, "row_starts": row_starts, "row_ends": row_ends}, {"out": out})


def _linear_attention(problem: Any, given: tuple[Any, ...]) -> Read:
    q, k, v, decay, scale, cu_seqlens, states, out = given
    assert isinstance(states, States)
    before, before_at, after, after_at = states
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    arguments: Arguments = {"q": q, "k": k, "v": v, "decay": decay, "cu_seqlens": cu_seqlens, "scale": scale}
    results: dict[str, Tensor | Rows] = {"out": out}
    places = torch.arange(sequences, device=q.device, dtype=torch.int32)
    if before is not None and before_at is not None:
        arguments["state"] = Rows(before, before_at.long())
        arguments["state_indices"] = torch.where(before_at < 0, before_at, places)
    elif before is not None:
        arguments["state"] = before
    if after is not None and after_at is None and after.shape[0] == sequences:
        arguments["return_state"] = True
        results["state"] = after
    elif after is not None:
        slots = places if after_at is None else after_at
        kept = Rows(after, slots.long())
        arguments["state_indices"] = torch.where(slots < 0, slots, places)
        arguments["out_state"] = results["state"] = kept
    return Read(arguments, results)


def _as_scales(scale: Tensor | None, format: str) -> Tensor | None:
    """Bytes as exponents, if the format requires it."""
    exponents = scale is not None and scale.dtype is torch.uint8 and format.startswith("mx")
    return scale.view(E8M0) if exponents and scale is not None else scale


def _fp4_gemm(problem: Any, given: tuple[Any, ...]) -> Read:
    a, b, bias, out = given
    assert isinstance(a, Activations)
    assert isinstance(b, Weights)
    weight: Arguments = {
        "b": b.codes,
        "b_scale": _as_scales(b.scale, problem.b_format),
        "b_global_scale": b.global_scale,
    }
    arguments = {
        "a": a.codes,
        "a_scale": _as_scales(a.scale, problem.a_format),
        "a_global_scale": a.global_scale,
        **_as_in_checkpoint(problem, weight),
        "bias": bias,
        "out_dtype": getattr(torch, problem.out_dtype),
    }
    return Read(arguments, {"out": out})


def _grouped_gemm(problem: Any, given: tuple[Any, ...]) -> Read:
    operands, out = _padded(given, 2)
    assert isinstance(operands, GroupedOperands)
    arguments = {**operands._asdict(), "out_dtype": getattr(torch, problem.out_dtype)}
    return Read(arguments, {} if out is None else {"out": out})


def _fp8_gemm(problem: Any, given: tuple[Any, ...]) -> Read:
    a, b, a_scale, b_scale, bias, out = given if problem.weight_only is None else (*given[:2], None, *given[2:])
    weight = _as_in_checkpoint(problem, {"b": b, "b_scale": b_scale})
    arguments = {"a": a, "a_scale": a_scale, "bias": bias, **weight}
    return Read(arguments | {"out_dtype": getattr(torch, problem.out_dtype)}, {"out": out})


def _bmm_fp8(problem: Any, given: tuple[Any, ...]) -> Read:
    a, b, a_scale, b_scale, out = given
    arguments = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}
    return Read(arguments | {"out_dtype": getattr(torch, problem.out_dtype)}, {"out": out})


def _side(name: str, problem: Any, given: Matrix) -> Arguments:
    """One projection of experts, as in a checkpoint."""
    scale, global_scale, weights = given.scale, None, problem.weights
    if problem.weight_layout != CHECKPOINT:
        parts = (name, f"{name}_scale", f"{name}_global_scale", f"{name}_bias")
        return _as_in_checkpoint(problem, dict.fromkeys(parts, given.weight))
    if weights in BLOCK_FORMATS and scale is not None:
        scale = scale.view(E8M0) if weights == FP8_BLOCK_UE8M0 else scale
    elif weights == NVFP4:
        global_scale = None if given.channel_scale is None else given.channel_scale[:, 0]
    elif weights == MXFP4 and scale is not None:
        scale = scale.view(E8M0)
    elif weights == FP8_TENSOR and given.channel_scale is not None:
        scale = given.channel_scale[:, 0]
    elif weights not in (PLAIN, "mxint4"):
        scale = given.channel_scale
    made = {f"{name}_scale": scale, f"{name}_global_scale": global_scale, f"{name}_bias": given.bias}
    return {name: given.weight, **{parameter: value for parameter, value in made.items() if value is not None}}


def _fused_moe(problem: Any, given: tuple[Any, ...]) -> Read:
    x, w13, w2, topk_weights, topk_ids, values, out = given
    asked = problem.activation_dtype
    arguments = {
        "x": x,
        **_side("w13", problem, w13),
        **_side("w2", problem, w2),
        "topk_weights": topk_weights,
        "topk_ids": topk_ids,
        "activation": problem.activation,
        "activation_dtype": asked if asked in ASKED_FORMATS else getattr(torch, asked),
        "alpha": values.alpha,
        "limit": values.limit,
        "apply_router_weight_on_input": problem.apply_router_weight_on_input,
    }
    for name in ("a1_scale", "a2_scale", "expert_map", "residual"):
        if getattr(values, name) is not None:
            arguments[name] = getattr(values, name)
    return Read(arguments, {"out": out})


def _route_experts(problem: Any, given: tuple[Any, ...]) -> Read:
    logits, correction_bias, scaling_factor, weights, ids = given
    grouped = problem.num_groups > 1
    arguments = {
        "logits": logits,
        "top_k": problem.top_k,
        "scoring": problem.scoring,
        "num_groups": problem.num_groups if grouped else None,
        "topk_groups": problem.topk_groups if grouped else None,
        "correction_bias": correction_bias,
        "renormalize": problem.renormalize,
        "scaling_factor": scaling_factor,
    }
    return Read(arguments, {"out_weights": weights, "out_ids": ids})


def _quantize_fp8(problem: Any, given: tuple[Any, ...]) -> Read:
    x, codes, areas, _ = given
    shape = fp8_scale_shape(tuple(x.shape), problem.granularity, problem.group_size)
    arguments: Arguments = {"x": x, "granularity": problem.granularity, "group_size": problem.group_size}
    if problem.static:
        arguments["scale"] = areas.reshape(shape)
    else:
        arguments |= {"ue8m0": problem.ue8m0, "scale_dtype": getattr(torch, problem.scale_dtype)}
    return Read(arguments, {"out": codes, "out_scale": areas}, {"out_scale": shape})


def _quantize_nvfp4(problem: Any, given: tuple[Any, ...]) -> Read:
    x, codes, scale, global_scale = given
    arguments = {"x": x, **({"global_scale": global_scale} if problem.static else {})}
    form = tuple(global_scale.shape) if problem.static else (1,)
    results: dict[str, Tensor | Rows] = {"out": codes, "out_scale": scale, "out_global_scale": global_scale}
    return Read(arguments, results, {"out_global_scale": form})


def _quantize_mx(problem: Any, given: tuple[Any, ...]) -> Read:
    x, codes, scale, _ = given
    return Read({"x": x, "scale_rounding": "up" if problem.round_up else "floor"}, {"out": codes, "out_scale": scale})


def _form_of_result(problem: Any, given: Tensor | None) -> Arguments:
    """The form of a fused op's result, as arguments."""
    if problem.format == NONE:
        return {}
    said: Arguments = {"format": problem.format, "ue8m0": problem.ue8m0}
    said["scale_dtype"] = getattr(torch, problem.scale_dtype)
    return said if given is None else said | {GIVEN[problem.format]: given}


def _rms_norm_quant(problem: Any, given: tuple[Any, ...]) -> Read:
    x, weight, eps, residual, given_scale, out, scale, residual_out = given
    arguments = {"x": x, "weight": weight, "eps": eps, "unit_offset": problem.unit_offset}
    arguments |= _form_of_result(problem, given_scale)
    results = {"out": out} | ({} if scale is None else {"out_scale": scale})
    if given_scale is not None and scale is None:
        results["out_scale"] = given_scale
    if residual is not None:
        arguments["residual"], results["out_residual"] = residual, residual_out
    return Read(arguments, results)


def _silu_and_mul_quant(problem: Any, given: tuple[Any, ...]) -> Read:
    x, given_scale, out, scale = given
    results = {"out": out} | ({} if scale is None else {"out_scale": scale})
    if given_scale is not None and scale is None:
        results["out_scale"] = given_scale
    return Read({"x": x, **_form_of_result(problem, given_scale)}, results)


def _dequantize(problem: Any, given: tuple[Any, ...]) -> Read:
    codes, scale, global_scale, out = given
    if getattr(problem, "granularity", None) == TENSOR:
        scale = scale.reshape(1)
    arguments = {"x": codes, "scale": scale, "out_dtype": getattr(torch, problem.out_dtype)}
    if hasattr(problem, "group_size"):
        arguments["group_size"] = problem.group_size
    if global_scale is not None:
        arguments["global_scale"] = global_scale
    return Read(arguments, {"out": out})


def _as_in_checkpoint(problem: Any, weight: Arguments) -> Arguments:
    """The arguments of a plan's `pack`, in its order, the weight first; packed weights are unpacked."""
    if problem.weight_layout == CHECKPOINT:
        return weight
    packed = packed_at(next(iter(weight.values())))
    if packed is None or packed.layout != problem.weight_layout:
        raise NotAudited("packed")
    return {name: Unpacked(packed, place) for place, name in enumerate(weight)}


def _padded(given: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Operands of a launch, or those of a `compute`, which has no destinations."""
    return (*given, *(None for _ in range(count - len(given))))


def _of_all_ranks(problem: Any, given: tuple[Any, ...]) -> Read:
    """The reference needs the tokens of all ranks."""
    raise NotAudited("collective")


def _all_reduce(problem: Any, given: tuple[Any, ...]) -> Read:
    """One rank of several must not call the reference, which communicates with the others."""
    x, out, group, _ = given
    if problem.world_size > 1:
        raise NotAudited("collective")
    return Read({"x": x, "group": group.group_name}, {"out": out})


def _all_reduce_rms_norm(problem: Any, given: tuple[Any, ...]) -> Read:
    x, residual, weight, eps, out, residual_out, group, _, given_scale, scale = _padded(given, 10)
    if problem.world_size > 1:
        raise NotAudited("collective")
    arguments = {"x": x, "residual": residual, "weight": weight, "eps": eps, "group": group.group_name}
    arguments |= _form_of_result(problem, given_scale)
    results = {"out": out, "residual_out": residual_out}
    if problem.format != NONE:  # codes and scales are rows
        lead = x.shape[:-1]
        results["out"] = out.unflatten(0, lead) if lead else out[0]
        if scale is not None:
            results["out_scale"] = scale.unflatten(0, lead) if lead else scale[0]
        elif given_scale is not None:
            results["out_scale"] = given_scale
    return Read(arguments, results)


def _all_gather(problem: Any, given: tuple[Any, ...]) -> Read:
    x, out, group, *_ = given
    if problem.world_size > 1:
        raise NotAudited("collective")
    return Read({"x": x, "group": group.group_name}, {"out": out})


READERS: dict[str, Reader] = {
    "attention": _attention,
    "paged_attention": _paged_attention,
    "merge_attention_states": _merge,
    "write_kv_cache": _write_kv_cache,
    "mla_attention": _mla_attention,
    "write_mla_cache": _write_mla_cache,
    "concat_mla_k": _concat_mla_k,
    "mqa_logits": _mqa_logits,
    "paged_mqa_logits": _paged_mqa_logits,
    "topk_indices": _topk_indices,
    "linear_attention": _linear_attention,
    "all_reduce": _all_reduce,
    "all_reduce_rms_norm": _all_reduce_rms_norm,
    "moe_dispatch": _of_all_ranks,
    "moe_combine": _of_all_ranks,
    "expert_parallel_moe": _of_all_ranks,
    "reduce_scatter": _all_reduce,
    "all_gather": _all_gather,
    "fp4_gemm": _fp4_gemm,
    "grouped_gemm": _grouped_gemm,
    "fp8_gemm": _fp8_gemm,
    "bmm_fp8": _bmm_fp8,
    "fused_moe": _fused_moe,
    "route_experts": _route_experts,
    "quantize_fp8": _quantize_fp8,
    "quantize_nvfp4": _quantize_nvfp4,
    "quantize_mxfp4": _quantize_mx,
    "quantize_mxfp8": _quantize_mx,
    "rms_norm_quant": _rms_norm_quant,
    "silu_and_mul_quant": _silu_and_mul_quant,
    "dequantize_fp8": _dequantize,
    "dequantize_nvfp4": _dequantize,
    "dequantize_mxfp4": _dequantize,
    "dequantize_mxfp8": _dequantize,
}


def rearranges(adapter: Any) -> bool:
    """Whether a kernel is launched with weights of a checkpoint in a layout of its own."""
    return (
        isinstance(adapter, ExpertsAdapter)
        and type(adapter).arrange is not ExpertsAdapter.arrange
        and adapter.problem.weight_layout == CHECKPOINT
    )


class Arranged:
    """The original weights of an adapter's rearranged weights, as long as they are alive.

    Args:
        adapter: an adapter; its calls of `arrange` are recorded from now on.
    """

    def __init__(self, adapter: ExpertsAdapter) -> None:
        self._made_from: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._arrange = adapter.arrange
        adapter.arrange = self.arrange  # type: ignore[method-assign]

    def arrange(self, w13: Matrix, w2: Matrix) -> tuple[Matrix, Matrix]:
        """Call the adapter's own `arrange`, and record the weights."""
        made = self._arrange(w13, w2)
        for one, other in zip(made, (w13, w2), strict=True):
            self._made_from[one.weight] = [None if part is None else TensorWeakRef(part) for part in other]
        return made

    def given_to(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """The operands of a launch, with the original weights."""
        return tuple(self._before(part) if isinstance(part, Matrix) else part for part in given)

    def _before(self, made: Matrix) -> Matrix:
        parts = [None if part is None else part() for part in self._made_from.get(made.weight, (None,))]
        weight, *rest = parts
        if weight is None:
            raise NotAudited("packed")
        return Matrix(weight, *rest)


# The size of a call, from the operands of its launch, without reading the device.
_first: Callable[[tuple[Any, ...]], Hashable] = lambda given: given[0].numel().bit_length()  # noqa: E731


def _size_of_paged(given: tuple[Any, ...]) -> Hashable:
    return given[0].numel().bit_length(), given[3].max_pages.bit_length()


SIZES: dict[str, Callable[[tuple[Any, ...]], Hashable]] = {
    "attention": lambda given: (given[0].numel().bit_length(), given[1].numel().bit_length()),
    "paged_attention": _size_of_paged,
    "mla_attention": _size_of_paged,
    "merge_attention_states": lambda given: (len(given[0]), given[2].numel().bit_length()),
    "concat_mla_k": lambda given: given[1].numel().bit_length(),
    "mqa_logits": lambda given: (given[0].numel().bit_length(), given[1].numel().bit_length()),
    "paged_mqa_logits": lambda given: (given[0].numel().bit_length(), given[6].numel().bit_length()),
    "fp4_gemm": lambda given: given[3].numel().bit_length(),
    "grouped_gemm": lambda given: given[0].a.numel().bit_length(),
    "moe_dispatch": lambda given: given[0].x.numel().bit_length(),
    "expert_parallel_moe": lambda given: given[0].x.numel().bit_length(),
}


def size_of(op: str) -> Callable[[tuple[Any, ...]], Hashable]:
    """The function that gives the size of a call, for an op."""
    return SIZES.get(op, _first)
