"""The contracts of latent attention catch kernels that lie: each of these is the right kernel with one defect."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernelhub.backends.torch.mla.cache import Scatter
from kernelhub.backends.torch.mla.latent import Gathered
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.ops.mla.attention.problem import MlaProblem
from kernelhub.testing import KernelCase
from tests.contract.lies import lies_of
from tests.contract.mla_attention import MlaContract
from tests.contract.mla_cache import MlaCacheContract
from tests.contract.test_liars import failures
from tests.dispatch.backends import register

FEATURES = frozenset({"ragged", "causal", "sparse", "sinks", "lse", "kv_scale=value", "kv_scale=tensor"})


class AttentionLie(MlaContract):
    """A contract over one of the kernels below, for a test that collects no cases of it."""

    kernel = "liar.k"
    device = "cpu"
    fewest_cases = 1
    __test__ = False

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        """A third of them, which is enough and quicker."""
        return super().accepted_cases()[::3]


class TrueAttention(Gathered):
    pass


class ForgetsSinks(Gathered):
    def launch(self, q, kv_cache, topk_indices, step, values, out, lse):
        super().launch(q, kv_cache, topk_indices, step, values._replace(sinks=None), out, lse)


class TakesTheWidthForTheScale(Gathered):
    def launch(self, q, kv_cache, topk_indices, step, values, out, lse):
        super().launch(q, kv_cache, topk_indices, step, values._replace(scale=q.shape[-1] ** -0.5), out, lse)


class ForgetsTheMask(Gathered):
    def launch(self, q, kv_cache, topk_indices, step, values, out, lse):
        causal, self.problem = self.problem, _without_mask(self.problem)
        super().launch(q, kv_cache, topk_indices, step, values, out, lse)
        self.problem = causal


class ForgetsTheRotaryPart(Gathered):
    def launch(self, q, kv_cache, topk_indices, step, values, out, lse):
        q = q.clone()
        q[..., self.problem.value_dim :] = 0
        super().launch(q, kv_cache, topk_indices, step, values, out, lse)


class MissesTheLastListedPosition(Gathered):
    def launch(self, q, kv_cache, topk_indices, step, values, out, lse):
        listed = topk_indices if topk_indices is None else topk_indices[:, :-1]
        super().launch(q, kv_cache, listed, step, values, out, lse)


class CountsNoPositionAsTheFirst(Gathered):
    def launch(self, q, kv_cache, topk_indices, step, values, out, lse):
        listed = topk_indices if topk_indices is None else topk_indices.clamp(min=0)
        super().launch(q, kv_cache, listed, step, values, out, lse)


class TakesPositionsForSlots(Gathered):
    def _named(self, kv_cache, block_table, sequence, positions):
        return super()._named(kv_cache, torch.arange(block_table.shape[1]).expand_as(block_table), sequence, positions)


class SharesTheListOfTheFirstToken(Gathered):
    def launch(self, q, kv_cache, topk_indices, step, values, out, lse):
        listed = topk_indices if topk_indices is None else topk_indices[:1].expand_as(topk_indices)
        super().launch(q, kv_cache, listed, step, values, out, lse)


class ScalesScoresOnly(Gathered):
    def launch(self, q, kv_cache, topk_indices, step, values, out, lse):
        super().launch(q, kv_cache, topk_indices, step, values, out, lse)
        if values.kv_scale is not None:
            out /= float(values.kv_scale)


class LogToTheBaseOfTwo(Gathered):
    def launch(self, q, kv_cache, topk_indices, step, values, out, lse):
        super().launch(q, kv_cache, topk_indices, step, values, out, lse)
        if lse is not None:
            lse /= math.log(2)


class OnePercentTooMuch(Gathered):
    def launch(self, q, kv_cache, topk_indices, step, values, out, lse):
        super().launch(q, kv_cache, topk_indices, step, values, out, lse)
        out *= 1.01


class LeavesTheLastHead(Gathered):
    def launch(self, q, kv_cache, topk_indices, step, values, out, lse):
        super().launch(q, kv_cache, topk_indices, step, values, out, lse)
        if q.shape[-2] > 1:
            out[..., -1, :] = torch.nan


class ReadsOneTokenTooMany(Gathered):
    def launch(self, q, kv_cache, topk_indices, step, values, out, lse):
        step._lengths = [length + 1 for length in step.lengths()]
        super().launch(q, kv_cache, topk_indices, step, values, out, lse)
        step._lengths = [length - 1 for length in step.lengths()]


class WritesTokensOfNoSequence(Gathered):
    def launch(self, q, kv_cache, topk_indices, step, values, out, lse):
        super().launch(q, kv_cache, topk_indices, step, values, out, lse)
        if step.cu_seqlens_q is not None:
            out[step.q_offsets()[-1] :] = 0


def _without_mask(problem: MlaProblem) -> MlaProblem:
    return MlaProblem(**{**vars(problem), "causal": False})


@pytest.mark.parametrize("lie", lies_of(Gathered, __name__), ids=lambda lie: lie.__name__)
def test_attention_that_is_wrong_is_detected(lie: Any) -> None:
    facets = [name for name, item in MlaProblem.__dataclass_fields__.items() if item.metadata["kind"] == "structural"]
    target = f"{__name__}:{lie.__name__}"
    constraints = (anything(*facets),)
    register("liar", Kernel("mla_attention", "liar.k", target, "lies", Band.PLUGIN, constraints, FEATURES))
    assert bool(failures(AttentionLie, "liar.k", "cpu")) == (lie is not TrueAttention)


class CacheLie(MlaCacheContract):
    """A contract over one of the kernels below, for a test that collects no cases of it."""

    kernel = "liar.k"
    device = "cpu"
    __test__ = False


class TrueScatter(Scatter):
    pass


class MultipliesWithTheScale(Scatter):
    def launch(self, kv_c, k_rope, kv_cache, slot_mapping, kv_scale):
        super().launch(kv_c, k_rope, kv_cache, slot_mapping, None if kv_scale is None else 1 / float(kv_scale))


class MultipliesWithTheReciprocal(Scatter):
    def launch(self, kv_c, k_rope, kv_cache, slot_mapping, kv_scale):
        if kv_scale is not None:
            factor = 1 / torch.as_tensor(kv_scale, dtype=torch.float32)
            kv_c, k_rope, kv_scale = kv_c.float() * factor, k_rope.float() * factor, 1.0
        super().launch(kv_c, k_rope, kv_cache, slot_mapping, kv_scale)


class RoundsToZero(Scatter):
    def launch(self, kv_c, k_rope, kv_cache, slot_mapping, kv_scale):
        if kv_scale is not None:
            kv_c = (kv_c.float().view(torch.int32) & ~0xFFFFF).view(torch.float32)
            k_rope = k_rope.float()
        super().launch(kv_c, k_rope, kv_cache, slot_mapping, kv_scale)


class WritesTokensThatAreSkipped(Scatter):
    def launch(self, kv_c, k_rope, kv_cache, slot_mapping, kv_scale):
        slots = kv_cache.shape[0] * kv_cache.shape[1]
        super().launch(kv_c, k_rope, kv_cache, slot_mapping.where(slot_mapping >= 0, slots - 1), kv_scale)


class SwapsTheParts(Scatter):
    def launch(self, kv_c, k_rope, kv_cache, slot_mapping, kv_scale):
        super().launch(k_rope, kv_c, kv_cache, slot_mapping, kv_scale)


class ForgetsTheLastToken(Scatter):
    def launch(self, kv_c, k_rope, kv_cache, slot_mapping, kv_scale):
        if len(kv_c) > 1:
            super().launch(kv_c[:-1], k_rope[:-1], kv_cache, slot_mapping[:-1], kv_scale)


class ClearsTheRestOfThePage(Scatter):
    def launch(self, kv_c, k_rope, kv_cache, slot_mapping, kv_scale):
        kv_cache[slot_mapping[slot_mapping >= 0] // kv_cache.shape[1]] = torch.zeros((), dtype=kv_cache.dtype)
        super().launch(kv_c, k_rope, kv_cache, slot_mapping, kv_scale)


@pytest.mark.parametrize("lie", lies_of(Scatter, __name__), ids=lambda lie: lie.__name__)
def test_caches_that_are_written_wrong_are_caught(lie: Any) -> None:
    facets = ("device", "dtype", "kv_dtype", "latent_dim", "rope_dim", "page_size")
    features = frozenset({"kv_scale=value", "kv_scale=tensor"})
    target = f"{__name__}:{lie.__name__}"
    register("liar", Kernel("write_mla_cache", "liar.k", target, "lies", Band.PLUGIN, (anything(*facets),), features))
    assert bool(failures(CacheLie, "liar.k", "cpu")) == (lie is not TrueScatter)
