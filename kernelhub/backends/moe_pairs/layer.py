"""Layers of expert parallelism by a pair of the table: the ops that it names, one after the other."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernelhub.backends.moe_pairs.kernels import BY_NAME, Pair
from kernelhub.dispatch.hub import HUB
from kernelhub.ops.comm.experts.received import Dispatched
from kernelhub.ops.comm.group import OfGroups
from kernelhub.ops.moe.experts.problem import ASKED_FORMATS
from kernelhub.ops.moe.parallel.adapter import Layer, ParallelAdapter, Part
from kernelhub.ops.moe.parallel.problem import ParallelProblem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class _Plans:
    """What was prepared for a group."""

    dispatch: Any
    combine: Any


class _Paired(ParallelAdapter):
    """What all pairs do: dispatch, experts, combine; by plans in a group that was connected."""

    pair: Pair

    def __init__(self, problem: ParallelProblem) -> None:
        super().__init__(problem)
        self._plans: OfGroups[_Plans] = OfGroups()

    def connect(self, layer: Layer, group: ProcessGroup) -> tuple[Part, ...]:
        tokens = self._tokens(layer)
        dispatch = HUB.function("moe_dispatch").prepare(**tokens, **self._dispatched(layer, group))
        sent = dispatch.run(**tokens)
        y, steps = self.experts(sent, layer)
        combine = HUB.function("moe_combine").prepare(y, sent.handle, group)
        combine.run(y, sent.handle)
        self._plans.keep(group, _Plans(dispatch, combine), layer.max_tokens)
        return (
            *([Part("quantize_fp8", None, "tokens, per 1 x 128")] if self.pair.float8 else []),
            Part("moe_dispatch", dispatch.selection, f"format {self.pair.format}"),
            *steps,
            Part("moe_combine", combine.selection, f"reduced; weights applied by the {sent.weighed_by}"),
        )

    def launch(self, layer: Layer, out: Tensor, group: ProcessGroup) -> None:
        plans = self._plans.get(group, layer.max_tokens)
        tokens = self._tokens(layer)
        if plans is None:
            sent = HUB.function("moe_dispatch")(**tokens, **self._dispatched(layer, group))
            HUB.function("moe_combine")(self.run_experts(sent, layer), sent.handle, group, out=out)
            return
        sent = plans.dispatch.run(**tokens)
        plans.combine.run(self.run_experts(sent, layer), sent.handle, out=out)

    @abc.abstractmethod
    def run_experts(self, sent: Dispatched, layer: Layer) -> Tensor:
        """A row for each received row."""

    @abc.abstractmethod
    def experts(self, sent: Dispatched, layer: Layer) -> tuple[Tensor, list[Part]]:
        """The same, and the steps with what was selected for each."""

    def _dispatched(self, layer: Layer, group: ProcessGroup) -> dict[str, Any]:
        return {
            "group": group,
            "num_experts": self.problem.num_experts,
            "format": self.pair.format,
            "max_tokens": layer.max_tokens,
        }

    def _tokens(self, layer: Layer) -> dict[str, Any]:
        made = {"x": layer.x, "topk_ids": layer.topk_ids, "topk_weights": layer.topk_weights}
        if self.pair.float8:
            made["x"], made["scales"] = _quantised(layer.x)
        return made


class Tokens(_Paired):
    """Tokens with their ids, by `fused_moe`."""

    pair = BY_NAME["tokens"]

    def run_experts(self, sent: Dispatched, layer: Layer) -> Tensor:
        result: Tensor = HUB.function("fused_moe")(**self._arguments(sent, layer))
        return result

    def experts(self, sent: Dispatched, layer: Layer) -> tuple[Tensor, list[Part]]:
        function = HUB.function("fused_moe")
        selection = function.explain(**self._arguments(sent, layer))
        return self.run_experts(sent, layer), [Part("fused_moe", selection, "applies the weights")]

    def _arguments(self, sent: Dispatched, layer: Layer) -> dict[str, Any]:
        form = self.problem.activation_dtype
        return {
            "x": sent.x,
            "w13": layer.w13,
            "w2": layer.w2,
            "topk_weights": sent.topk_weights,
            "topk_ids": sent.topk_ids,
            "activation": self.problem.activation,
            "activation_dtype": form if form in ASKED_FORMATS else getattr(torch, form),
            **layer.scales,
            **layer.numbers,
        }


class _PerExpert(_Paired):
    """Rows per expert, by two grouped products."""

    def run_experts(self, sent: Dispatched, layer: Layer) -> Tensor:
        return self._products(sent, layer, None)

    def experts(self, sent: Dispatched, layer: Layer) -> tuple[Tensor, list[Part]]:
        steps: list[Part] = []
        return self._products(sent, layer, steps), steps

    def _products(self, sent: Dispatched, layer: Layer, steps: list[Part] | None) -> Tensor:
        lengths = {"group_sizes": sent.counts} if sent.offsets is None else {"offsets": sent.offsets}
        dtype = getattr(torch, self.problem.dtype)
        both = self._product(sent.x, sent.scales, layer, "w13", lengths, steps)
        gate, up = both.float().chunk(2, -1)
        inner = (silu(gate) * up).to(dtype)
        if steps is not None:
            steps.append(Part("silu_and_mul", None, "gate and up, in torch"))
        scales = None
        if self.pair.float8:
            inner, scales = _quantised(inner)
            if steps is not None:
                steps.append(Part("quantize_fp8", None, "silu(gate) * up, per 1 x 128"))
        return self._product(inner, scales, layer, "w2", lengths, steps)

    def _product(
        self,
        rows: Tensor,
        scales: Tensor | None,
        layer: Layer,
        side: str,
        lengths: dict[str, Tensor],
        steps: list[Part] | None,
    ) -> Tensor:
        function = HUB.function("grouped_gemm")
        given: dict[str, Any] = {"a": rows, "b": getattr(layer, side), **lengths}
        given["out_dtype"] = getattr(torch, self.problem.dtype)
        if scales is not None:
            given |= {"a_scale": scales, "b_scale": layer.scales[f"{side}_scale"]}
        if steps is not None:
            steps.append(Part("grouped_gemm", function.explain(**given), side))
        result: Tensor = function(**given)
        return result


class Contiguous(_PerExpert):
    """Rows sorted by expert."""

    pair = BY_NAME["contiguous"]


class Masked(_PerExpert):
    """Rows padded per expert."""

    pair = BY_NAME["masked"]


class ContiguousFp8(_PerExpert):
    """Rows in float8, sorted by expert."""

    pair = BY_NAME["contiguous_fp8"]


class MaskedFp8(_PerExpert):
    """Rows in float8, padded per expert."""

    pair = BY_NAME["masked_fp8"]


def _quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float8 codes, and float32 scales per row and 128 columns."""
    codes, scales = HUB.function("quantize_fp8")(rows, granularity="group")
    return codes, scales
