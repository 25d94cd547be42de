"""Ops between products and attention: every kernel that can run here, against torch's ways and the roof of memory.

    python benchmarks/small_ops.py [--quick] [--json] [--out FILE] [--plot FILE.png] [--show FILE]

How kernels are timed and what the roofs are: roofline.py. Each op has a call of a few tokens, where a launch dominates,
and one of a prefill, where memory does. A case's bytes are those that are read and written once. Caches are cold; in
graphs where the operands of all calls together exceed the L2 cache, from about 1 MB a call on (of 50 MB).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from roofline import Case, main
from torch import Tensor

from kernelhub.ops.fused_quant.inputs import activation_inputs, norm_inputs
from kernelhub.ops.kv_cache.inputs import write_kv_cache_inputs
from kernelhub.ops.merge.inputs import merge_inputs
from kernelhub.ops.mla.concat.inputs import concat_inputs
from kernelhub.ops.quant.inputs import quantize_inputs

FP8 = torch.float8_e4m3fn
PAGE = 16


def write(tokens: int, device: torch.device, kv_dtype: torch.dtype | None = None) -> Case:
    """New tokens of Llama 3 70B at a tensor parallelism of 1 to the cache; in torch two indexed stores."""
    arguments = write_kv_cache_inputs(tokens=tokens, kv_dtype=kv_dtype, skipped=0, num_q_heads=64, device=device)
    k, v, k_cache, v_cache, slots = (arguments[name] for name in ("k", "v", "k_cache", "v_cache", "slot_mapping"))
    pairs = [(k, k_cache, arguments.get("k_scale")), (v, v_cache, arguments.get("v_scale"))]

    def stores() -> Tensor:
        page, place = slots // PAGE, slots % PAGE
        for new, cache, scale in pairs:
            if scale is None:
                cache[page, place] = new
            else:
                codes = (new.float() / scale).clamp(-448, 448).to(FP8)
                cache.view(torch.uint8)[page, place] = codes.view(torch.uint8)
        return k_cache

    moved = (k.numel() + v.numel()) * (k.itemsize + k_cache.itemsize) + 8 * tokens
    label = f"write_kv_cache of {tokens} tokens, {str(k_cache.dtype)[6:]}"
    written = (k.numel() + v.numel()) * k_cache.itemsize
    peers = {"indexed stores": stores}
    return Case(label, "write_kv_cache", arguments, peers, bytes=moved, operations=0, written=written)


def rotate(tokens: int, device: torch.device) -> Case:
    """The same with the rotary embedding of keys and queries; in torch step by step."""
    arguments = write_kv_cache_inputs(tokens=tokens, skipped=0, num_q_heads=64, rope="neox", device=device)
    q, k, v, k_cache, v_cache = (arguments[name] for name in ("q", "k", "v", "k_cache", "v_cache"))
    slots, positions, cos_sin = (arguments[name] for name in ("slot_mapping", "positions", "cos_sin_cache"))

    def steps() -> Tensor:
        page, place = slots // PAGE, slots % PAGE
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, -1)
        turned = []
        for x in (q, k):
            a, b = x.float().chunk(2, -1)
            turned.append(torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype))
        q.copy_(turned[0])
        k_cache[page, place], v_cache[page, place] = turned[1], v
        return k_cache

    moved = 2 * (q.nbytes + k.nbytes + v.nbytes) + tokens * (16 + 4 * cos_sin.shape[1])
    label = f"write_kv_cache of {tokens} tokens, with rope of 64 heads of q"
    written = q.nbytes + k.nbytes + v.nbytes
    return Case(label, "write_kv_cache", arguments, {"in steps": steps}, bytes=moved, operations=0, written=written)


def concat(tokens: int, device: torch.device) -> Case:
    """Keys of DeepSeek-V3's prefill, of 128 heads."""
    arguments = concat_inputs(tokens=tokens, device=device)
    k_nope, k_rope = arguments["k_nope"], arguments["k_rope"]
    heads = k_nope.shape[1]

    def joined() -> Tensor:
        return torch.cat([k_nope, k_rope.view(tokens, 1, -1).expand(-1, heads, -1)], -1)

    moved = 2 * k_nope.nbytes + k_rope.nbytes * (1 + heads)
    label = f"concat_mla_k of {tokens} tokens, {heads} heads"
    written = k_nope.nbytes + k_rope.nbytes * heads
    return Case(label, "concat_mla_k", arguments, {"cat": joined}, bytes=moved, operations=0, written=written)


def quantize(tokens: int, width: int, granularity: str, device: torch.device) -> Case:
    """Activations before a product."""
    arguments = quantize_inputs(tokens=tokens, width=width, device=device) | {"granularity": granularity}
    x = arguments["x"]
    size = width if granularity == "token" else 128

    def by_hand() -> Tensor:
        wide = x.float().unflatten(1, (-1, size))
        scale = wide.abs().amax(-1, keepdim=True) / 448
        return (wide / scale).to(FP8)

    moved = x.numel() * 3 + 4 * x.numel() // size
    label = f"quantize_fp8 by {granularity}, {tokens} x {width}"
    peers, written = {"in steps": by_hand}, moved - x.nbytes
    return Case(label, "quantize_fp8", arguments, peers, bytes=moved, operations=0, written=written)


def merge(tokens: int, device: torch.device) -> Case:
    """Two states of 32 heads of 128, as of a cached prefix and the new tokens."""
    arguments = merge_inputs(tokens=tokens, num_heads=32, empty=False, device=device)
    outs, lses = arguments["outs"], arguments["lses"]

    def by_hand() -> Tensor:
        a, b = lses
        share = torch.sigmoid(a - b).transpose(-1, -2).unsqueeze(-1)
        return (outs[0].float() * share + outs[1].float() * (1 - share)).to(outs[0].dtype)

    moved = 3 * outs[0].nbytes + 2 * lses[0].nbytes
    label = f"merge_attention_states of {tokens} tokens, {outs[0].shape[-2]} heads"
    peers, written = {"in steps": by_hand}, outs[0].nbytes
    return Case(label, "merge_attention_states", arguments, peers, bytes=moved, operations=0, written=written)


def norm(tokens: int, device: torch.device) -> Case:
    """The hidden states of DeepSeek-V3 with the residual, quantised for the next product."""
    arguments = norm_inputs(tokens=tokens, device=device)
    x, weight, residual = (arguments[name] for name in ("x", "weight", "residual"))

    def in_steps() -> Tensor:
        total = x + residual
        y = torch.nn.functional.rms_norm(total.float(), x.shape[-1:], weight.float(), 1e-6).unflatten(1, (-1, 128))
        scale = y.abs().amax(-1, keepdim=True) / 448
        return (y / scale).to(FP8)

    written = x.numel() * 3 + 4 * x.numel() // 128
    moved = 4 * x.numel() + weight.nbytes + written
    label = f"rms_norm_quant by group, {tokens} x {x.shape[1]}"
    peers = {"in steps": in_steps}
    return Case(label, "rms_norm_quant", arguments, peers, bytes=moved, operations=0, written=written)


def activate(tokens: int, width: int, device: torch.device) -> Case:
    """Gate and up of an expert, or of a dense layer, quantised for the next product."""
    arguments = activation_inputs(tokens=tokens, width=width, device=device)
    x = arguments["x"]

    def in_steps() -> Tensor:
        gate, up = x.float().chunk(2, -1)
        y = (torch.nn.functional.silu(gate) * up).unflatten(1, (-1, 128))
        scale = y.abs().amax(-1, keepdim=True) / 448
        return (y / scale).to(FP8)

    written = tokens * width + 4 * tokens * width // 128
    label = f"silu_and_mul_quant by group, {tokens} x {width}"
    peers = {"in steps": in_steps}
    return Case(label, "silu_and_mul_quant", arguments, peers, bytes=x.nbytes + written, operations=0, written=written)


def cases(device: torch.device, quick: bool) -> list[Callable[[], Case]]:
    """A few tokens, as of a step of decode, and many, as of a prefill."""
    made: list[Callable[[], Case]] = []
    for tokens in (8, 128) if device.type == "cpu" else (8, 8192) if quick else (1, 8, 128, 1024, 8192):
        made += [lambda t=tokens, kv=kv_dtype: write(t, device, kv) for kv_dtype in (None, FP8)]
        made.append(lambda t=tokens: rotate(t, device))
        made += [lambda t=tokens, g=granularity: quantize(t, 7168, g, device) for granularity in ("token", "group")]
        made.append(lambda t=tokens: merge(t, device))
        made.append(lambda t=tokens: concat(t, device))
        made.append(lambda t=tokens: norm(t, device))
        made.append(lambda t=tokens: activate(t, 2048, device))
    return made


if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], cases))
