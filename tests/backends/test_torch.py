"""The torch kernels keep the contracts of the attention ops."""

from __future__ import annotations

import pytest

from tests.contract.attention import DenseContract, PagedContract

pytestmark = pytest.mark.device


class TestPacked(DenseContract):
    kernel = "torch.packed"
    device = "cpu"
    fewest_cases = 53
    claims_determinism = True


class TestSdpa(DenseContract):
    kernel = "torch.sdpa"
    fewest_cases = 28


class TestBlocked(DenseContract):
    kernel = "torch.blocked"
    fewest_cases = 66


class TestPackedPaged(PagedContract):
    kernel = "torch.packed"
    device = "cpu"
    fewest_cases = 60
    claims_determinism = True


class TestBlockedPaged(PagedContract):
    kernel = "torch.blocked"
    fewest_cases = 70
