"""The whole contracts of the Gluon kernels of attention, on a GPU."""

from __future__ import annotations

import pytest

from tests.contract.attention import DenseContract, PagedContract
from tests.contract.mla_attention import MlaContract

pytestmark = pytest.mark.gpu


class TestPrefill(DenseContract):
    kernel = "gluon.prefill"


class TestPagedPrefill(PagedContract):
    kernel = "gluon.prefill"


class TestPrefillAny(DenseContract):
    kernel = "gluon.prefill_any"


class TestPagedPrefillAny(PagedContract):
    kernel = "gluon.prefill_any"


class TestDecode(MlaContract):
    kernel = "gluon.decode"
