"""FX9: a kernel that says nothing of a feature is not trusted with it."""

from __future__ import annotations

import pytest
import torch

import kernelhub
from tests.dispatch.backends import qkv
from tests.faults.records import FAULTS
from tests.faults.scene import KERNEL, acme, code_is, decision

ASKED = ({"softcap": 2.0}, {"window": 2}, {"causal": True}, {"sinks": torch.zeros(4)})


@pytest.mark.fault("feature_undeclared")
@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: next(iter(asked)))
def test_a_feature_that_is_not_claimed_is_refused_where_it_is_used(asked) -> None:
    acme("tests.dispatch.backends:Ones", features=frozenset())
    q, k, v = qkv()
    assert kernelhub.attention.explain(q, k, v).selected == KERNEL
    code_is(FAULTS["feature_undeclared"], decision(**asked))
    want = kernelhub.attention.reference(q, k, v, **asked)
    torch.testing.assert_close(kernelhub.attention(q, k, v, **asked), want, rtol=0, atol=1e-4)
