"""A kernel that verification cannot ask says what speaks against it, not only that something does."""

from __future__ import annotations

import pytest
import torch

import kernelhub
from kernelhub.errors import NoKernel
from kernelhub.evidence.call import why


def test_the_kernel_s_own_reason_is_given() -> None:
    q = torch.randn(1, 4, 2, 64)
    with pytest.raises(NoKernel) as caught:
        kernelhub.attention(q, q, q, backend="cudnn.sdpa")
    decision = next(item for item in caught.value.selection.decisions if item.kernel == "cudnn.sdpa")
    assert why(caught.value, "cudnn.sdpa") == f"{decision.rejections[0].code}: {decision.rejections[0].reason}"


def test_other_errors_give_their_first_line() -> None:
    assert why(RuntimeError("first\nsecond"), "cudnn.sdpa") == "first"
