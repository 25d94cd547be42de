"""Every kernel of routing and of experts that can run here, against torch's best and against the machine's roofs.

    python benchmarks/moe.py [--quick] [--json] [--out FILE] [--plot FILE.png] [--show FILE]

As benchmarks/attention.py, whose roofs, table and figure it takes. torch's best is the fastest of a matrix product per
expert, with weights widened to bfloat16 beforehand where they are quantised, and, where torch has it, its grouped
matrix product. A case's bytes are the weights of the experts that are hit, as they are stored, and the tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from roofline import Case, main
from torch import Tensor

import kernelhub
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.reference import joined
from kernelhub.ops.moe.experts.tolerance import compare
from kernelhub.ops.moe.experts.weights import dequantized, format_of, matrix
from kernelhub.ops.moe.routing.inputs import routing_inputs
from kernelhub.ops.moe.routing.tolerance import decided, weights_agree

_CHECKED_TOKENS = 8


def routing(model: str, tokens: int, device: torch.device) -> Case:
    arguments = routing_inputs(model, tokens=tokens, device=device)
    logits, top_k = arguments["logits"], arguments["top_k"]
    peers: dict[str, Callable[[], Tensor]] = {}
    if arguments["scoring"] == "softmax":
        peers["softmax and topk"] = lambda: logits.softmax(1).topk(top_k, 1).values
    elif arguments.get("num_groups"):
        peers["grouped topk, op by op"] = lambda: _grouped_topk(**arguments)
    return Case(
        f"routing {model}, {tokens} tokens",
        "route_experts",
        arguments,
        peers,
        bytes=logits.numel() * logits.element_size() + tokens * top_k * 8,
        operations=0,
        disagreement=disagreement_of("route_experts", arguments),
    )


def _grouped_topk(
    logits: Tensor, top_k: int, num_groups: int, topk_groups: int, correction_bias: Tensor, **_: Any
) -> Tensor:
    """DeepSeek-V3's routing as its modeling code has it."""
    scores = logits.sigmoid()
    ranked = scores + correction_bias
    best = ranked.unflatten(1, (num_groups, -1)).topk(2, 2).values.sum(2).topk(topk_groups, 1).indices
    outside = torch.ones(len(logits), num_groups, dtype=torch.bool, device=logits.device).scatter_(1, best, False)
    ranked = ranked.masked_fill(outside.repeat_interleave(ranked.shape[1] // num_groups, 1), -torch.inf)
    weights = scores.gather(1, ranked.topk(top_k, 1).indices)
    return weights / weights.sum(1, keepdim=True)


def experts(model: str, tokens: int, device: torch.device, **more: Any) -> Case:
    arguments = moe_inputs(model, tokens=tokens, device=device, **more)
    x, w13, ids = (arguments[name] for name in ("x", "w13", "topk_ids"))
    hit = int(ids.unique().numel())
    stored = sum(
        arguments[name].numel() * arguments[name].element_size() / len(w13)
        for name in ("w13", "w2", "w13_scale", "w2_scale")
        if name in arguments
    )
    inner = w13.shape[1] // 2
    wide13, wide2 = _widened(arguments, "w13"), _widened(arguments, "w2")
    peers = {"a product per expert": lambda: _one_by_one(arguments, wide13, wide2)}
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    if hopper and hasattr(torch, "_grouped_mm") and "w13_bias" not in arguments:
        peers["torch._grouped_mm"] = lambda: _grouped(arguments, wide13, wide2)
    scale = arguments.get("w13_scale")
    shape = () if scale is None else tuple(scale.shape[1:])
    name = format_of(w13.dtype, w13.shape[1], None if scale is None else scale.dtype, shape)
    return Case(
        f"{model}, {len(w13)} experts of {inner}, {name}, {tokens} tokens",
        "fused_moe",
        arguments,
        peers,
        bytes=int(hit * stored + 2 * x.numel() * x.element_size()),
        operations=2 * ids.numel() * 3 * inner * x.shape[1],
        disagreement=disagreement_of("fused_moe", arguments),
    )


def _widened(arguments: dict[str, Any], side: str) -> Tensor:
    """Weights of all experts in the dtype of the tokens."""
    weight, scale = arguments[side], arguments.get(side + "_scale")
    if scale is None:
        return weight
    name = format_of(weight.dtype, weight.shape[1], scale.dtype, tuple(scale.shape[1:]))
    given = matrix(name, weight, scale, arguments.get(side + "_global_scale"), None)
    dtype = arguments["x"].dtype
    return torch.stack([dequantized(name, given, expert, torch.float32).to(dtype) for expert in range(len(weight))])


def _one_by_one(arguments: dict[str, Any], w13: Tensor, w2: Tensor) -> Tensor:
    x, ids, weights = arguments["x"], arguments["topk_ids"], arguments["topk_weights"]
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        tokens, places = torch.where(ids == expert)
        both = x[tokens] @ w13[expert].t()
        if "w13_bias" in arguments:
            both = both + arguments["w13_bias"][expert]
        given = joined(both, arguments.get("activation", "silu"), 1.702, 7.0) @ w2[expert].t()
        if "w2_bias" in arguments:
            given = given + arguments["w2_bias"][expert]
        out.index_add_(0, tokens, (given * weights[tokens, places, None]).to(out.dtype))
    return out


def _grouped(arguments: dict[str, Any], w13: Tensor, w2: Tensor) -> Tensor:
    x, ids, weights = arguments["x"], arguments["topk_ids"], arguments["topk_weights"]
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(len(w13), dtype=torch.int32, device=x.device)
    ends = counts.scatter_add_(0, flat.long(), torch.ones_like(flat)).cumsum(0).int()
    tokens = order // ids.shape[1]
    gate, up = torch._grouped_mm(x[tokens], w13.transpose(1, 2), offs=ends).chunk(2, 1)
    given = torch._grouped_mm(torch.nn.functional.silu(gate) * up, w2.transpose(1, 2), offs=ends)
    weighed = (given * weights.flatten()[order].unsqueeze(1)).to(x.dtype)
    return torch.zeros_like(x).index_add_(0, tokens, weighed)


def cases(device: torch.device, quick: bool) -> list[Callable[[], Case]]:
    """What is timed: small enough for a CPU, or as an engine runs it on a GPU."""
    made: list[Callable[[], Case]] = []
    if device.type == "cpu":
        made.append(lambda: routing("deepseek-v3.2", 1024, device))
        made.append(lambda: routing("qwen3-30b-a3b", 1024, device))
        for tokens in (4, 256) if quick else (1, 16, 256):
            made.append(lambda n=tokens: experts("qwen3-30b-a3b", n, device, num_experts=16))
        for tokens in (4,) if quick else (1, 64):
            made.append(lambda n=tokens: experts("deepseek-v3.2", n, device, tensor_parallel=8, num_experts=8))
            made.append(lambda n=tokens: experts("gpt-oss-120b", n, device, tensor_parallel=2, num_experts=4))
            for model, ranks in () if quick else (("glm-5", 8), ("minimax-m2.5", 4)):
                made.append(lambda m=model, r=ranks, n=tokens: experts(m, n, device, tensor_parallel=r, num_experts=8))
        return made
    sizes = (1, 64, 1024) if quick else (1, 4, 16, 64, 256, 1024, 4096)
    for model in ("deepseek-v3.2", "qwen3-30b-a3b", "gpt-oss-120b"):
        for tokens in (64, 4096):
            made.append(lambda m=model, n=tokens: routing(m, n, device))
    for tokens in sizes:
        made.append(lambda n=tokens: experts("qwen3-30b-a3b", n, device))
        made.append(lambda n=tokens: experts("deepseek-v3.2", n, device, tensor_parallel=8))
        made.append(lambda n=tokens: experts("minimax-m2.5", n, device, tensor_parallel=4))
        made.append(lambda n=tokens: experts("gpt-oss-120b", n, device, tensor_parallel=1))
    for tokens in (16, 1024):
        made.append(lambda n=tokens: experts("glm-5", n, device, tensor_parallel=8))
        made.append(lambda n=tokens: experts("qwen3-30b-a3b", n, device, weights="fp8_channel"))
        made.append(lambda n=tokens: experts("qwen3-30b-a3b", n, device, weights="nvfp4"))
    return made


def disagreement_of(op: str, arguments: dict[str, Any]) -> Callable[[Any, Any], float]:
    """Distance of the first tokens of a result from the reference, in units of what is allowed."""
    some = {
        name: value[:_CHECKED_TOKENS] if name in ("logits", "x", "topk_weights", "topk_ids") else value
        for name, value in arguments.items()
    }

    def experts_apart(result: Tensor, _: Tensor) -> float:
        agreement = compare(result[:_CHECKED_TOKENS], some, torch.float32)
        return 0.0 if agreement.ok else float("inf")

    def routes_apart(result: tuple[Tensor, Tensor], _: Any) -> float:
        weights, ids = kernelhub.route_experts.reference(**some, dtype=torch.float64)
        sure = decided(**some)
        same = torch.equal(result[1][:_CHECKED_TOKENS][sure], ids[sure])
        close = weights_agree(result[0][:_CHECKED_TOKENS], weights, some["scaling_factor"])[sure].all()
        return 0.0 if same and close else float("inf")

    return experts_apart if op == "fused_moe" else routes_apart


if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], cases))
