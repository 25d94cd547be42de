"""The contracts of the indexer catch kernels that lie: each of these is the right kernel with one defect."""

from __future__ import annotations

import pytest
import torch

from kernelhub.backends.torch.indexer.logits import Logits, PagedLogits
from kernelhub.backends.torch.indexer.topk import TopK
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Band, Kernel
from tests.contract.indexer import LogitsContract, PagedLogitsContract, TopKContract
from tests.contract.lies import lies_of
from tests.contract.test_liars import failures
from tests.dispatch.backends import register


class TrueLogits(Logits):
    pass


class ForgetsRelu(Logits):
    def launch(self, q, k, k_scale, weights, ks, ke, out):
        super().launch(q, k, k_scale, weights, ks, ke, out)
        scores = torch.einsum("thd,sd,th->ts", q.float(), k.float(), weights)
        out.copy_(torch.where(out.isfinite(), scores if k_scale is None else scores * k_scale, out))


class ForgetsScale(Logits):
    def launch(self, q, k, k_scale, weights, ks, ke, out):
        super().launch(q, k, None, weights, ks, ke, out)


class ScaleOfTheNextKey(Logits):
    def launch(self, q, k, k_scale, weights, ks, ke, out):
        super().launch(q, k, None if k_scale is None else k_scale.roll(-1), weights, ks, ke, out)


class WeightsOfTheFirstQuery(Logits):
    def launch(self, q, k, k_scale, weights, ks, ke, out):
        super().launch(q, k, k_scale, weights[:1].expand_as(weights), ks, ke, out)


class ForgetsTheLastHead(Logits):
    def launch(self, q, k, k_scale, weights, ks, ke, out):
        heads = max(1, q.shape[1] - 1)
        super().launch(q[:, :heads], k, k_scale, weights[:, :heads], ks, ke, out)


class SeesOneKeyMore(Logits):
    def launch(self, q, k, k_scale, weights, ks, ke, out):
        super().launch(q, k, k_scale, weights, ks, ke + 1, out)


class StartsAtTheFirstKey(Logits):
    def launch(self, q, k, k_scale, weights, ks, ke, out):
        super().launch(q, k, k_scale, weights, ks.clamp(max=0), ke, out)


class LeavesWhatIsNotSeen(Logits):
    def launch(self, q, k, k_scale, weights, ks, ke, out):
        before = out.clone()
        super().launch(q, k, k_scale, weights, ks, ke, out)
        out.copy_(torch.where(out.isfinite(), out, before))


class OnePartInAThousandTooMuch(Logits):
    def launch(self, q, k, k_scale, weights, ks, ke, out):
        super().launch(q, k, k_scale, weights, ks, ke, out)
        out.mul_(1.001)


class LeavesTheLastKey(Logits):
    def launch(self, q, k, k_scale, weights, ks, ke, out):
        super().launch(q, k, k_scale, weights, ks, ke, out)
        out[:, -1] = torch.nan


class TruePaged(PagedLogits):
    pass


class IsNotCausal(PagedLogits):
    def launch(self, q, k_cache, k_scale_cache, weights, block_table, seq_lens, out):
        for token in range(q.shape[1]):
            rows = slice(token, None, q.shape[1])
            super().launch(
                q[:, token : token + 1], k_cache, k_scale_cache, weights[rows], block_table, seq_lens, out[rows]
            )


class TakesPagesInOrder(PagedLogits):
    def launch(self, q, k_cache, k_scale_cache, weights, block_table, seq_lens, out):
        super().launch(q, k_cache, k_scale_cache, weights, block_table.sort(1).values, seq_lens, out)


class ScalesOfTheFirstPage(PagedLogits):
    def launch(self, q, k_cache, k_scale_cache, weights, block_table, seq_lens, out):
        if k_scale_cache is not None:
            k_scale_cache = k_scale_cache[:1].expand_as(k_scale_cache)
        super().launch(q, k_cache, k_scale_cache, weights, block_table, seq_lens, out)


class ForgetsTheLastPartOfAPage(PagedLogits):
    def launch(self, q, k_cache, k_scale_cache, weights, block_table, seq_lens, out):
        page = self.problem.page_size
        super().launch(q, k_cache, k_scale_cache, weights, block_table, seq_lens // page * page, out)


class TrueTopK(TopK):
    pass


class TakesTheLastOfEqual(TopK):
    def launch(self, logits, row_starts, row_ends, out):
        columns = logits.shape[1]
        starts = None if row_ends is None else columns - row_ends.clamp(max=columns)
        ends = None if row_starts is None else columns - row_starts.clamp(min=0)
        super().launch(logits.flip(1), starts, ends, out)
        first = 0 if row_starts is None else row_starts.clamp(min=0)[:, None]
        last = columns if row_ends is None else row_ends.clamp(max=columns)[:, None]
        places = torch.where(out < 0, 1 << 30, last - first - 1 - out).sort(1).values
        out.copy_(torch.where(places == 1 << 30, -1, places))


class InOrderOfValues(TopK):
    def launch(self, logits, row_starts, row_ends, out):
        super().launch(logits, row_starts, row_ends, out)
        out.copy_(out.flip(1))


class CountsFromTheFirstColumn(TopK):
    def launch(self, logits, row_starts, row_ends, out):
        super().launch(logits, row_starts, row_ends, out)
        if row_starts is not None:
            out.copy_(torch.where(out < 0, out, out + row_starts[:, None]))


class TakesOneLess(TopK):
    def launch(self, logits, row_starts, row_ends, out):
        super().launch(logits, row_starts, row_ends, out)
        out[:, -1] = -1


class RoundsToHalf(TopK):
    def launch(self, logits, row_starts, row_ends, out):
        super().launch(logits.half().float(), row_starts, row_ends, out)


class TakesMinusInfinity(TopK):
    def launch(self, logits, row_starts, row_ends, out):
        super().launch(logits.clamp(min=-3.4e38), row_starts, row_ends, out)


class IgnoresEnds(TopK):
    def launch(self, logits, row_starts, row_ends, out):
        super().launch(logits, row_starts, None, out)


SUBJECTS = [
    ("mqa_logits", Logits, TrueLogits, LogitsContract, ("dtype", "num_heads", "head_dim")),
    ("paged_mqa_logits", PagedLogits, TruePaged, PagedLogitsContract, ("dtype", "num_heads", "head_dim", "page_size")),
    ("topk_indices", TopK, TrueTopK, TopKContract, ("k",)),
]


@pytest.mark.parametrize(
    ("lie", "op", "truth", "contract", "facets"),
    [
        (lie, op, truth, contract, facets)
        for op, base, truth, contract, facets in SUBJECTS
        for lie in lies_of(base, __name__)
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) and "Contract" not in value.__name__ else "",
)
def test_kernels_of_the_indexer_that_lie_are_caught(lie, op, truth, contract, facets) -> None:
    features = frozenset({"row_starts", "row_ends"} if op == "topk_indices" else {"k_scale"})
    target = f"{__name__}:{lie.__name__}"
    register("liar", Kernel(op, "liar.k", target, "lies", Band.PLUGIN, (anything("device", *facets),), features))
    subject = type("Subject", (contract,), {"__test__": False})
    assert bool(failures(subject, "liar.k", "cpu")) == (lie is not truth)
