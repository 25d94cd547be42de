"""Our CUDA kernels on a GPU: the contracts of their ops, threads, streams and graphs."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.cuda.indexer.topk import TopK
from kernelhub.ops.fused_quant.inputs import activation_inputs, norm_inputs
from kernelhub.ops.indexer.inputs import topk_inputs
from kernelhub.ops.indexer.problem import TopKProblem
from kernelhub.ops.kv_cache.inputs import write_kv_cache_inputs
from kernelhub.ops.merge.inputs import merge_inputs
from kernelhub.ops.mla.concat.inputs import concat_inputs
from kernelhub.ops.quant.inputs import quantize_inputs
from kernelhub.probes.device import facts_of
from kernelhub.runtime import launch
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


def test_rows_that_clusters_share_are_right_on_streams_at_once_and_in_a_graph() -> None:
    rows = [topk_inputs(tokens=tokens, keys=131072, k=2048, device="cuda") for tokens in (1, 3, 8)]
    wants = [kernelhub.topk_indices(**one, backend="torch.topk") for one in rows]
    plan = kernelhub.topk_indices.prepare(**rows[0], backend="cuda.select")
    streams = [torch.cuda.Stream() for _ in rows]
    torch.cuda.synchronize()
    for _ in range(50):
        made = []
        for one, stream in zip(rows, streams, strict=True):
            with torch.cuda.stream(stream):
                made.append(plan.run(**one))
        torch.cuda.synchronize()
        assert all(torch.equal(got, want) for got, want in zip(made, wants, strict=True))
    out, graph = torch.empty_like(wants[1]), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(**rows[1], out=out)
    for _ in range(3):
        rows[1]["logits"].copy_(rows[1]["logits"].flip(1))
        graph.replay()
        assert torch.equal(out, kernelhub.topk_indices(**rows[1], backend="torch.topk"))


@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
@pytest.mark.parametrize("direct", [True, False])
def test_every_share_of_a_row_gives_the_same(direct: bool, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernelhub's launcher, and without by cuda-bindings."""
    if not direct:
        monkeypatch.setattr(launch, "in_use", lambda: False)
    adapter = TopK(TopKProblem(device=facts_of(0), k=300, row_starts=True, row_ends=True))
    if (blocks, 1) not in adapter._kernels:
        pytest.skip("clusters need sm_90: costs the shares of 2, 4 and 8 blocks")
    for threads in (256, 512, 1024):
        monkeypatch.setattr(adapter, "_blocks_and_threads", lambda rows, columns, threads=threads: (blocks, threads))
        for columns, levels in ((40000, None), (9001, 5), (301, None)):
            given = topk_inputs(tokens=5, keys=columns, k=300, levels=levels, device="cuda")
            logits = given["logits"]
            logits[0, 5], logits[1, 7], logits[2, 3:200] = torch.nan, torch.inf, -torch.inf
            want = kernelhub.topk_indices(**given, backend="torch.topk")
            for one in (logits, logits.T.contiguous().T):
                out = torch.full_like(want, -7)
                adapter.launch(one, given["row_starts"], given["row_ends"], out)
                assert torch.equal(out, want)


AGAIN: dict[tuple[str, str, str], Any] = {
    ("write_kv_cache", "cuda.write", "torch.scatter"): write_kv_cache_inputs,
    ("write_kv_cache", "cuda.rope_write", "torch.rope_scatter"): lambda **more: write_kv_cache_inputs(
        rope="neox", **more
    ),
    ("quantize_fp8", "cuda.quantize", "torch.quantize"): quantize_inputs,
    ("merge_attention_states", "cuda.merge", "torch.merge"): merge_inputs,
    ("concat_mla_k", "cuda.concat", "torch.concat"): concat_inputs,
    ("rms_norm_quant", "cuda.rows", "torch.steps"): partial(norm_inputs, width=1024, format=None),
    ("silu_and_mul_quant", "cuda.rows", "torch.steps"): lambda **more: activation_inputs(
        width=1024, format=None, **more
    ),
}


@pytest.mark.parametrize(("op", "kernel", "other"), AGAIN, ids=lambda name: name)
def test_a_call_is_repeated_with_other_operands_and_other_forms(op: str, kernel: str, other: str) -> None:
    """The launcher repeats launches for operands of one form; an operand of another alignment is another form."""
    function, make, plan = getattr(kernelhub, op), AGAIN[op, kernel, other], None

    def moved(arguments: dict[str, Any]) -> dict[str, Any]:
        name = next(name for name in ("k", "x", "k_nope", "outs") if name in arguments)
        given = arguments[name]
        first = given[0] if isinstance(given, list) else given
        shifted = torch.zeros(first.numel() + 1, dtype=first.dtype, device="cuda")[1:].view(first.shape).copy_(first)
        return arguments | {name: [shifted, *given[1:]] if isinstance(given, list) else shifted}

    for seed in range(16):
        tokens = 16 if seed % 4 < 3 else 5
        ours, theirs = (make(tokens=tokens, seed=seed, device="cuda") for _ in range(2))
        plan = plan or function.prepare(**ours, backend=kernel)
        given = {name: value for name, value in ours.items() if name != "is_neox"}  # the plan's
        got = plan.run(**(moved(given) if seed % 5 == 4 else given))
        want = function(**theirs, backend=other)
        for one, two in zip(*([each] if isinstance(each, torch.Tensor) else each for each in (got, want)), strict=True):
            if one is not None:
                torch.testing.assert_close(one.float(), two.float(), rtol=1e-2, atol=1e-2, equal_nan=True)
        if "q" in ours:
            assert torch.equal(ours["q"], theirs["q"])
