"""The contracts of mixtures of experts catch kernels that lie: each of these is the right kernel with one defect."""

from __future__ import annotations

import pytest
import torch

from kernelhub.backends.torch.moe.routing import Routing
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.ops.moe.routing.problem import RoutingProblem
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


@pytest.mark.parametrize("lie", Routing.__subclasses__(), ids=lambda lie: lie.__name__)
def test_routings_that_lie_are_caught(lie) -> None:
    features = frozenset(
        {"scoring=sigmoid", "scoring=softmax_after_topk", "correction_bias", "renormalize", "scaling_factor"}
    )
    _register("route_experts", lie, RoutingProblem, features)
    assert bool(failures(RoutingLie, "liar.k", "cpu")) == (lie is not TrueRouting)
