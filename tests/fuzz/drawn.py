"""Right calls drawn at random, one function for each op: shapes, dtypes, lengths and features beyond the op's cases."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch

from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.comm.experts.inputs import combine_inputs, dispatch_inputs
from kernelhub.ops.comm.experts.problem import FORMATS as EXPERT_FORMATS
from kernelhub.ops.comm.inputs import (
    all_gather_inputs,
    all_reduce_inputs,
    all_reduce_rms_norm_inputs,
    reduce_scatter_inputs,
)
from kernelhub.ops.fused_quant.inputs import activation_inputs, norm_inputs
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp4.problem import A_FORMATS, B_FORMATS
from kernelhub.ops.gemm.fp8.batched.inputs import bmm_fp8_inputs
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.grouped.inputs import PAIRS, grouped_gemm_inputs
from kernelhub.ops.indexer.inputs import logits_inputs, paged_logits_inputs, topk_inputs
from kernelhub.ops.kv_cache.inputs import write_kv_cache_inputs
from kernelhub.ops.linear_attention.inputs import linear_inputs
from kernelhub.ops.merge.inputs import merge_inputs
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.mla.cache.inputs import write_mla_cache_inputs
from kernelhub.ops.mla.concat.inputs import concat_inputs
from kernelhub.ops.models.shapes import AttentionModel, IndexerModel, LinearModel, MlaModel, MoeModel
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.problem import ACTIVATIONS, FORMATS
from kernelhub.ops.moe.parallel.inputs import parallel_inputs
from kernelhub.ops.moe.routing.inputs import routing_inputs
from kernelhub.ops.quant.inputs import activations
from tests.fuzz.operands import Arguments

FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FORMS = (None, "fp8_tensor", "fp8_token", "fp8_group", "mxfp8", "nvfp4")
_LENGTHS = (0, 0, 1, 1, 2, 3, 7, 15, 16, 17, 31, 33, 40, 64, 65)
_WIDTHS = ((16, 16), (32, 32), (40, 40), (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
_ROWS = (0, 1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65)


def _seed(random: Random) -> dict[str, Any]:
    return {"seed": random.randrange(1 << 20)}


def _attention_model(random: Random) -> AttentionModel:
    kv_heads, width = random.choice((1, 1, 2, 3, 4)), random.choice(_WIDTHS)
    return AttentionModel("drawn", kv_heads * random.choice((1, 1, 2, 3, 4, 8)), kv_heads, *width)


def _attended(arguments: Arguments, model: AttentionModel, random: Random, device: torch.device) -> Arguments:
    """Features of softmax attention, and values of other magnitudes."""
    arguments["causal"] = random.random() < 0.6
    if random.random() < 0.4:
        arguments["window"] = random.choice((0, 1, 5, 1000, (3, -1), (-1, 0), (-1, 2), (2, 3), (0, 0), (-1, -1), None))
    if random.random() < 0.25:
        arguments["softcap"] = random.choice((0.5, 5.0, 50.0))
    if random.random() < 0.35:
        sinks = torch.randn(model.num_q_heads, generator=torch.Generator().manual_seed(random.randrange(99)))
        if random.random() < 0.4:
            sinks[random.randrange(len(sinks)) :] = -torch.inf
        arguments["sinks"] = sinks.to(arguments["q"].dtype).to(device)
    if random.random() < 0.3:
        arguments["scale"] = random.choice((0.0, -0.3, 1e-8, 1.0, 0.01))
    arguments["return_lse"] = random.random() < 0.3
    for name in ("v", "v_cache"):
        if random.random() < 0.2 and arguments.get(name) is not None and arguments[name].itemsize > 1:
            small = 1e-2 if arguments[name].dtype is torch.float16 else 1e-8  # of whole numbers of digits
            arguments[name] = arguments[name] * random.choice((small, 100.0, 1000.0))
    if "k_scale" in arguments and random.random() < 0.6:
        spread = torch.linspace(0.5, 1.5, random.choice((1, model.num_kv_heads)), device=device)
        arguments |= {name: arguments[name] * spread for name in ("k_scale", "v_scale")}
    return arguments


def attention(random: Random, device: torch.device) -> Arguments:
    model = _attention_model(random)
    several = range(random.choice((0, 1, 2, 4)))
    dtype = random.choice(FLOATS)
    made: Arguments = {
        "dtype": dtype,
        "kv_dtype": random.choice((FP8, E5M2)) if random.random() < 0.15 else None,
        "device": device,
    }
    if random.random() < 0.5:
        lens = [random.choice(_LENGTHS) for _ in several]
        more = [random.choice(_LENGTHS) for _ in several] if random.random() < 0.6 else None
        arguments = attention_inputs(model, q_lens=lens, kv_lens=more, **made, **_seed(random))
        if random.random() < 0.4:
            arguments["max_seqlen_q"] = max([*lens, 1]) + random.choice((0, 0, 5))
            arguments["max_seqlen_k"] = max([*(more or lens), 1]) + random.choice((0, 0, 9))
    else:
        sizes = {"q_tokens": random.choice(_LENGTHS), "kv_tokens": random.choice(_LENGTHS)}
        arguments = attention_inputs(model, batch=len(several), **sizes, **made, **_seed(random))
    return _attended(arguments, model, random, device)


def paged_attention(random: Random, device: torch.device) -> Arguments:
    model, several = _attention_model(random), range(random.choice((0, 1, 2, 4)))
    lens = [random.choice((*_LENGTHS, 100)) for _ in several]
    q_lens: Any = random.choice((None, None, 1, 3, [random.choice(_LENGTHS[:9]) for _ in several]))
    arguments = paged_attention_inputs(
        model,
        seq_lens=lens,
        q_lens=q_lens,
        page_size=random.choice((1, 3, 8, 16, 16, 32, 64)),
        kv_layout=random.choice(("NHD", "NHD", "HND")),
        dtype=random.choice(FLOATS),
        kv_dtype=random.choice((FP8, E5M2)) if random.random() < 0.2 else None,
        device=device,
        **_seed(random),
    )
    if isinstance(q_lens, list) and random.random() < 0.4:
        arguments["max_seqlen_q"] = max([*q_lens, 1]) + random.choice((0, 3))
    return _attended(arguments, model, random, device)


def merge_attention_states(random: Random, device: torch.device) -> Arguments:
    arguments = merge_inputs(
        parts=random.choice((2, 2, 3, 8)),
        tokens=random.choice(_ROWS),
        batch=random.choice((None, None, 0, 1, 3)),
        num_heads=random.choice((1, 2, 5, 8)),
        head_dim=random.choice((8, 40, 64, 72, 128)),
        dtype=random.choice(FLOATS),
        empty=random.random() < 0.5,
        device=device,
        **_seed(random),
    )
    return arguments | {"return_lse": random.random() < 0.5}


def mla_attention(random: Random, device: torch.device) -> Arguments:
    latent, rope = random.choice(((64, 16), (64, 16), (128, 64), (512, 64), (96, 32)))
    model, several = (
        MlaModel("drawn", random.choice((1, 2, 5, 8, 16)), latent, rope),
        range(random.choice((0, 1, 2, 4))),
    )
    q_lens: Any = random.choice((None, None, 1, 3, [random.choice(_LENGTHS[:8]) for _ in several]))
    fp8 = random.random() < 0.25
    arguments = mla_attention_inputs(
        model,
        seq_lens=[random.choice((*_LENGTHS, 100)) for _ in several],
        q_lens=q_lens,
        topk=random.choice((None, None, 1, 20, 64)),
        page_size=random.choice((1, 3, 16, 16, 32, 64)),
        dtype=random.choice(FLOATS),
        kv_dtype=FP8 if fp8 else None,
        device=device,
        **_seed(random),
    )
    if fp8 and random.random() < 0.5:
        arguments["kv_scale"] = torch.tensor([0.7 * arguments["kv_scale"]], device=device)
    if random.random() < 0.3:
        sinks = torch.linspace(-2, 3, model.num_heads)
        if random.random() < 0.4:
            sinks[:] = -torch.inf
        arguments["sinks"] = sinks.to(arguments["q"].dtype).to(device)
    if random.random() < 0.3:
        arguments["causal"] = False
    if random.random() < 0.3:
        arguments["scale"] = random.choice((0.0, -0.3, 1e-8, 0.01))
    return arguments | {"return_lse": random.random() < 0.3}


def write_kv_cache(random: Random, device: torch.device) -> Arguments:
    qk, vo = random.choice(((128, 128), (64, 64), (192, 128), (40, 24), (7, 3), (1, 1)))
    kv_dtype, heads = random.choice((None, None, FP8, E5M2)), random.choice((1, 2, 3, 8))
    arguments = write_kv_cache_inputs(
        tokens=random.choice(_ROWS),
        num_kv_heads=heads,
        num_q_heads=random.choice((0, heads)),
        head_dim_qk=qk,
        head_dim_vo=vo,
        page_size=random.choice((1, 3, 16, 64)),
        skipped=random.choice((0, 1, 2, 3)),
        dtype=random.choice(FLOATS),
        kv_dtype=kv_dtype,
        kv_layout=random.choice(("NHD", "NHD", "HND")),
        device=device,
        **_seed(random),
    )
    if qk > 1 and random.random() < 0.4:
        arguments = write_kv_cache_inputs(
            tokens=random.choice(_ROWS),
            num_kv_heads=heads,
            num_q_heads=2 * heads,
            head_dim_qk=qk,
            head_dim_vo=vo,
            dtype=random.choice(FLOATS),
            kv_dtype=kv_dtype,
            rope=random.choice(("neox", "interleaved")),
            rotary_dim=random.choice((2, qk // 2 * 2)),
            rotates_q=random.random() < 0.7,
            device=device,
            **_seed(random),
        )
    if kv_dtype is not None:
        scales = [random.choice((2.0**-6, 0.3, 3.3, 1e-8)) for _ in range(2)]
        count = random.choice((0, 0, 1, heads))
        for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
            arguments[name] = torch.linspace(scale, 2 * scale, count, device=device) if count else scale
    return arguments


def write_mla_cache(random: Random, device: torch.device) -> Arguments:
    latent, rope = random.choice(((512, 64), (64, 16), (128, 0), (7, 3), (1, 1)))
    fp8 = random.random() < 0.5
    arguments = write_mla_cache_inputs(
        tokens=random.choice(_ROWS),
        latent_dim=latent,
        rope_dim=rope,
        page_size=random.choice((1, 3, 16, 64)),
        skipped=random.choice((0, 1, 2, 3)),
        dtype=random.choice(FLOATS),
        kv_dtype=FP8 if fp8 else None,
        device=device,
        **_seed(random),
    )
    if fp8:
        scale = random.choice((2.0**-6, 0.3, 3.3, 1e-8))
        arguments["kv_scale"] = torch.tensor([scale], device=device) if random.random() < 0.5 else scale
    return arguments


def all_reduce(random: Random, device: torch.device) -> Arguments:
    return all_reduce_inputs(
        tokens=random.choice(_ROWS),
        hidden_size=random.choice((1, 7, 64)),
        dtype=random.choice(FLOATS),
        device=device,
        **_seed(random),
    )


def all_reduce_rms_norm(random: Random, device: torch.device) -> Arguments:
    dtype, form = random.choice(FLOATS), random.choice(FORMS)
    return all_reduce_rms_norm_inputs(
        tokens=random.choice(_ROWS),
        hidden_size=random.choice((16, 64)) if form == "nvfp4" else random.choice((1, 7, 64, 130)),
        dtype=dtype,
        format=form,
        weight_dtype=random.choice((dtype, torch.float32)),
        eps=random.choice((0.0, 1e-6, 1.0)),
        device=device,
        **_seed(random),
    )


def _routed(random: Random, device: torch.device) -> Arguments:
    tokens, top_k = random.choice(_ROWS), random.choice((1, 2, 8))
    return {
        "tokens": tokens,
        "hidden_size": random.choice((1, 7, 64, 130)),
        "num_experts": random.choice((8, 12)),
        "top_k": top_k,
        "format": random.choice(EXPERT_FORMATS),
        "max_tokens": random.choice((None, max(tokens, 1), tokens + 3, 300)),
        "device": device,
        **_seed(random),
    }


def moe_dispatch(random: Random, device: torch.device) -> Arguments:
    return dispatch_inputs(dtype=random.choice((*FLOATS, FP8)), **_routed(random, device))


def moe_combine(random: Random, device: torch.device) -> Arguments:
    return combine_inputs(dtype=random.choice(FLOATS), **_routed(random, device))


def expert_parallel_moe(random: Random, device: torch.device) -> Arguments:
    tokens = random.choice(_ROWS)
    sizes = {"num_experts": random.choice((4, 6)), "top_k": random.choice((1, 2)), "hidden_size": 128}
    return parallel_inputs(
        tokens=tokens,
        weights=random.choice(FORMATS),
        dtype=random.choice(FLOATS),
        max_tokens=random.choice((None, max(tokens, 1), 300)),
        intermediate_size=128,
        device=device,
        **sizes,
        **_seed(random),
    )


def reduce_scatter(random: Random, device: torch.device) -> Arguments:
    return reduce_scatter_inputs(
        tokens=random.choice(_ROWS),
        hidden_size=random.choice((1, 7, 64)),
        dtype=random.choice(FLOATS),
        device=device,
        **_seed(random),
    )


def all_gather(random: Random, device: torch.device) -> Arguments:
    return all_gather_inputs(
        tokens=random.choice(_ROWS),
        hidden_size=random.choice((1, 7, 64)),
        dtype=random.choice((*FLOATS, FP8, torch.int32)),
        unequal=random.random() < 0.5,
        device=device,
        **_seed(random),
    )


def concat_mla_k(random: Random, device: torch.device) -> Arguments:
    nope, rope = random.choice(((128, 64), (192, 64), (7, 3), (1, 1), (16, 16)))
    return concat_inputs(
        tokens=random.choice(_ROWS),
        num_heads=random.choice((1, 3, 5, 16)),
        nope_dim=nope,
        rope_dim=rope,
        dtype=random.choice((*FLOATS, FP8)),
        device=device,
        **_seed(random),
    )


def _indexer(random: Random) -> IndexerModel:
    return IndexerModel("drawn", *random.choice(((6, 32), (64, 128), (32, 128), (1, 16), (3, 64))), 64)


def mqa_logits(random: Random, device: torch.device) -> Arguments:
    tokens = random.choice(_ROWS)
    return logits_inputs(
        _indexer(random),
        tokens=tokens,
        keys=tokens + random.choice((0, 1, 30, 65, 130)),
        dtype=random.choice((FP8, *FLOATS)),
        k_scale=random.random() < 0.6,
        device=device,
        **_seed(random),
    )


def paged_mqa_logits(random: Random, device: torch.device) -> Arguments:
    next_n = random.choice((1, 1, 2, 3))
    lens = [random.choice((0, *_LENGTHS[5:], 100)) for _ in range(random.choice((0, 1, 2, 4)))]
    fused = random.random() < 0.4
    return paged_logits_inputs(
        _indexer(random),
        seq_lens=[max(length, next_n) if length else 0 for length in lens],
        next_n=next_n,
        page_size=random.choice((1, 3, 16, 64)),
        max_seq_len=max([*lens, 1]) + next_n + random.choice((0, 9)) if random.random() < 0.5 or not lens else None,
        dtype=FP8 if fused else random.choice((FP8, *FLOATS)),
        k_scale=random.random() < 0.6,
        fused=fused,
        device=device,
        **_seed(random),
    )


def topk_indices(random: Random, device: torch.device) -> Arguments:
    return topk_inputs(
        tokens=random.choice(_ROWS[:8]),
        keys=random.choice((1, 5, 64, 300, 2049, 5000)),
        k=random.choice((1, 2, 64, 300, 2048)),
        ranges=random.random() < 0.6,
        levels=random.choice((None, 1, 3, 40)),
        device=device,
        **_seed(random),
    )


def linear_attention(random: Random, device: torch.device) -> Arguments:
    width, values = random.choice(((32, 16), (128, 128), (64, 64), (7, 33), (1, 1), (40, 100)))
    count, pool = random.choice((0, 1, 2, 4)), random.random() < 0.4
    ragged = random.random() < 0.5
    lengths = [random.choice((*_LENGTHS, 100)) for _ in range(count)]
    arguments = linear_inputs(
        LinearModel("drawn", random.choice((1, 2, 3)), width, values),
        batch=count,
        tokens=random.choice((0, *_LENGTHS[2:], 100)),
        lengths=lengths if ragged else None,
        state=random.random() < 0.5,
        slots=[-1 if random.random() < 0.3 else 2 * at for at in range(count)] if pool else None,
        num_slots=2 * count + 1,
        dtype=random.choice(FLOATS),
        device=device,
        **_seed(random),
    )
    if random.random() < 0.3:
        small = 1e-2 if arguments["q"].dtype is torch.float16 else 1e-8
        arguments["scale"] = random.choice((0.3, -2.0, 0.0, small))
    if pool and random.random() < 0.4:
        arguments["out_state"] = torch.full_like(arguments["state"], 7.0)
    elif pool or random.random() < 0.5:
        arguments["return_state"] = True
    return arguments


def _x(random: Random, device: torch.device, step: int) -> torch.Tensor:
    lead = random.choice(((), (), (2,), (3, 1)))
    width = step * random.choice((1, 2, 3, 5, 9))
    x = activations(*lead, random.choice(_ROWS), width, dtype=random.choice(FLOATS), **_seed(random))
    if random.random() < 0.3:
        x = x * random.choice((1e-8, 1e-3, 100.0, 1000.0))
    if random.random() < 0.2 and x.numel():
        x.view(-1)[random.randrange(x.numel())] = random.choice((torch.nan, torch.inf, -torch.inf, 0.0, -0.0))
    return x.to(device)


def quantize_fp8(random: Random, device: torch.device) -> Arguments:
    granularity = random.choice(("tensor", "token", "group", "block"))
    arguments: Arguments = {"x": _x(random, device, random.choice((1, 31, 64, 128))), "granularity": granularity}
    if granularity == "block":
        arguments["x"] = arguments["x"].flatten(0, -2)
    if random.random() < 0.3:
        arguments["ue8m0"] = True
    elif granularity != "tensor" and random.random() < 0.3:
        arguments["scale_dtype"] = torch.float8_e8m0fnu
    if granularity != "tensor" and random.random() < 0.3:
        arguments["scale_layout"] = "column"
    if granularity == "group" and random.random() < 0.4:
        arguments["group_size"] = random.choice((24, 32, 64))
    if granularity in ("tensor", "token") and set(arguments) == {"x", "granularity"} and random.random() < 0.5:
        rows = (1,) if granularity == "tensor" else (*arguments["x"].shape[:-1], 1)
        arguments["scale"] = torch.full(rows, random.choice((0.05, 3.0, 2.0**-60, 1e-8)), device=device)
    return arguments


def quantize_mxfp4(random: Random, device: torch.device) -> Arguments:
    return {"x": _x(random, device, 32), "scale_rounding": random.choice(("floor", "up"))}


def quantize_mxfp8(random: Random, device: torch.device) -> Arguments:
    return {"x": _x(random, device, random.choice((1, 31, 32))), "scale_rounding": random.choice(("floor", "up"))}


def quantize_nvfp4(random: Random, device: torch.device) -> Arguments:
    arguments: Arguments = {"x": _x(random, device, 16)}
    if random.random() < 0.4:
        arguments["global_scale"] = torch.full((1,), random.choice((0.05, 3.0, 2.0**-60)), device=device)
    return arguments


_SCALINGS: tuple[Arguments, ...] = (
    {"scaling": "tensor"},
    {"scaling": "row"},
    {"scaling": "row", "per_row": (True, False)},
    {"scaling": "row", "per_row": (False, True)},
    {"scaling": "block"},
    {"scaling": "block", "e8m0": (True, True)},
    {"scaling": "row_block"},
    {"scaling": "mx"},
    {"scaling": "row", "e5m2": True},
    {"scaling": "block", "e5m2": True},
    {"scaling": "tensor", "weight_only": torch.bfloat16},
    {"scaling": "row", "weight_only": torch.float16},
    {"scaling": "block", "weight_only": torch.bfloat16},
)


def fp8_gemm(random: Random, device: torch.device) -> Arguments:
    return fp8_gemm_inputs(
        tokens=random.choice(_ROWS),
        n=random.choice((1, 7, 16, 63, 64, 130, 200)),
        k=random.choice((1, 16, 31, 128, 129, 272, 512)),
        bias=random.random() < 0.3,
        out_dtype=random.choice(FLOATS),
        device=device,
        **random.choice(_SCALINGS),
        **_seed(random),
    )


def bmm_fp8(random: Random, device: torch.device) -> Arguments:
    return bmm_fp8_inputs(
        batch=random.choice((0, 1, 2, 5)),
        tokens=random.choice(_ROWS),
        n=random.choice((1, 16, 63, 65, 128)),
        k=random.choice((1, 16, 33, 128, 160)),
        a_scaling=random.choice(("tensor", "batch")),
        b_scaling=random.choice(("tensor", "batch")),
        e5m2=random.choice((None, None, "a", "b")),
        out_dtype=random.choice(FLOATS),
        device=device,
        **_seed(random),
    )


def fp4_gemm(random: Random, device: torch.device) -> Arguments:
    return fp4_gemm_inputs(
        tokens=random.choice(_ROWS),
        n=random.choice((1, 8, 63, 72, 128)),
        k=random.choice((32, 64, 96, 256, 544)),
        a_format=random.choice(A_FORMATS),
        b_format=random.choice(B_FORMATS),
        per_row=random.random() < 0.7,
        bias=random.random() < 0.4,
        out_dtype=random.choice(FLOATS),
        device=device,
        **_seed(random),
    )


def grouped_gemm(random: Random, device: torch.device) -> Arguments:
    formats = ("bfloat16", "float16", "float32", "tensor", "channel", "block", "nvfp4", "mxfp4", *PAIRS)
    return grouped_gemm_inputs(
        sizes=[random.choice((0, 0, 1, 3, 16, 33)) for _ in range(random.choice((1, 2, 4)))],
        n=random.choice((8, 64, 120, 192)),
        k=random.choice((64, 128, 256)),
        format=random.choice(formats),
        a_dtype=random.choice((torch.bfloat16, torch.float16)),
        masked=random.random() < 0.4,
        spare=random.choice((0, 3)),
        bias=random.random() < 0.4,
        powers_of_two=random.random() < 0.3,
        device=device,
        **_seed(random),
    )


def fused_moe(random: Random, device: torch.device) -> Arguments:
    experts, weights = random.choice((1, 2, 5, 8)), random.choice(FORMATS)
    step = {"nvfp4": 16, "mxfp4": 32, "mxint4": 32, "fp8_block": 128, "fp8_block_ue8m0": 128}.get(weights, 1)
    model = MoeModel(
        "drawn",
        num_experts=experts,
        top_k=random.randint(1, min(experts, 4)),
        hidden_size=step * random.choice((1, 2)) if step > 1 else random.choice((33, 64, 128, 130)),
        intermediate_size=step * random.choice((1, 2)) if step > 1 else random.choice((17, 32, 64, 66)),
        activation=random.choice(ACTIVATIONS),
        bias=random.random() < 0.4,
    )
    dtype = random.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    made = {"tokens": random.choice(_ROWS[:10]), "weights": weights, "dtype": dtype, "device": device}
    arguments = moe_inputs(model, **made, **_seed(random))
    if random.random() < 0.2:
        arguments["apply_router_weight_on_input"] = True
    if random.random() < 0.2:
        arguments["residual"] = torch.randn_like(arguments["x"].float()).to(dtype)
    if random.random() < 0.2 and arguments["topk_ids"].numel():
        arguments["topk_ids"][random.randrange(len(arguments["topk_ids"])), 0] = -1
    if random.random() < 0.2:
        arguments["expert_map"] = torch.arange(experts, dtype=torch.int32, device=device).flip(0)
    return arguments


def rms_norm_quant(random: Random, device: torch.device) -> Arguments:
    dtype, form = random.choice(FLOATS), random.choice(FORMS)
    arguments = norm_inputs(
        tokens=random.choice(_ROWS),
        width=random.choice((16, 48, 128, 320, 2064) if form == "nvfp4" else (1, 7, 64, 127, 320, 2049)),
        format=form,
        residual=random.random() < 0.5,
        dtype=dtype,
        weight_dtype=random.choice((dtype, torch.float32)),
        device=device,
        **_seed(random),
    )
    arguments["eps"] = random.choice((1e-6, 1e-5, 0.1))
    return arguments | {"unit_offset": random.random() < 0.3} | _scales(form, random)


def silu_and_mul_quant(random: Random, device: torch.device) -> Arguments:
    form = random.choice(FORMS)
    arguments = activation_inputs(
        tokens=random.choice(_ROWS),
        width=random.choice((16, 48, 128, 320, 2064) if form == "nvfp4" else (1, 7, 64, 127, 320, 2049)),
        format=form,
        dtype=random.choice(FLOATS),
        device=device,
        **_seed(random),
    )
    return arguments | _scales(form, random)


def _scales(form: str | None, random: Random) -> Arguments:
    """Options of the scales of float8 by token and by group."""
    if form not in ("fp8_token", "fp8_group"):
        return {}
    chosen: Arguments = random.choice(({}, {"ue8m0": True}, {"scale_dtype": torch.float8_e8m0fnu}))
    return chosen | {"scale_layout": random.choice(("row", "column"))}


def route_experts(random: Random, device: torch.device) -> Arguments:
    groups = random.choice((1, 1, 1, 4))
    experts = groups * random.choice((2, 4, 8, 17))
    model = MoeModel(
        "drawn",
        experts,
        random.randint(1, min(experts // groups * (2 if groups > 1 else 1), 8)),
        1,
        1,
        scoring=random.choice(("softmax", "sigmoid", "softmax_after_topk") if groups == 1 else ("softmax", "sigmoid")),
        num_groups=groups,
        topk_groups=2 if groups > 1 else 1,
        correction_bias=random.random() < 0.4,
        renormalize=random.random() < 0.5,
        scaling_factor=random.choice((1.0, 2.5, 1e-8)),
    )
    dtype = random.choice(FLOATS)
    return routing_inputs(model, tokens=random.choice(_ROWS), dtype=dtype, device=device, **_seed(random))


DRAWN: dict[str, Callable[[Random, torch.device], Arguments]] = {
    make.__name__: make
    for make in (
        attention,
        paged_attention,
        merge_attention_states,
        write_kv_cache,
        mla_attention,
        write_mla_cache,
        concat_mla_k,
        all_reduce,
        all_reduce_rms_norm,
        moe_dispatch,
        moe_combine,
        expert_parallel_moe,
        reduce_scatter,
        all_gather,
        mqa_logits,
        paged_mqa_logits,
        topk_indices,
        linear_attention,
        quantize_fp8,
        quantize_mxfp4,
        quantize_mxfp8,
        quantize_nvfp4,
        rms_norm_quant,
        silu_and_mul_quant,
        fp8_gemm,
        bmm_fp8,
        fp4_gemm,
        grouped_gemm,
        fused_moe,
        route_experts,
    )
}
