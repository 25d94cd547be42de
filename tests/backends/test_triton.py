"""The Triton kernels keep the contracts of the attention ops: interpreted on a CPU, run on a GPU."""

from __future__ import annotations

import re
from typing import ClassVar

import pytest
import torch

import kernelhub
from kernelhub.backends.triton.gemm import decoded
from kernelhub.backends.triton.gemm.fp4 import adapter as fp4_adapter
from kernelhub.backends.triton.gemm.fp4 import few
from kernelhub.testing import KernelCase, OpContract
from tests.conftest import HAS_GPU
from tests.contract.attention import Contract, DenseContract, PagedContract
from tests.contract.bmm_fp8 import BmmFp8Contract
from tests.contract.concat import ConcatContract
from tests.contract.experts import ExpertsContract
from tests.contract.fp4_gemm import Fp4GemmContract
from tests.contract.fp8_gemm import EveryScaling
from tests.contract.grouped_gemm import GroupedGemmContract
from tests.contract.indexer import LogitsContract, PagedLogitsContract, TopKContract
from tests.contract.kv_cache import KvCacheContract, RopeContract
from tests.contract.linear_attention import LinearContract
from tests.contract.merge import MergeContract
from tests.contract.mla_attention import MlaContract
from tests.contract.mla_cache import MlaCacheContract
from tests.contract.quant import QuantizeContract
from tests.contract.routing import RoutingContract

pytestmark = pytest.mark.device

INTERPRETED = None if HAS_GPU else 100_000  # elements of the largest tensor that is interpreted within seconds


class Interpreted(Contract):
    """On a CPU, of the cases that differ in the number of tokens or sequences only three."""

    most_elements = None if HAS_GPU else 150_000

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        found = super().accepted_cases()
        return [case for case in found if HAS_GPU or not re.match(r"(?!(0|2|17) )\d+ (tokens|sequences)", case.label)]


class TestPrefill(Interpreted, DenseContract):
    kernel = "triton.prefill"


class TestSplitKV(Interpreted, DenseContract):
    kernel = "triton.split_kv"
    plain: ClassVar = {"batch": 2, "q_tokens": 5, "kv_tokens": 300}
    rich: ClassVar = plain | {"causal": True}


class TestPagedSplitKV(Interpreted, PagedContract):
    kernel = "triton.split_kv"


class TestPagedSplitKVFixed(Interpreted, PagedContract):
    kernel = "triton.split_kv_fixed"
    quick = not HAS_GPU  # the kernel of `triton.split_kv`, which runs every case


class TestPagedMixed(Interpreted, PagedContract):
    kernel = "triton.mixed"
    plain: ClassVar = {"seq_lens": (40, 9, 77), "q_lens": (7, 1, 30)}
    rich: ClassVar = plain | {"causal": True, "window": (5, -1)}


class TestPagedPrefill(Interpreted, PagedContract):
    kernel = "triton.prefill"


class TestMerge(MergeContract):
    kernel = "triton.merge"
    most_elements = INTERPRETED


class TestConcat(ConcatContract):
    kernel = "triton.concat"
    most_elements = INTERPRETED


class TestGrouped(GroupedGemmContract):
    kernel = "triton.grouped"
    most_elements = None if HAS_GPU else 66_000
    narrow = {} if HAS_GPU else {"n": 64, "k": 160}


class TestQuantize(QuantizeContract):
    kernel = "triton.quantize"
    back = "triton.dequantize"


class TestMlaSplitKV(MlaContract):
    kernel = "triton.split_kv"
    fewest_cases = 70
    claims_determinism = True


class TestMlaSplitKVFixed(MlaContract):
    kernel = "triton.split_kv_fixed"
    fewest_cases = 70
    claims_determinism = True


class TestLogits(LogitsContract):
    kernel = "triton.logits"
    most_elements = INTERPRETED


class TestPagedLogits(PagedLogitsContract):
    kernel = "triton.logits"
    most_elements = INTERPRETED


class TestTopK(TopKContract):
    kernel = "triton.radix"
    most_elements = INTERPRETED and 50_000


class TestTopKSearch(TopKContract):
    kernel = "triton.search"
    most_elements = INTERPRETED and 50_000


class TestRouting(RoutingContract):
    kernel = "triton.routing"


class TestExperts(ExpertsContract):
    kernel = "triton.experts"


class TestLinearChunked(LinearContract):
    most_elements = None if HAS_GPU else 20_000
    kernel = "triton.chunked"
    rounds_operands = True


class TestLinearRecurrent(LinearContract):
    most_elements = None if HAS_GPU else 20_000
    kernel = "triton.recurrent"


class TestNorm(OpContract):
    op, kernel, quick = "rms_norm_quant", "triton.rows", not HAS_GPU


class TestActivation(OpContract):
    op, kernel, quick = "silu_and_mul_quant", "triton.rows", not HAS_GPU


class TestWriteKvCache(KvCacheContract):
    kernel = "triton.write"


class TestRope(RopeContract):
    kernel = "triton.rope_write"


class TestWriteMlaCache(MlaCacheContract):
    kernel = "triton.write"


class TestFp8Gemm(EveryScaling):
    kernel = "triton.fp8_gemm"
    most_elements = INTERPRETED


class TestBmmFp8(BmmFp8Contract):
    kernel = "triton.bmm_fp8"


class TestFp4Gemm(Fp4GemmContract):
    kernel = "triton.fp4_gemm"
    most_elements = None if HAS_GPU else 34_000


class TestFp4GemmOfFewRows(Fp4GemmContract):
    """The kernels for few rows of a Hopper GPU, whatever the shape: the forms there, small tiles in the interpreter."""

    kernel = "triton.fp4_gemm"
    most_elements = None if HAS_GPU else 20_000

    @pytest.fixture(autouse=True, params=["small", "medium", "wide"] if HAS_GPU else ["tiles"])
    def every_weight_is_of_a_kind(self, request, monkeypatch):
        def form(problem, size):
            if request.param == "tiles":
                return few.Sliced(16, 2, 1, 3) if size <= 16 else few.Split(64, 4, 1, 3, each_sm=4)
            hopper = problem.device.family == "hopper"
            return few.FORMS[problem.b_format, request.param][few.SIZES.index(size)] if hopper else None

        monkeypatch.setattr(few, "form_of", form)
        kernelhub.fp4_gemm.op._forget()
        yield
        kernelhub.fp4_gemm.op._forget()

    @pytest.mark.parametrize("b_format", ["nvfp4", "mxfp4"])
    @pytest.mark.parametrize("tokens", [1, 9, 20, 64])
    def test_a_step_that_is_not_whole(self, tokens: int, b_format: str) -> None:
        for k in (160, 1120):
            arguments = self.inputs(tokens=tokens, n=80, k=k, b_format=b_format, bias=True)
            got = self.run(arguments)
            self.check(got, arguments)
            assert torch.equal(self.run(self.packed(arguments)), got)


class TestFp4GemmDecoded(Fp4GemmContract):
    """As for many rows, which all of these cases have not: the weight decoded once, in stretches of 1024 rows."""

    kernel = "triton.fp4_gemm"
    most_elements = None if HAS_GPU else 20_000

    @pytest.fixture(autouse=True)
    def few_are_many(self, monkeypatch):
        monkeypatch.setattr(fp4_adapter, "DECODED_FROM", 1)
        monkeypatch.setattr(decoded, "_MOST_BYTES", 1)

    def test_a_weight_of_several_stretches(self) -> None:
        for n in (2050, 2080):
            arguments = self.inputs(n=n, k=32, tokens=3, bias=True)
            self.check(self.run(arguments), arguments)
            assert torch.equal(self.run(self.packed(arguments)), self.run(arguments))
