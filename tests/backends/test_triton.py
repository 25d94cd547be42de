"""The Triton kernels keep the contracts of the attention ops: interpreted on a CPU, run on a GPU."""

from __future__ import annotations

import pytest

from tests.contract.attention import Case, DenseContract, PagedContract
from tests.contract.concat import ConcatContract
from tests.contract.fp4_gemm import Fp4GemmContract
from tests.contract.merge import MergeContract
from tests.contract.quant import QuantizeContract

pytestmark = pytest.mark.device


class TestPrefill(DenseContract):
    kernel = "triton.prefill"
    fewest_cases = 66
    claims_determinism = True


class TestSplitKV(DenseContract):
    kernel = "triton.split_kv"
    fewest_cases = 16
    claims_determinism = True
    plain = Case("plain", {"batch": 2, "q_tokens": 5, "kv_tokens": 300})
    several = Case("several queries", {"batch": 2, "q_tokens": 6, "kv_tokens": 20})
    rich = Case("rich", {"batch": 2, "q_tokens": 5, "kv_tokens": 300}, features=("causal",))


class TestPagedSplitKV(PagedContract):
    kernel = "triton.split_kv"
    fewest_cases = 52
    claims_determinism = True


class TestPagedSplitKVFixed(PagedContract):
    kernel = "triton.split_kv_fixed"
    fewest_cases = 52
    claims_determinism = True


class TestPagedMixed(PagedContract):
    kernel = "triton.mixed"
    fewest_cases = 17
    claims_determinism = True
    plain = several = Case("plain", {"seq_lens": (40, 9, 77), "q_lens": (7, 1, 30)})
    rich = Case("rich", {"seq_lens": (40, 9, 77), "q_lens": (7, 1, 30)}, features=("causal", "window_left"))


class TestPagedPrefill(PagedContract):
    kernel = "triton.prefill"
    fewest_cases = 70
    claims_determinism = True


class TestMerge(MergeContract):
    kernel = "triton.merge"


class TestConcat(ConcatContract):
    kernel = "triton.concat"


class TestQuantize(QuantizeContract):
    kernel = "triton.quantize"
    back = "triton.dequantize"


class TestFp4Gemm(Fp4GemmContract):
    kernel = "triton.fp4_gemm"
