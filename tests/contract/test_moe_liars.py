"""The contracts of mixtures of experts catch kernels that lie: each of these is the right kernel with one defect."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernelhub.backends.torch.moe.experts import Experts
from kernelhub.backends.torch.moe.routing import Routing
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.ops.moe.experts.activations import Activations
from kernelhub.ops.moe.experts.problem import ACTIVATIONS, ExpertsProblem
from kernelhub.ops.moe.routing.problem import RoutingProblem
from tests.contract.experts import ExpertsContract
from tests.contract.lies import lies_of
from tests.contract.routing import RoutingContract
from tests.contract.test_liars import failures
from tests.dispatch.backends import register


class RoutingLie(RoutingContract):
    """A contract over one of the routings below, for a test that collects no cases of it."""

    kernel = "liar.k"
    device = "cpu"
    __test__ = False


class TrueRouting(Routing):
    pass


class WeighsByTheBiasedScore(Routing):
    def launch(self, logits, bias, factor, weights, ids):
        super().launch(logits, bias, factor, weights, ids)
        if bias is not None:
            weights += factor * bias[ids.long()]


class ForgetsTheBias(Routing):
    def launch(self, logits, bias, factor, weights, ids):
        super().launch(logits, None if bias is None else torch.zeros_like(bias), factor, weights, ids)


class ForgetsTheFactor(Routing):
    def launch(self, logits, bias, factor, weights, ids):
        super().launch(logits, bias, 1.0, weights, ids)


class OnePercentTooHeavy(Routing):
    def launch(self, logits, bias, factor, weights, ids):
        super().launch(logits, bias, 1.01 * factor, weights, ids)


class ForgetsTheGroups(Routing):
    def _within_groups(self, keys, ranked):
        return keys


class RanksGroupsByTheirBest(Routing):
    def _within_groups(self, keys, ranked):
        best = ranked.unflatten(1, (self.problem.num_groups, -1)).amax(2).topk(self.problem.topk_groups, 1).indices
        outside = torch.ones(len(ranked), self.problem.num_groups, dtype=torch.bool).scatter_(1, best, False)
        lowest = torch.iinfo(torch.int64).min
        return keys.masked_fill(outside.repeat_interleave(self.problem.group_size, 1), lowest)


class TakesTheLastOfEquals(Routing):
    def launch(self, logits, bias, factor, weights, ids):
        super().launch(logits.flip(1), None if bias is None else bias.flip(0), factor, weights, ids)
        ids.copy_(logits.shape[1] - 1 - ids)


class WorstFirst(Routing):
    def launch(self, logits, bias, factor, weights, ids):
        super().launch(logits, bias, factor, weights, ids)
        weights.copy_(weights.flip(1))
        ids.copy_(ids.flip(1))


class LeavesTheLastToken(Routing):
    def launch(self, logits, bias, factor, weights, ids):
        if len(logits) > 1:
            super().launch(logits[:-1], bias, factor, weights[:-1], ids[:-1])


class LetsNanThrough(Routing):
    def launch(self, logits, bias, factor, weights, ids):
        super().launch(logits, bias, factor, weights, ids)
        weights[logits.isnan().any(1)] = torch.nan


class NeverRenormalizes(Routing):
    def launch(self, logits, bias, factor, weights, ids):
        super().launch(logits, bias, factor, weights, ids)
        if self.problem.renormalize:
            scores = logits.float().softmax(1) if self.problem.scoring == "softmax" else logits.float().sigmoid()
            weights.copy_(scores.gather(1, ids.long()) * factor)


def _register(op: str, lie: type, problem: type, features: frozenset[str]) -> None:
    constraints = (anything(*problem.__dataclass_fields__),)
    target = f"{__name__}:{lie.__name__}"
    register("liar", Kernel(op, "liar.k", target, "lies", Band.PLUGIN, constraints, features))


@pytest.mark.parametrize("lie", lies_of(Routing, __name__), ids=lambda lie: lie.__name__)
def test_routings_that_lie_are_caught(lie) -> None:
    features = frozenset(
        {"scoring=sigmoid", "scoring=softmax_after_topk", "correction_bias", "renormalize", "scaling_factor"}
    )
    _register("route_experts", lie, RoutingProblem, features)
    assert bool(failures(RoutingLie, "liar.k", "cpu")) == (lie is not TrueRouting)


class ExpertsLie(ExpertsContract):
    """A contract over one of the experts below, for a test that collects no cases of it."""

    kernel = "liar.k"
    device = "cpu"
    quick = True
    __test__ = False

    @classmethod
    def accepted_cases(cls):
        return [case for case in super().accepted_cases() if not case.label.startswith("activations in")]


class TrueExperts(Experts):
    pass


class OnePercentTooMuch(Experts):
    def launch(self, x, w13, w2, topk_weights, topk_ids, values, out):
        super().launch(x, w13, w2, 1.01 * topk_weights, topk_ids, values, out)


class UpBeforeGate(Experts):
    def launch(self, x, w13, w2, topk_weights, topk_ids, values, out):
        swapped = [None if part is None else part.roll(part.shape[1] // 2, 1) for part in _wide(w13)]
        super().launch(x, _narrow(w13, swapped), w2, topk_weights, topk_ids, values, out)


class SharesTheScalesOfTheFirstExpert(Experts):
    def launch(self, x, w13, w2, topk_weights, topk_ids, values, out):
        first = [None if part is None else part[:1].expand_as(part) for part in (w2.scale, w2.channel_scale)]
        w2 = w2._replace(scale=first[0], channel_scale=first[1])
        super().launch(x, w13, w2, topk_weights, topk_ids, values, out)


class TakesTheNextBlocksScale(Experts):
    def launch(self, x, w13, w2, topk_weights, topk_ids, values, out):
        if w13.scale is not None:
            raw = w13.scale if w13.scale.dtype.itemsize > 1 else w13.scale.view(torch.uint8)
            w13 = w13._replace(scale=raw.roll(1, 2).view(w13.scale.dtype))
        super().launch(x, w13, w2, topk_weights, topk_ids, values, out)


class TakesIntegersForFloat4(Experts):
    def _looked_up(self, codes):
        problem = self.problem
        if problem.weights == "mxint4":
            self.problem = dataclasses.replace(problem, weights="mxfp4")
        values = super()._looked_up(codes)
        self.problem = problem
        return values


class TakesIntegersWithoutTheirSign(Experts):
    def _looked_up(self, codes):
        values = super()._looked_up(codes)
        return torch.where(values < 0, values + 16, values) if self.problem.weights == "mxint4" else values


class TakesIntegersOfACheckpointWithAnOffset(Experts):
    def _looked_up(self, codes):
        return super()._looked_up(codes ^ 0x88 if self.problem.weights == "mxint4" else codes)


class TakesTheSecondOfTwoIntegersFirst(Experts):
    def _looked_up(self, codes):
        return super()._looked_up(codes >> 4 | codes << 4 if self.problem.weights == "mxint4" else codes)


class MissesTheLastColumns(Experts):
    def launch(self, x, w13, w2, topk_weights, topk_ids, values, out):
        x = x.clone()
        x[:, x.shape[1] // 32 * 32 :] = 0.0
        super().launch(x, w13, w2, topk_weights, topk_ids, values, out)


class LeavesTheLastRow(Experts):
    def launch(self, x, w13, w2, topk_weights, topk_ids, values, out):
        residual = None if values.residual is None else values.residual[:-1]
        if len(x) > 1:
            values = values._replace(residual=residual)
            super().launch(x[:-1], w13, w2, topk_weights[:-1], topk_ids[:-1], values, out[:-1])


class ForgetsTheLastChoice(Experts):
    def launch(self, x, w13, w2, topk_weights, topk_ids, values, out):
        ids = topk_ids.clone()
        ids[:, 1:] = torch.where(torch.arange(1, ids.shape[1]) == ids.shape[1] - 1, -1, ids[:, 1:])
        super().launch(x, w13, w2, topk_weights, ids, values, out)


class ForgetsTheMap(Experts):
    def launch(self, x, w13, w2, topk_weights, topk_ids, values, out):
        super().launch(x, w13, w2, topk_weights, topk_ids, values._replace(expert_map=None), out)


class ForgetsTheResidual(Experts):
    def launch(self, x, w13, w2, topk_weights, topk_ids, values, out):
        super().launch(x, w13, w2, topk_weights, topk_ids, values._replace(residual=None), out)


class ForgetsTheLimit(Experts):
    def launch(self, x, w13, w2, topk_weights, topk_ids, values, out):
        super().launch(x, w13, w2, topk_weights, topk_ids, values._replace(limit=1e9), out)


class ForgetsTheBiasOfTheDownProjection(Experts):
    def launch(self, x, w13, w2, topk_weights, topk_ids, values, out):
        super().launch(x, w13, w2._replace(bias=None), topk_weights, topk_ids, values, out)


class ClampsIdsIntoTheExperts(Experts):
    def launch(self, x, w13, w2, topk_weights, topk_ids, values, out):
        if values.expert_map is None:
            topk_ids = topk_ids.clamp(0, self.problem.num_experts - 1)
        super().launch(x, w13, w2, topk_weights, topk_ids, values, out)


class WeighsAfterwardsAlways(Experts):
    def launch(self, x, w13, w2, topk_weights, topk_ids, values, out):
        problem = self.problem
        self.problem = dataclasses.replace(problem, apply_router_weight_on_input=False)
        super().launch(x, w13, w2, topk_weights, topk_ids, values, out)
        self.problem = problem


class QuantizesNothing(Experts):
    def _multiplied(self, rows, scale, least=0.0):
        return rows.to(self._dtype)


class OneScaleForARowThatHasGroups(Experts):
    def _multiplied(self, rows, scale, least=0.0):
        if not self.problem.fp8_activations:
            return rows.to(self._dtype)
        return Activations("float8_e4m3fn", False).rounded(rows, scale, self._dtype)


class OtherBitsEachTime(Experts):
    def launch(self, x, w13, w2, topk_weights, topk_ids, values, out):
        super().launch(x, w13, w2, topk_weights * (1 + 0.003 * torch.rand(())), topk_ids, values, out)


class SiluForGelu(Experts):
    named = ("gelu", "silu")

    def launch(self, x, w13, w2, topk_weights, topk_ids, values, out):
        problem = self.problem
        if problem.activation == self.named[0]:
            self.problem = dataclasses.replace(problem, activation=self.named[1])
        Experts.launch(self, x, w13, w2, topk_weights, topk_ids, values, out)
        self.problem = problem


class AddsOneToUpThatIsClamped(Experts):
    named = ("swiglu_clamped", "swiglu_oai")
    launch = SiluForGelu.launch


class ClampsTheGateBeforeItsStep(Experts):
    named = ("swiglu_step", "swiglu_clamped")
    launch = SiluForGelu.launch


def _wide(matrix):
    """The parts that have a row of w13 for each of theirs."""
    weight = matrix.weight if matrix.weight.dtype.itemsize > 1 else matrix.weight.view(torch.uint8)
    return weight, matrix.bias


def _narrow(matrix, parts):
    return matrix._replace(weight=parts[0].view(matrix.weight.dtype), bias=parts[1])


@pytest.mark.parametrize("lie", lies_of(Experts, __name__), ids=lambda lie: lie.__name__)
def test_experts_that_lie_are_caught(lie) -> None:
    features = frozenset(
        {
            *(f"activation={name}" for name in ACTIVATIONS[1:]),
            *("w13_bias", "w2_bias", "static_scales", "apply_router_weight_on_input", "expert_map", "residual"),
        }
    )
    _register("fused_moe", lie, ExpertsProblem, features)
    assert bool(failures(ExpertsLie, "liar.k", "cpu")) == (lie is not TrueExperts)
