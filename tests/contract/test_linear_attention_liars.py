"""The contract of linear attention catches kernels that lie: each of these is the right kernel with one defect."""

from __future__ import annotations

import pytest
import torch

from kernelhub.backends.torch.linear_attention.chunked import Chunked
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Band, Kernel
from tests.contract.lies import lies_of
from tests.contract.linear_attention import LinearContract
from tests.contract.test_liars import failures
from tests.dispatch.backends import register


class Truth(Chunked):
    pass


class ForgetsScale(Chunked):
    def launch(self, q, k, v, decay, scale, cu_seqlens, states, out):
        super().launch(q, k, v, decay, 1.0, cu_seqlens, states, out)


class ForgetsTheState(Chunked):
    def launch(self, q, k, v, decay, scale, cu_seqlens, states, out):
        super().launch(q, k, v, decay, scale, cu_seqlens, states._replace(before=None, before_at=None), out)


class DecaysTwoPercentTooFast(Chunked):
    def launch(self, q, k, v, decay, scale, cu_seqlens, states, out):
        super().launch(q, k, v, decay * 1.02, scale, cu_seqlens, states, out)


class SharesTheDecayOfTheFirstHead(Chunked):
    def launch(self, q, k, v, decay, scale, cu_seqlens, states, out):
        super().launch(q, k, v, decay[:1].expand_as(decay), scale, cu_seqlens, states, out)


class DecaysTheTokenItself(Chunked):
    def launch(self, q, k, v, decay, scale, cu_seqlens, states, out):
        k = (k.float() * (-decay[:, None]).exp()).to(k.dtype)
        super().launch(q, k, v, decay, scale, cu_seqlens, states, out)


class DoesNotDecayTheStateBefore(Chunked):
    def launch(self, q, k, v, decay, scale, cu_seqlens, states, out):
        if states.before is not None:
            states = states._replace(before=states.before * decay[:, None, None].exp())
        super().launch(q, k, v, decay, scale, cu_seqlens, states, out)


class TakesTheSlotOfTheNext(Chunked):
    def launch(self, q, k, v, decay, scale, cu_seqlens, states, out):
        if states.before_at is not None:
            states = states._replace(before_at=states.before_at.roll(1))
        super().launch(q, k, v, decay, scale, cu_seqlens, states, out)


class IgnoresSlots(Chunked):
    def launch(self, q, k, v, decay, scale, cu_seqlens, states, out):
        if states.before is not None and states.before_at is not None:
            states = states._replace(before=states.before[: len(states.before_at)], before_at=None)
        super().launch(q, k, v, decay, scale, cu_seqlens, states, out)


class WritesWhereNothingIsKept(Chunked):
    def launch(self, q, k, v, decay, scale, cu_seqlens, states, out):
        super().launch(q, k, v, decay, scale, cu_seqlens, states, out)
        if states.after is not None and states.after_at is not None and bool((states.after_at < 0).any()):
            states.after[0] = 0.0


class StatesInHalf(Chunked):
    def launch(self, q, k, v, decay, scale, cu_seqlens, states, out):
        if states.before is not None:
            states = states._replace(before=states.before.half().float())
        super().launch(q, k, v, decay, scale, cu_seqlens, states, out)


class GoesOnFromTheSequenceBefore(Chunked):
    def launch(self, q, k, v, decay, scale, cu_seqlens, states, out):
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.clone()
            cu_seqlens[1:-1] = cu_seqlens[-1]
        super().launch(q, k, v, decay, scale, cu_seqlens, states, out)


class LosesTheStateOfSequencesWithoutTokens(Chunked):
    def launch(self, q, k, v, decay, scale, cu_seqlens, states, out):
        super().launch(q, k, v, decay, scale, cu_seqlens, states, out)
        if cu_seqlens is not None and states.after is not None and states.after_at is None:
            states.after[cu_seqlens[1:] == cu_seqlens[:-1]] = 0.0


class LeavesTheLastToken(Chunked):
    def launch(self, q, k, v, decay, scale, cu_seqlens, states, out):
        super().launch(q, k, v, decay, scale, cu_seqlens, states, out)
        out[..., -1:, :, :] = torch.nan


class LeavesTheLastColumn(Chunked):
    def launch(self, q, k, v, decay, scale, cu_seqlens, states, out):
        super().launch(q, k, v, decay, scale, cu_seqlens, states, out)
        out[..., -1] = 0.0


class OnePercentTooMuch(Chunked):
    def launch(self, q, k, v, decay, scale, cu_seqlens, states, out):
        super().launch(q, k, v, decay, scale * 1.01, cu_seqlens, states, out)


@pytest.mark.parametrize("lie", lies_of(Chunked, __name__), ids=lambda lie: lie.__name__)
@pytest.mark.parametrize("rounds", [False, True], ids=["exact products", "rounded operands"])
def test_linear_attention_that_is_wrong_is_detected(lie, rounds) -> None:
    """Also by the wider bound of kernels that round what they multiply."""
    facets = ("device", "dtype", "num_heads", "head_dim", "value_dim", "q_len")
    features = frozenset({"ragged", "state", "out_state", "state_indices"})
    target = f"{__name__}:{lie.__name__}"
    register("liar", Kernel("linear_attention", "liar.k", target, "lies", Band.PLUGIN, (anything(*facets),), features))
    subject = type("Subject", (LinearContract,), {"rounds_operands": rounds, "__test__": False})
    assert bool(failures(subject, "liar.k", "cpu")) == (lie is not Truth)
