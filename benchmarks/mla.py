"""Every kernel of latent attention that can run here, against torch's best and against the machine's roofs.

    python benchmarks/mla.py [--quick] [--json] [--out FILE] [--plot FILE.png] [--show FILE]

How kernels are timed and what the roofs are: roofline.py. Shapes are those of DeepSeek-V3.2: latents of 512 + 64,
128 heads (one GPU) or 16 (tensor parallelism of 8), sparse over 2048 tokens.

torch's ways are given latents that lie densely in bfloat16, without pages to gather: scaled_dot_product_attention with
the heads packed as rows of one KV head, and two batched products around a softmax, whose scores are rounded to the
dtype of the operands. For sparse attention they gather the listed rows first, as they must. A case's bytes are those of
the cached rows that are seen, of q and of the result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from attention import agreement_of
from roofline import Case, main
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernelhub.ops.mla.cache.inputs import write_mla_cache_inputs
from kernelhub.ops.models.shapes import MLA

MODEL = MLA["deepseek-v3.2"]
V, WIDTH = MODEL.kv_lora_rank, MODEL.kv_lora_rank + MODEL.qk_rope_head_dim
PAGE = 64
FP8 = torch.float8_e4m3fn


def decode(
    heads: int,
    batch: int,
    kv_tokens: int,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    tokens: int = 1,
    topk: int | None = None,
) -> Case:
    """One step of decode; with `tokens` of speculative decode, with `topk` sparse."""
    kv_dtype = kv_dtype or dtype
    per_sequence = -(-kv_tokens // PAGE)
    latents = torch.randn(batch * per_sequence, PAGE, WIDTH, device=device)
    shape = (batch, heads) if tokens == 1 else (batch, tokens, heads)
    q = (torch.randn(*shape, WIDTH, device=device) * 2 / (MODEL.scale * WIDTH**0.5)).to(dtype)
    table = torch.randperm(batch * per_sequence, device=device).view(batch, per_sequence)
    arguments = {
        "q": q,
        "kv_cache": (latents * 64).clamp(-448, 448).to(FP8) if kv_dtype is FP8 else latents.to(dtype),
        "block_table": table.int(),
        "seq_lens": torch.full((batch,), kv_tokens, dtype=torch.int32, device=device),
        "scale": MODEL.scale,
        "value_dim": V,
        **({"kv_scale": 1 / 64} if kv_dtype is FP8 else {}),
    }
    seen = kv_tokens
    if topk is not None:
        seen = min(topk, kv_tokens)
        scores = torch.rand(*shape[:-1], kv_tokens, device=device)
        arguments["topk_indices"] = scores.topk(seen, -1).indices.int()
    cached = latents.to(dtype)[table].flatten(1, 2)[:, :kv_tokens]
    label = f"{'sparse ' * (topk is not None)}decode, {heads} heads, {batch} x {kv_tokens}, {str(kv_dtype)[6:]}"
    return Case(
        label if tokens == 1 else f"{label}, {tokens} queries",
        "mla_attention",
        arguments,
        {} if tokens > 1 else peers(q, cached, arguments.get("topk_indices")),
        bytes=batch * (1 if topk is None else tokens) * seen * WIDTH * kv_dtype.itemsize
        + q.numel() // WIDTH * (WIDTH + V) * dtype.itemsize,
        operations=2 * q.numel() // WIDTH * seen * (WIDTH + V),
        disagreement=agreement_of(arguments),
    )


def peers(q: Tensor, cached: Tensor, topk_indices: Tensor | None) -> dict[str, Callable[[], Tensor]]:
    """torch's ways of decode over latents [B, L, D], heads as rows."""
    listed = None if topk_indices is None else topk_indices.long()[..., None].expand(-1, -1, WIDTH)

    def keys() -> Tensor:
        return cached if listed is None else cached.gather(1, listed)

    def sdpa() -> Tensor:
        rows = keys().unsqueeze(1)
        return scaled_dot_product_attention(q.unsqueeze(1), rows, rows[..., :V], scale=MODEL.scale).squeeze(1)

    def products() -> Tensor:
        rows = keys()
        scores = torch.bmm(q, rows.transpose(1, 2)).float().mul_(MODEL.scale)
        return torch.bmm(scores.softmax(2).to(q.dtype), rows[..., :V])

    return {"sdpa, heads packed by hand": sdpa, "two products, scores rounded": products}


def write(tokens: int, device: torch.device, kv_dtype: torch.dtype | None = None) -> Case:
    """New tokens to the cache: all that is to be done in torch is one indexed store, for fp8 after a conversion."""
    arguments = write_mla_cache_inputs(tokens=tokens, kv_dtype=kv_dtype, skipped=0, device=device)
    kv_c, k_rope, kv_cache, slots = (arguments[name] for name in ("kv_c", "k_rope", "kv_cache", "slot_mapping"))
    rows = kv_cache.view(torch.uint8) if kv_dtype is FP8 else kv_cache

    def store() -> Tensor:
        new = torch.cat([kv_c, k_rope], 1)
        if kv_dtype is FP8:
            new = (new.float() / arguments["kv_scale"]).clamp(-448, 448).to(FP8).view(torch.uint8)
        rows[slots // PAGE, slots % PAGE] = new
        return kv_cache

    return Case(
        f"write_mla_cache of {tokens} tokens, {str(kv_cache.dtype)[6:]}",
        "write_mla_cache",
        arguments,
        {"an indexed store": store},
        bytes=tokens * (WIDTH * (kv_c.itemsize + kv_cache.itemsize) + 8),
        operations=0,
    )


def cases(device: torch.device, quick: bool) -> list[Callable[[], Case]]:
    """What is timed: small enough for a CPU, or as an engine runs it on a GPU."""
    if device.type == "cpu":
        few, more = ((128, 1, 1024), (16, 4, 1024)), ((128, 1, 4096), (128, 4, 2048), (16, 1, 8192), (16, 8, 2048))
        made = [lambda h=h, b=b, n=n: decode(h, b, n, device) for h, b, n in (few if quick else more)]
        made.append(lambda: decode(16, 4, 1024, device, kv_dtype=FP8))
        made.append(lambda: decode(16, 2, 4096, device, topk=2048))
        if not quick:
            made.append(lambda: decode(16, 8, 2048, device, dtype=torch.float32))
            made.append(lambda: decode(128, 4, 2048, device, tokens=2))
            made.append(lambda: decode(64, 4, 2048, device))  # GLM-5's heads
        made += [lambda kv_dtype=kv_dtype: write(512, device, kv_dtype) for kv_dtype in (None, FP8)]
        return made
    few = ((1, 8192), (32, 4096))
    more = ((1, 1024), (1, 8192), (1, 32768), (8, 8192), (32, 1024), (32, 8192), (64, 4096), (128, 2048), (128, 8192))
    made = [lambda h=h, b=b, n=n: decode(h, b, n, device) for h in (128, 16) for b, n in (few if quick else more)]
    if not quick:
        float8 = ((1, 1024), (8, 8192), (32, 1024), (64, 4096), (128, 2048))
        made += [lambda h=h, b=b, n=n: decode(h, b, n, device, kv_dtype=FP8) for h in (128, 16) for b, n in float8]
    for heads in (128, 16):
        for batch, kv_tokens in ((32, 4096),) if quick else ((1, 32768), (32, 8192), (128, 4096)):
            made.append(lambda h=heads, b=batch, n=kv_tokens: decode(h, b, n, device, kv_dtype=FP8))
            made.append(lambda h=heads, b=batch, n=kv_tokens: decode(h, b, n, device, topk=2048))
            made.append(lambda h=heads, b=batch, n=kv_tokens: decode(h, b, n, device, kv_dtype=FP8, topk=2048))
    if not quick:
        made += [lambda b=b, n=n: decode(64, b, n, device) for b, n in ((32, 8192), (128, 2048))]  # GLM-5's heads
        made.append(lambda: decode(64, 32, 8192, device, topk=2048))
    made.append(lambda: decode(16, 32, 4096, device, tokens=2))
    made.append(lambda: decode(128, 32, 4096, device, tokens=2))
    for tokens in (128, 8192):
        made += [lambda t=tokens, kv_dtype=kv_dtype: write(t, device, kv_dtype) for kv_dtype in (None, FP8)]
    return made


if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], cases))
