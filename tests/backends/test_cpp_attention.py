"""The C++ kernels of attention keep the contracts of their ops on this CPU."""

from __future__ import annotations

import pytest

from kernelhub.probes.toolchain import cxx_compiler
from tests.contract.attention import DenseContract, PagedContract
from tests.contract.mla_attention import MlaContract

pytestmark = pytest.mark.skipif(not cxx_compiler().ok, reason="no C++ compiler here: all cases of cpp.split_kv")


class TestDense(DenseContract):
    kernel = "cpp.split_kv"
    device = "cpu"


class TestPaged(PagedContract):
    kernel = "cpp.split_kv"
    device = "cpu"


class TestLatent(MlaContract):
    fewest_cases = 40
    kernel = "cpp.split_kv"
    device = "cpu"
