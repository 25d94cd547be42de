"""Every attention kernel that can run here, against torch's best and against the machine's roofs.

    python benchmarks/attention.py [--quick] [--json] [--out FILE] [--plot FILE.png] [--show FILE]

torch's best is the fastest of scaled_dot_product_attention with enable_gqa, with KV heads expanded beforehand,
and with the heads of a group packed as rows (decode only). A paged call is held against torch over dense KV of
equal size, which has no pages to gather. The bytes of a case are those of its KV, queries and results.

How kernels are timed and what the roofs are: roofline.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from roofline import Case, drawn_on, main
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_out
from kernelhub.ops.merge.inputs import merge_inputs
from kernelhub.ops.mla.concat.inputs import concat_inputs
from kernelhub.ops.models.shapes import ATTENTION, AttentionModel


def prefill(model: AttentionModel, tokens: int, batch: int, device: torch.device, dtype: torch.dtype) -> Case:
    arguments = attention_inputs(model, batch=batch, q_tokens=tokens, dtype=dtype, **drawn_on(device))
    q, k, v = (arguments[name].transpose(1, 2) for name in ("q", "k", "v"))
    group = model.num_q_heads // model.num_kv_heads
    expanded = [t.repeat_interleave(group, 1) for t in (k, v)]
    plain = not any(name in arguments for name in ("window", "softcap", "sinks"))
    seen = tokens * tokens / 2 if model.window is None else min(tokens * tokens / 2, tokens * (model.window + 1))
    width = model.head_dim_qk + model.head_dim_vo
    return Case(
        f"prefill {model.name}, {batch} x {tokens}, {str(dtype)[6:]}",
        "attention",
        arguments,
        {
            "sdpa, enable_gqa": lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            "sdpa, KV expanded": lambda: scaled_dot_product_attention(q, *expanded, is_causal=True),
        }
        if plain
        else {},
        bytes=sum(arguments[name].numel() * dtype.itemsize for name in ("q", "k", "v")) + q.numel() * dtype.itemsize,
        operations=int(2 * batch * model.num_q_heads * seen * width),
        disagreement=agreement_of(arguments),
    )


def decode(
    model: AttentionModel,
    kv_tokens: int,
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    paged: bool,
    fp8: bool = False,
) -> Case:
    kv_dtype = torch.float8_e4m3fn if fp8 else dtype
    if paged:
        arguments = paged_attention_inputs(
            model,
            seq_lens=(kv_tokens,) * batch,
            dtype=dtype,
            kv_dtype=kv_dtype,
            **drawn_on(device),
        )
        q = arguments["q"].unsqueeze(2)
    else:
        arguments = attention_inputs(
            model,
            batch=batch,
            q_tokens=1,
            kv_tokens=kv_tokens,
            dtype=dtype,
            kv_dtype=kv_dtype,
            **drawn_on(device),
        )
        q = arguments["q"].transpose(1, 2)
    heads = (batch, model.num_kv_heads, kv_tokens)
    k = torch.randn(*heads, model.head_dim_qk, device=device).to(dtype)
    v = torch.randn(*heads, model.head_dim_vo, device=device).to(dtype)
    group = model.num_q_heads // model.num_kv_heads
    expanded = [t.repeat_interleave(group, 1) for t in (k, v)]
    packed = q.reshape(batch, model.num_kv_heads, group, model.head_dim_qk)
    plain = not any(name in arguments for name in ("window", "softcap", "sinks"))
    seen = kv_tokens if model.window is None else min(kv_tokens, model.window + 1)
    width = model.head_dim_qk + model.head_dim_vo
    kind = "paged decode" if paged else "decode"
    return Case(
        f"{kind} {model.name}, {batch} x {kv_tokens}, {str(kv_dtype)[6:]} KV",
        "paged_attention" if paged else "attention",
        arguments,
        {
            "sdpa, enable_gqa": lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
            "sdpa, KV expanded": lambda: scaled_dot_product_attention(q, *expanded),
            "sdpa, heads packed by hand": lambda: scaled_dot_product_attention(packed, k, v),
        }
        if plain
        else {},
        bytes=batch * model.num_kv_heads * seen * width * kv_dtype.itemsize,
        operations=2 * batch * model.num_q_heads * seen * width,
        disagreement=agreement_of(arguments),
    )


def merge(tokens: int, parts: int, device: torch.device, dtype: torch.dtype) -> Case:
    arguments = merge_inputs(parts=parts, tokens=tokens, dtype=dtype, device=device, empty=False)
    values = arguments["outs"][0].numel()

    def in_torch() -> Tensor:
        weights = torch.stack(arguments["lses"]).softmax(0).transpose(1, 2).unsqueeze(-1)
        return sum(part * weight for part, weight in zip(arguments["outs"], weights, strict=True)).to(dtype)

    return Case(
        f"merge of {parts} x {tokens} tokens, 128 heads of 128, {str(dtype)[6:]}",
        "merge_attention_states",
        arguments,
        {"a softmax and a weighted sum": in_torch},
        bytes=(parts + 1) * values * dtype.itemsize + parts * values // 128 * 4,
        operations=2 * parts * values,
        disagreement=agreement_of(arguments),
    )


def concat(tokens: int, device: torch.device, dtype: torch.dtype) -> Case:
    arguments = concat_inputs(tokens=tokens, dtype=dtype, device=device)
    k_nope, shared = arguments["k_nope"], arguments["k_rope"].expand(-1, arguments["k_nope"].shape[1], -1)
    values = k_nope.numel() + shared.numel()
    return Case(
        f"concat_mla_k of {tokens} tokens, 128 heads of 128 + 64, {str(dtype)[6:]}",
        "concat_mla_k",
        arguments,
        {"torch.cat": lambda: torch.cat([k_nope, shared], 2)},
        bytes=(values + k_nope.numel() + arguments["k_rope"].numel()) * dtype.itemsize,
        operations=0,
        disagreement=agreement_of(arguments),
    )


def agreement_of(arguments: dict[str, Any]) -> Callable[[Any, Any], float]:
    """Distance of two attention results in units of what is allowed."""
    largest = _largest(arguments)

    def disagreement(got: Tensor, want: Tensor) -> float:
        agreement = compare_out(got, want.float(), 2 * largest)
        return agreement.largest / agreement.largest_allowed

    return disagreement


def _largest(arguments: dict[str, Any]) -> float:
    """Largest of the values that a result is made of."""
    parts = arguments.get("outs") or [
        arguments[name] for name in ("v", "v_cache", "k_nope", "k_rope", "kv_cache") if name in arguments
    ]
    scale = float(arguments.get("v_scale", arguments.get("kv_scale", 1.0)))
    return max(float(part.float().nan_to_num().abs().max()) for part in parts) * scale


def cases(device: torch.device, quick: bool) -> list[Callable[[], Case]]:
    """What is timed: small enough for a CPU, or as an engine runs it on a GPU."""
    bf16, llama = torch.bfloat16, ATTENTION["llama-3.1-8b"]
    made: list[Callable[[], Case]] = []
    if device.type == "cpu":
        for tokens in (512,) if quick else (512, 2048):
            made.append(lambda tokens=tokens: prefill(llama, tokens, 1, device, bf16))
        made.append(lambda: prefill(ATTENTION["gpt-oss-120b"], 1024, 1, device, bf16))
        if not quick:
            made.append(lambda: prefill(ATTENTION["gemma-2-9b"], 512, 1, device, bf16))
            made.append(lambda: prefill(llama, 512, 1, device, torch.float32))
        for batch in (8,) if quick else (1, 8):
            made.append(lambda batch=batch: decode(llama, 2048, batch, device, bf16, paged=False))
            made.append(lambda batch=batch: decode(llama, 2048, batch, device, bf16, paged=True))
        if not quick:
            made.append(lambda: decode(llama, 2048, 8, device, torch.float32, paged=True))
            made.append(lambda: decode(llama, 2048, 8, device, torch.float16, paged=True))
            made.append(lambda: decode(llama, 2048, 8, device, bf16, paged=True, fp8=True))
            made.append(lambda: decode(ATTENTION["gpt-oss-120b"], 2048, 8, device, bf16, paged=True))
            made.append(lambda: merge(512, 2, device, bf16))
            made.append(lambda: concat(512, device, bf16))
        return made
    for tokens in (2048,) if quick else (1024, 2048, 4096, 8192, 16384):
        made.append(lambda tokens=tokens: prefill(llama, tokens, max(1, 16384 // tokens), device, bf16))
    for name in ("gpt-oss-120b", "gemma-2-9b", "deepseek-v3.2 prefill"):
        made.append(lambda name=name: prefill(ATTENTION[name], 4096, 2, device, bf16))
    for batch, kv_tokens in ((32, 4096),) if quick else ((1, 8192), (1, 131072), (16, 4096), (64, 4096), (256, 2048)):
        made.append(lambda b=batch, n=kv_tokens: decode(llama, n, b, device, bf16, paged=True))
    for batch, kv_tokens in ((32, 4096),) if quick else ((1, 8192), (32, 4096), (128, 2048)):
        made.append(lambda b=batch, n=kv_tokens: decode(llama, n, b, device, bf16, paged=False))
    made.append(lambda: decode(llama, 4096, 64, device, bf16, paged=True, fp8=True))
    made.append(lambda: decode(ATTENTION["gpt-oss-120b"], 8192, 32, device, bf16, paged=True))
    for tokens, parts in ((8192, 2),) if quick else ((128, 2), (8192, 2), (8192, 4)):
        made.append(lambda t=tokens, p=parts: merge(t, p, device, bf16))
    made.append(lambda: concat(8192, device, bf16))
    return made


if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], cases))
