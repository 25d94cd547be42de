"""Our CUDA kernels on a GPU: the contracts of their ops, threads, streams and graphs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.ops.kv_cache.inputs import write_kv_cache_inputs
from kernelhub.ops.quant.inputs import quantize_inputs
from kernelhub.testing import OpContract
from tests.contract.concat import ConcatContract
from tests.contract.indexer import TopKContract
from tests.contract.kv_cache import KvCacheContract, RopeContract
from tests.contract.routing import RoutingContract

pytestmark = pytest.mark.gpu


class TestWriteKvCache(KvCacheContract):
    kernel = "cuda.write"


class TestRope(RopeContract):
    kernel = "cuda.rope_write"


class TestRouting(RoutingContract):
    kernel = "cuda.routing"


class TestTopK(TopKContract):
    kernel = "cuda.select"


class TestConcat(ConcatContract):
    kernel = "cuda.concat"


class TestMerge(OpContract):
    op, kernel = "merge_attention_states", "cuda.merge"


class TestQuantizeFp8(OpContract):
    op, kernel = "quantize_fp8", "cuda.quantize"


class TestNorm(OpContract):
    op, kernel = "rms_norm_quant", "cuda.rows"


class TestActivation(OpContract):
    op, kernel = "silu_and_mul_quant", "cuda.rows"


def test_a_thread_that_has_not_used_cuda_launches() -> None:
    arguments = quantize_inputs(tokens=5, width=512, device="cuda")
    plan = kernelhub.quantize_fp8.prepare(**arguments, backend="cuda.quantize")
    want, found = plan.run(**arguments), []
    thread = threading.Thread(target=lambda: found.append(plan.run(**arguments)))
    thread.start()
    thread.join()
    assert torch.equal(found[0][0].view(torch.uint8), want[0].view(torch.uint8))


def test_a_launch_is_on_the_current_stream_and_in_a_graph() -> None:
    arguments: dict[str, Any] = write_kv_cache_inputs(tokens=40, skipped=0, device="cuda")
    plan = kernelhub.write_kv_cache.prepare(**arguments, backend="cuda.write")
    plan.run(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(**arguments)
    for value in (1.0, 2.0):
        arguments["k"].fill_(value)
        graph.replay()
        slot = arguments["slot_mapping"]
        assert (arguments["k_cache"].flatten(0, 1)[slot] == value).all()
