"""One decode step of a DeepSeek-like block: latent attention, then routing, then experts in fp8.

Between the ops the block runs plain torch: the projection of the heads' latents back to the hidden size, a norm, and
the router's matrix product.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

import kernelhub
from kernelhub.ops.attention.tolerance import compare_out
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.models.shapes import MOE, MoeModel
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.tolerance import compare as compare_experts
from kernelhub.ops.moe.experts.weights import dequantized, format_of, matrix
from kernelhub.ops.moe.routing.inputs import routing_inputs
from kernelhub.ops.moe.routing.tolerance import decided, weights_agree

_HEADS = 16  # of 128, as on one of eight ranks
_RANKS = 8
_CHECKED = 8  # tokens whose experts are checked against the reference, which is slow


@dataclass(frozen=True)
class ToleranceCheck:
    """A result compared with the reference, in units of the tolerance.

    Attributes:
        largest: largest error of any element.
        rms_ratio: root mean square of the error.
        all_finite: whether every element is finite.
    """

    largest: float
    rms_ratio: float
    all_finite: bool
    largest_allowed: float = 1.0
    rms_ratio_allowed: float = 1.0

    @property
    def ok(self) -> bool:
        return self.all_finite and self.largest <= 1.0 and self.rms_ratio <= 1.0

    def __str__(self) -> str:
        if not self.all_finite:
            return "some elements are NaN or infinite"
        return f"largest error {self.largest:.2f} of what is allowed, RMS error {self.rms_ratio:.2f}"


class Block:
    """Tensors of one step; the outputs of earlier ops are computed at their first use.

    Args:
        num_seqs: sequences, each with one new token.
        kv_tokens: tokens of each in the latent cache.
        num_experts: routed experts of the layer, those of the model or fewer.
        device: device of the tensors.
    """

    def __init__(self, num_seqs: int, kv_tokens: int, num_experts: int, device: torch.device) -> None:
        self.num_seqs, self.kv_tokens, self.device = num_seqs, kv_tokens, device
        whole = MOE["deepseek-v3.2"]
        groups = min(whole.num_groups, num_experts // 2)
        self.model: MoeModel = dataclasses.replace(
            whole, num_experts=num_experts, num_groups=groups, topk_groups=min(whole.topk_groups, groups)
        )

    @cached_property
    def attention(self) -> dict[str, Any]:
        """Arguments of `mla_attention`."""
        return mla_attention_inputs(
            "deepseek-v3", num_heads=_HEADS, seq_lens=(self.kv_tokens,) * self.num_seqs, device=self.device
        )

    @cached_property
    def routing(self) -> dict[str, Any]:
        """Arguments of `route_experts`: the router's logits of the attention output."""
        made = routing_inputs(self.model, tokens=1, device=self.device)
        return {**made, "logits": self._hidden.float() @ self._router}

    @cached_property
    def experts(self) -> dict[str, Any]:
        """Arguments of `fused_moe`: the same rows, with the experts that routing selects."""
        weights, ids = kernelhub.route_experts(**self.routing)
        made = moe_inputs(self.model, tokens=1, tensor_parallel=_RANKS, device=self.device)
        return {**made, "x": self._hidden, "topk_weights": weights, "topk_ids": ids, "residual": self._hidden}

    @cached_property
    def _hidden(self) -> Tensor:
        """[num_seqs, hidden size]: the heads' latents through one projection, normalised."""
        out: Tensor = kernelhub.mla_attention(**self.attention)
        latents = out.flatten(1).float()  # many CPUs multiply bfloat16 slowly
        random = torch.Generator(self.device).manual_seed(1)
        shape = (latents.shape[1], self.model.hidden_size)
        projection = torch.randn(shape, generator=random, device=self.device, dtype=torch.float32)
        return rms_norm(latents @ projection, (self.model.hidden_size,)).to(out.dtype)

    @cached_property
    def _router(self) -> Tensor:
        random = torch.Generator(self.device).manual_seed(2)
        shape = (self.model.hidden_size, self.model.num_experts)
        router: Tensor = (
            torch.randn(shape, generator=random, device=self.device, dtype=torch.float32) * self.model.hidden_size**-0.5
        )
        return router

    def check_attention(self, out: Tensor) -> Any:
        """The result of `mla_attention` against the reference."""
        cache = self.attention["kv_cache"]
        largest = float(cache[..., : self.attention["value_dim"]].float().abs().nan_to_num().max())
        return compare_out(out, kernelhub.mla_attention.reference(**self.attention), largest)

    def check_routing(self, result: tuple[Tensor, Tensor]) -> ToleranceCheck:
        """Checks for the same experts, except where rounding can change them, and the same weights."""
        weights, ids = kernelhub.route_experts.reference(**self.routing, dtype=torch.float64)
        sure = decided(**self.routing)
        same = torch.equal(result[1][sure], ids[sure])
        near = bool(weights_agree(result[0], weights, self.model.scaling_factor)[sure].all())
        wrong = 0.0 if same and near else float("inf")
        return ToleranceCheck(wrong, wrong, bool(result[0].isfinite().all()))

    def check_experts(self, out: Tensor) -> ToleranceCheck:
        """The first tokens of the result of `fused_moe` against the reference."""
        per_token = ("x", "topk_weights", "topk_ids", "residual")
        some = {name: value[:_CHECKED] if name in per_token else value for name, value in self.experts.items()}
        found = compare_experts(out[:_CHECKED], some, torch.float32)
        return ToleranceCheck(found.worst, found.overall, found.finite)

    def attention_in_torch(self) -> Any:
        """Attention over dense latents, the heads packed as rows of one KV head."""
        q = self.attention["q"].unsqueeze(1)
        random = torch.Generator(self.device).manual_seed(0)
        shape = (self.num_seqs, 1, self.kv_tokens, q.shape[-1])
        keys = torch.randn(shape, generator=random, device=self.device, dtype=torch.float32).to(q.dtype)
        values = keys[..., : self.attention["value_dim"]]
        return lambda: scaled_dot_product_attention(q, keys, values, scale=self.attention["scale"])

    def routing_in_torch(self) -> Any:
        """Grouped top-k, op by op, as the model's own code has it."""
        model, given = self.model, self.routing

        def route() -> Tensor:
            scores = given["logits"].sigmoid()
            ranked = scores + given["correction_bias"]
            if model.num_groups > 1:
                by_group = ranked.unflatten(1, (model.num_groups, -1))
                best = by_group.topk(2, 2).values.sum(2).topk(model.topk_groups, 1).indices
                kept = torch.zeros_like(by_group[..., 0]).scatter_(1, best, 1.0).bool()
                ranked = by_group.masked_fill(~kept.unsqueeze(2), -torch.inf).flatten(1)
            weights = scores.gather(1, ranked.topk(model.top_k, 1).indices)
            scaled: Tensor = weights / weights.sum(1, keepdim=True) * model.scaling_factor
            return scaled

        return route

    def experts_in_torch(self) -> Any:
        """A matrix product per expert, of weights made bfloat16 beforehand."""
        given = self.experts
        w13, w2 = self._widened("w13"), self._widened("w2")
        ids, weights, x = given["topk_ids"], given["topk_weights"], given["x"]

        def run() -> Tensor:
            out: Tensor = given["residual"].clone()
            for expert in ids.unique().tolist():
                tokens, places = torch.where(ids == expert)
                gate, up = (x[tokens] @ w13[expert].t()).chunk(2, 1)
                part = (silu(gate) * up) @ w2[expert].t()
                out.index_add_(0, tokens, (part * weights[tokens, places, None]).to(out.dtype))
            return out

        return run

    def _widened(self, side: str) -> Tensor:
        weight, scale = self.experts[side], self.experts[side + "_scale"]
        name = format_of(weight.dtype, weight.shape[1], scale.dtype, tuple(scale.shape[1:]))
        given = matrix(name, weight, scale, None, None)
        dtype = self.experts["x"].dtype
        return torch.stack([dequantized(name, given, expert, torch.float32).to(dtype) for expert in range(len(weight))])
