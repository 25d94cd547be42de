"""The torch kernels keep the contracts of the attention ops."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernelhub.backends.torch.attention.sequences import e4m3_values
from kernelhub.backends.torch.fused_quant.steps import fill
from kernelhub.ops.fused_quant.problem import NONE
from kernelhub.testing import OpContract
from tests.contract.attention import DenseContract, PagedContract
from tests.contract.bmm_fp8 import BmmFp8Contract
from tests.contract.comm import AllGatherContract, AllReduceContract, AllReduceRmsNormContract, ReduceScatterContract
from tests.contract.concat import ConcatContract
from tests.contract.experts import ExpertsContract
from tests.contract.experts_comm import CombineContract, DispatchContract
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


class TestPacked(DenseContract):
    kernel = "torch.packed"
    device = "cpu"


class TestSdpa(DenseContract):
    kernel = "torch.sdpa"


class TestBlocked(DenseContract):
    kernel = "torch.blocked"


class TestPackedPaged(PagedContract):
    kernel = "torch.packed"
    device = "cpu"


class TestBlockedPaged(PagedContract):
    kernel = "torch.blocked"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_256_bytes_of_e4m3_are_decoded_exactly(dtype) -> None:
    raw = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for several in (raw[:127], raw):  # without a NaN, and with both
        got = torch.empty(several.shape, dtype=dtype)
        e4m3_values("test", several.view(torch.float8_e4m3fn), got)
        want = several.view(torch.float8_e4m3fn).float()
        assert torch.equal(got.float().nan_to_num(nan=1e9), want.nan_to_num(nan=1e9))
        assert torch.equal(torch.signbit(got)[~want.isnan()], torch.signbit(want)[~want.isnan()])


class TestMerge(MergeContract):
    kernel = "torch.merge"


class TestConcat(ConcatContract):
    kernel = "torch.concat"


class TestDistributed(AllReduceContract):
    kernel = "torch.distributed"


class TestDistributedNorm(AllReduceRmsNormContract):
    kernel = "torch.distributed"


class TestGather(DispatchContract):
    kernel = "torch.gather"


class TestAllToAll(DispatchContract):
    kernel = "torch.all_to_all"


class TestGatherFixed(DispatchContract):
    kernel = "torch.gather_fixed"


class TestAllToAllFixed(DispatchContract):
    kernel = "torch.all_to_all_fixed"


class TestReduceScatter(CombineContract):
    kernel = "torch.reduce_scatter"


class TestAllToAllBack(CombineContract):
    kernel = "torch.all_to_all"


class TestReduceScatterFixed(CombineContract):
    kernel = "torch.reduce_scatter_fixed"


class TestAllToAllBackFixed(CombineContract):
    kernel = "torch.all_to_all_fixed"


class TestDistributedScatter(ReduceScatterContract):
    kernel = "torch.distributed"


class TestDistributedGather(AllGatherContract):
    kernel = "torch.distributed"


class TestPerGroup(GroupedGemmContract):
    kernel = "torch.per_group"


class TestQuantize(QuantizeContract):
    kernel = "torch.quantize"
    back = "torch.dequantize"


class TestGatheredMla(MlaContract):
    kernel = "torch.gathered"
    fewest_cases = 70


class TestLogits(LogitsContract):
    kernel = "torch.logits"


class TestPagedLogits(PagedLogitsContract):
    kernel = "torch.logits"


class TestTopK(TopKContract):
    kernel = "torch.topk"


class TestRouting(RoutingContract):
    kernel = "torch.routing"


class TestExperts(ExpertsContract):
    kernel = "torch.experts"


class TestLinear(LinearContract):
    kernel = "torch.chunked"


class TestNorm(OpContract):
    op, kernel, quick = "rms_norm_quant", "torch.steps", True


class TestActivation(OpContract):
    op, kernel, quick = "silu_and_mul_quant", "torch.steps", True


class TestScatterKvCache(KvCacheContract):
    kernel = "torch.scatter"


class TestRope(RopeContract):
    kernel = "torch.rope_scatter"


class TestScatterMlaCache(MlaCacheContract):
    kernel = "torch.scatter"


class TestFp8Dequantized(EveryScaling):
    kernel = "torch.dequantized"


class TestBmmFp8Dequantized(BmmFp8Contract):
    kernel = "torch.dequantized"


class TestFp4Gemm(Fp4GemmContract):
    kernel = "torch.dequantized"


def test_no_rows_are_filled_on_any_device() -> None:
    problem = SimpleNamespace(format=NONE)
    for device in ("cpu", "meta"):  # beyond a CPU all rows are one block
        fill(problem, 64, 0, lambda block: torch.empty(0, 64), None, torch.empty(0, 64, device=device), None)
