"""Every kernel of `grouped_gemm` that can run here, on the experts of real models, against the machine's roofs.

    python benchmarks/grouped_gemm.py [--quick] [--out FILE]

Tokens are sent to experts at random, each to as many as the model sends it to; both products of a layer's experts are
timed as published. A case's time at the roof is the larger of the bytes that
must move (weights of experts with a token, rows, result) over the bytes read per second, and of its operations over
those of a bfloat16 product, or twice as many where the operands are fp8. Results of all kernels are compared first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from roofline import Case, main
from torch import Tensor

from kernelhub.ops.models.shapes import GROUPED, ExpertModel

_WIDEST_DISAGREEMENT = 2.0**-6  # of the largest element: two roundings to bfloat16, and fp8 sums in few bits


def arguments(model: ExpertModel, weights: tuple[int, int], tokens: int, form: str, device: Any) -> dict[str, Any]:
    """Operands of one product, made where they are used."""
    n, k = weights
    experts = model.num_experts
    ids = torch.rand(tokens, experts, device=device).topk(model.top_k, 1).indices
    rows = tokens * model.top_k
    counts = torch.bincount(ids.reshape(-1), minlength=experts)
    made: dict[str, Any] = {"offsets": counts.cumsum(0).int()}
    if form == "block":
        blocks = -(-k // 128)
        made["a"] = torch.randn(rows, k, device=device).to(torch.float8_e4m3fn)
        made["b"] = torch.randint(0, 0x78, (experts, n, k), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        made["a_scale"] = 0.5 + torch.rand(rows, blocks, device=device)
        made["b_scale"] = 0.5 + torch.rand(experts, -(-n // 128), blocks, device=device)
        return made
    if form == "nvfp4 x nvfp4":
        for name, lead in (("a", (rows,)), ("b", (experts, n))):
            made[name] = torch.randint(0, 256, (*lead, k // 2), dtype=torch.uint8, device=device)
            scales = torch.randint(0x28, 0x40, (*lead, -(-k // 16)), dtype=torch.uint8, device=device)
            made[f"{name}_scale"] = scales.view(torch.float8_e4m3fn)
            made[f"{name}_global_scale"] = 0.5 + torch.rand(experts, device=device)
        return made
    made["a"] = torch.randn(rows, k, device=device).to(torch.bfloat16)
    if form == "mxfp4":
        made["b"] = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device=device)
        made["b_scale"] = torch.randint(120, 128, (experts, n, -(-k // 32)), dtype=torch.uint8, device=device)
    else:
        made["b"] = torch.empty(experts, n, k, dtype=torch.bfloat16, device=device).normal_()
    return made


def case(model: ExpertModel, side: str, weights: tuple[int, int], tokens: int, form: str, device: torch.device) -> Case:
    made = arguments(model, weights, tokens, form, device)
    a, b = made["a"], made["b"]
    used = int((made["offsets"].diff(prepend=made["offsets"].new_zeros(1)) > 0).sum())
    scales = made["b_scale"].nbytes * used // b.shape[0] if "b_scale" in made else 0
    return Case(
        f"{model.name} {side}, {tokens} tokens, {form}",
        "grouped_gemm",
        made,
        {},
        bytes=a.nbytes + b.nbytes * used // b.shape[0] + scales + a.shape[0] * b.shape[1] * 2,
        operations=2 * a.shape[0] * weights[1] * b.shape[1],
        disagreement=apart,
        float8=a.dtype is torch.float8_e4m3fn,
    )


def apart(got: Tensor, want: Tensor) -> float:
    """Largest difference in units of what is allowed."""
    return float((got.float() - want.float()).abs().max() / (_WIDEST_DISAGREEMENT * want.float().abs().max()))


def cases(device: torch.device, quick: bool) -> list[Callable[[], Case]]:
    """Decode of a few sequences and of many, and a chunk of prefill."""
    models = [GROUPED["qwen3-30b-a3b"]] if quick or device.type == "cpu" else list(GROUPED.values())
    return [
        functools.partial(case, model, side, weights, tokens, model.format, device)
        for model in models
        for tokens in ((1, 16) if device.type == "cpu" else (16, 128, 4096))
        for side, weights in (("w13", model.w13), ("w2", model.w2))
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], cases))
