"""What only a GPU can show of the indexer: tensor cores' numbers at real sizes, graphs, syncs, long rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.triton.indexer.logits import logits_kernel, paged_logits_kernel
from kernelhub.backends.triton.indexer.topk import count_kernel, store_kernel
from kernelhub.backends.triton.indexer.topk_search import select_kernel
from kernelhub.ops.indexer.inputs import logits_inputs, paged_logits_inputs, topk_inputs
from kernelhub.ops.indexer.layout import split_cache
from kernelhub.ops.indexer.tolerance import most_wrong, relative_error_allowed, sizes
from tests.gpu.test_attention_on_gpu import captured

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn


def agree(got: torch.Tensor, arguments: dict[str, Any]) -> None:
    """With the reference in float32, whose own error is far within the bound."""
    q, k = arguments["q"], arguments["k"]
    want = kernelhub.mqa_logits.reference(**arguments)
    allowed = relative_error_allowed(*q.shape[1:], float8_products=q.dtype is FP8) * 2
    size = torch.cat([sizes(q[rows], k, arguments["k_scale"], arguments["weights"][rows]) for rows in blocks(q)])
    wrong = most_wrong(got, want.double(), size, allowed)
    assert wrong is None, wrong


def blocks(q: torch.Tensor) -> list[slice]:
    return [slice(first, first + 256) for first in range(0, q.shape[0], 256)]


def paged_agree(got: torch.Tensor, arguments: dict[str, Any]) -> None:
    want = kernelhub.paged_mqa_logits.reference(**arguments).double()
    q = arguments["q"]
    k, k_scale = split_cache(arguments["k_cache"], arguments["k_scale_cache"], q.shape[-1])
    largest = k.float().abs().flatten(0, 1).amax(0, keepdim=True)
    size = sizes(q.flatten(0, 1), largest, None if k_scale is None else k_scale.amax().view(1), arguments["weights"])
    allowed = relative_error_allowed(*q.shape[2:], float8_products=q.dtype is FP8) * 2
    wrong = most_wrong(got, want, size.expand_as(want), allowed)
    assert wrong is None, wrong


def variants(kernel: Any) -> int:
    return len(kernel.device_caches[torch.cuda.current_device()][0])


class TestNumbers:
    @pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("model", ["deepseek-v3.2", "glm-5"])
    def test_prefill_at_real_sizes(self, model, dtype) -> None:
        arguments = logits_inputs(model, tokens=1000, keys=4097, dtype=dtype, device="cuda")
        agree(kernelhub.mqa_logits(**arguments, backend="triton.logits"), arguments)
        agree(kernelhub.mqa_logits(**arguments, backend="torch.logits"), arguments)

    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("next_n", [1, 3])
    def test_decode_at_real_sizes(self, next_n, fused) -> None:
        arguments = paged_logits_inputs(
            "deepseek-v3.2", seq_lens=(20000, 64, 7, 0, 4097), next_n=next_n, fused=fused, device="cuda"
        )
        for backend in ("triton.logits", "torch.logits"):
            paged_agree(kernelhub.paged_mqa_logits(**arguments, backend=backend), arguments)

    @pytest.mark.parametrize(
        ("tokens", "keys"), [(1, 131072), (3, 131072), (64, 40000), (700, 6000)], ids=lambda size: str(size)
    )
    @pytest.mark.parametrize("levels", [None, 50])
    @pytest.mark.parametrize("kernel", ["triton.search", "triton.radix", "cuda.select"])
    def test_topk_of_long_rows_is_exact(self, kernel, tokens, keys, levels) -> None:
        arguments = topk_inputs(tokens=tokens, keys=keys, levels=levels, device="cuda")
        got = kernelhub.topk_indices(**arguments, backend=kernel)
        assert torch.equal(got, kernelhub.topk_indices(**arguments, backend="torch.topk"))
        some = slice(0, 2)
        few = {name: value[some] if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
        assert torch.equal(got[some], kernelhub.topk_indices.reference(**few))

    @pytest.mark.parametrize("kernel", ["triton.search", "triton.radix", "cuda.select"])
    def test_rows_beyond_two_to_the_31_elements(self, kernel) -> None:
        rows, columns = 16500, 131072
        assert rows * columns > 1 << 31
        logits = torch.full((rows, columns), -1.0, device="cuda")
        places = torch.arange(0, 64, device="cuda") * 1999 + 7
        logits[-1, places] = torch.rand(64, device="cuda")
        got = kernelhub.topk_indices(logits, 64, backend=kernel)
        assert torch.equal(got[-1], places.int())
        assert torch.equal(got[0], torch.arange(64, dtype=torch.int32, device="cuda"))

    def test_a_result_beyond_two_to_the_31_elements(self) -> None:
        tokens, keys = 16500, 131072
        arguments = logits_inputs("glm-5", tokens=tokens, keys=keys, device="cuda")
        starts = (arguments["cu_seqlen_ke"] - 300).contiguous()
        arguments["cu_seqlen_ks"] = starts
        got = kernelhub.mqa_logits(**arguments, backend="triton.logits")
        last = {name: value[-4:] if name not in ("k", "k_scale") else value[-512:] for name, value in arguments.items()}
        for name in ("cu_seqlen_ks", "cu_seqlen_ke"):
            last[name] = last[name] - (keys - 512)
        agree(got[-4:, -512:].contiguous(), last)
        assert (got[-4:].isfinite().sum(1) == 300).all()


class TestServing:
    def test_a_captured_decode_reads_the_lengths_of_each_replay(self) -> None:
        arguments = paged_logits_inputs("deepseek-v3.2", seq_lens=(700, 700), fused=True, device="cuda")
        places = torch.empty(2, 256, dtype=torch.int32, device="cuda")
        out = torch.empty(2, 700, device="cuda")

        def step() -> None:
            kernelhub.paged_mqa_logits(**arguments, out=out)
            kernelhub.topk_indices(out, 256, out=places)

        graph = captured(step)
        for lengths in ((700, 1), (13, 500)):
            arguments["seq_lens"].copy_(torch.tensor(lengths))
            graph.replay()
            paged_agree(out, arguments)
            assert torch.equal(places, kernelhub.topk_indices.reference(out, 256))

    def test_a_captured_prefill_sees_new_ranges(self) -> None:
        arguments = logits_inputs("glm-5", tokens=70, keys=500, device="cuda")
        out = torch.empty(70, 500, device="cuda")
        graph = captured(lambda: kernelhub.mqa_logits(**arguments, out=out))
        arguments["cu_seqlen_ks"].zero_()
        graph.replay()
        agree(out, arguments)

    def test_no_call_waits_for_the_gpu_and_none_compiles_for_other_sizes(self) -> None:
        compiled = set()
        for size in (64, 1, 3, 700):
            calls = [
                (kernelhub.mqa_logits, logits_inputs(tokens=size, keys=900 + size, device="cuda")),
                (
                    kernelhub.paged_mqa_logits,
                    paged_logits_inputs(seq_lens=(size + 5,) * min(size, 9), max_seq_len=size + 9, device="cuda"),
                ),
                (kernelhub.topk_indices, topk_inputs(tokens=size, keys=2100 + size, device="cuda")),
            ]
            for function, arguments in calls:
                function(**arguments)
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    function(**arguments)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            kernels = (logits_kernel, paged_logits_kernel, count_kernel, store_kernel, select_kernel)
            compiled.add(tuple(variants(kernel) for kernel in kernels))
        assert len(compiled) == 1

    @pytest.mark.parametrize("kernel", ["triton.search", "triton.radix"])
    def test_memory_is_within_what_the_plan_says(self, kernel) -> None:
        arguments = topk_inputs(tokens=9, keys=100_000, device="cuda")
        plan = kernelhub.topk_indices.prepare(**arguments, backend=kernel)
        out = plan.run(**arguments)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        plan.run(**arguments, out=out)
        used = torch.cuda.max_memory_allocated() - before
        assert used <= plan.workspace_bytes(num_tokens=9, max_kv_len=100_000) + 1024
