"""What only a GPU can show of the attention ops: graphs, syncs, streams, memory beyond 32-bit offsets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.triton.attention.prefill import prefill_kernel
from kernelhub.backends.triton.attention.split_kv import split_kernel
from kernelhub.backends.triton.merge.merge import merge_states_kernel
from kernelhub.backends.triton.mla.concat import concat_kernel
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import GraphLevel
from kernelhub.ops.attention.cases import largest_value
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_out
from kernelhub.ops.merge.inputs import merge_inputs
from kernelhub.ops.mla.concat.inputs import concat_inputs
from kernelhub.ops.models.shapes import AttentionModel
from tests.contract.attention import split

pytestmark = pytest.mark.gpu

GROUPED = AttentionModel("grouped", 8, 2, 128, 128)
RICH = AttentionModel("windowed, with sinks", 8, 2, 64, 64, window=50, sinks=True)
PAGED = ("triton.split_kv", "triton.split_kv_fixed", "triton.prefill")
DENSE = ("triton.prefill", "triton.split_kv", "torch.sdpa")


def agrees(out: torch.Tensor, arguments: dict[str, Any]) -> None:
    function = kernelhub.attention if "k" in arguments else kernelhub.paged_attention
    args, kwargs = split(arguments)
    agreement = compare_out(out, function.reference(*args, **kwargs), largest_value(arguments))
    assert agreement.ok, str(agreement)


def captured(call: Any) -> torch.cuda.CUDAGraph:
    """A graph of `call`, made after three calls on a side stream, as engines do."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


class TestChoice:
    def test_the_gpu_is_served_by_the_kernels_measured_fastest(self) -> None:
        decode = paged_attention_inputs(GROUPED, seq_lens=(900, 30), device="cuda")
        prefill = attention_inputs(GROUPED, batch=1, q_tokens=300, device="cuda")
        hopper = torch.cuda.get_device_capability() == (9, 0)
        by_cuda = hopper and kernelhub.paged_attention.explain(**decode, backend="cuda.paged_decode").selected
        assert kernelhub.paged_attention.explain(**decode).selected == (by_cuda or "triton.split_kv")
        first = "gluon.prefill_pipelined" if hopper else "torch.sdpa"
        assert kernelhub.attention.explain(**prefill).selected == first
        agrees(kernelhub.paged_attention(**decode), decode)
        agrees(kernelhub.attention(**prefill), prefill)

    def test_every_kernel_captured_below_claims_to_be(self) -> None:
        for op, names in (("paged_attention", (*PAGED, "triton.mixed")), ("attention", DENSE)):
            assert set(names) <= set(getattr(kernelhub, op).kernels())
            records = {kernel.name: kernel for kernel in HUB.registry.candidates(op).kernels}
            assert all(records[name].graph is GraphLevel.FULL for name in names)


class TestGraphs:
    @pytest.mark.parametrize("planned", [False, True], ids=["called", "planned"])
    @pytest.mark.parametrize("model", [GROUPED, RICH], ids=str)
    @pytest.mark.parametrize("kernel", PAGED)
    def test_a_captured_decode_reads_the_lengths_of_each_replay(self, kernel, model, planned) -> None:
        arguments = paged_attention_inputs(model, seq_lens=(700, 700, 700), page_size=16, device="cuda")
        args, kwargs = split(arguments)
        out = torch.empty_like(arguments["q"])
        if planned:
            step = kernelhub.paged_attention.prepare(*args, backend=kernel, **kwargs).begin(*args[3:])
            graph = captured(lambda: step.run(*args[:3], out=out))
        else:
            graph = captured(lambda: kernelhub.paged_attention(*args, backend=kernel, out=out, **kwargs))
        for seq_lens in ((700, 1, 16), (0, 333, 650)):
            arguments["seq_lens"].copy_(torch.tensor(seq_lens))
            arguments["block_table"].copy_(arguments["block_table"].flip(0))
            arguments["q"].normal_()
            out.fill_(torch.nan)
            graph.replay()
            agrees(out, arguments)

    @pytest.mark.parametrize("kernel", ["triton.mixed", "triton.prefill"])
    def test_a_captured_mixed_step_reads_the_offsets_of_each_replay(self, kernel) -> None:
        arguments = paged_attention_inputs(RICH, seq_lens=(90, 40, 70), q_lens=(60, 1, 9), device="cuda")
        arguments["max_seqlen_q"] = 70
        out = torch.empty_like(arguments["q"])
        graph = captured(lambda: kernelhub.paged_attention(**arguments, backend=kernel, out=out))
        for offsets in ((0, 1, 2, 70), (0, 40, 70, 70), (0, 0, 35, 70)):
            arguments["cu_seqlens_q"].copy_(torch.tensor(offsets))
            out.fill_(torch.nan)
            graph.replay()
            agrees(out, arguments)

    @pytest.mark.parametrize("kernel", DENSE)
    def test_a_captured_dense_call_sees_new_operands(self, kernel) -> None:
        arguments = attention_inputs(GROUPED, batch=2, q_tokens=8, kv_tokens=500, device="cuda")
        out = torch.empty_like(arguments["q"])
        graph = captured(lambda: kernelhub.attention(**arguments, backend=kernel, out=out))
        for name in ("q", "k", "v"):
            arguments[name].normal_()
        graph.replay()
        agrees(out, arguments)


class TestSyncs:
    @pytest.fixture(autouse=True)
    def no_syncs(self):
        yield
        torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.parametrize("kernel", [None, *PAGED, "triton.mixed"])
    @pytest.mark.parametrize("q_lens", [None, 4, (60, 1, 9)], ids=["decode", "uniform", "mixed"])
    def test_no_call_waits_for_the_gpu(self, q_lens, kernel) -> None:
        arguments = paged_attention_inputs(RICH, seq_lens=(90, 40, 70), q_lens=q_lens, device="cuda")
        selection = kernelhub.paged_attention.explain(**arguments, backend=kernel)
        if selection.selected is None:
            assert kernel is not None
            return
        for _ in range(3):  # compile, decide and bind, then serve
            out = kernelhub.paged_attention(**arguments, backend=kernel)
            torch.cuda.set_sync_debug_mode("error")
        torch.cuda.set_sync_debug_mode("default")
        agrees(out, arguments)

    def test_a_plan_that_reads_no_lengths_does_not_wait(self) -> None:
        arguments = paged_attention_inputs(GROUPED, seq_lens=(90, 40, 70), device="cuda")
        args, kwargs = split(arguments)
        plan = kernelhub.paged_attention.prepare(*args, **kwargs)
        assert not plan.reads_lengths
        plan.begin(*args[3:]).run(*args[:3])
        torch.cuda.set_sync_debug_mode("error")
        plan.begin(*args[3:]).run(*args[:3])


class TestStreams:
    def test_work_goes_to_the_current_stream(self) -> None:
        arguments = paged_attention_inputs(GROUPED, seq_lens=(4000, 100), device="cuda")
        want = kernelhub.paged_attention(**arguments)
        late = torch.randn_like(arguments["q"])
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            arguments["q"].copy_(late)
            out = kernelhub.paged_attention(**arguments)
        torch.cuda.synchronize()
        assert not torch.equal(out, want)
        agrees(out, arguments)


class TestMerge:
    def test_chunked_prefill_is_captured_and_replayed(self) -> None:
        arguments = attention_inputs(GROUPED, batch=1, q_tokens=70, kv_tokens=500, device="cuda")
        q, k, v = (arguments[name] for name in ("q", "k", "v"))
        out = torch.empty_like(q)

        def chunks() -> None:
            states = [
                kernelhub.attention(q, k[:, keys], v[:, keys], causal=causal, return_lse=True, backend="triton")
                for keys, causal in ((slice(0, 200), False), (slice(200, 430), False), (slice(430, 500), True))
            ]
            kernelhub.merge_attention_states(*zip(*states, strict=True), out=out)

        graph = captured(chunks)
        for _ in range(2):
            q.copy_(torch.randn_like(q))
            graph.replay()
            want = kernelhub.attention.reference(q, k, v, causal=True)
            # The parts are rounded once before they are merged: one unit roundoff more than in one piece.
            assert float((out - want).abs().max()) <= 3 * 2**-8 * float(v.abs().max())

    def test_waits_for_nothing_and_compiles_nothing_for_other_sizes(self) -> None:
        compiled = set()
        for tokens in (64, 1, 3, 1000):
            arguments = merge_inputs(tokens=tokens, num_heads=8, device="cuda")
            kernelhub.merge_attention_states(**arguments, return_lse=True)
            torch.cuda.synchronize()
            with torch.cuda.device(0):
                torch.cuda.set_sync_debug_mode("error")
                try:
                    kernelhub.merge_attention_states(**arguments, return_lse=True)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            compiled.add(len(merge_states_kernel.device_caches[torch.cuda.current_device()][0]))
        assert len(compiled) == 1


class TestConcat:
    def test_is_captured_and_compiles_nothing_for_other_sizes(self) -> None:
        compiled = set()
        for tokens in (64, 1, 3, 1000):
            arguments = concat_inputs(tokens=tokens, device="cuda")
            out = torch.zeros(tokens, 128, 192, dtype=torch.bfloat16, device="cuda")
            graph = captured(lambda arguments=arguments, out=out: kernelhub.concat_mla_k(**arguments, out=out))
            arguments["k_rope"].normal_()
            graph.replay()
            assert torch.equal(out, kernelhub.concat_mla_k.reference(**arguments))
            compiled.add(len(concat_kernel.device_caches[torch.cuda.current_device()][0]))
        assert len(compiled) == 1


class TestVariants:
    """A kernel that was compiled for some operands is launched again only for operands alike."""

    @pytest.mark.parametrize("kernel", ["triton.split_kv", "triton.prefill"])
    def test_calls_that_differ_in_what_triton_compiles_for_do_not_meet(self, kernel) -> None:
        base = paged_attention_inputs(RICH, seq_lens=(300, 77, 512), device="cuda")
        shifted = torch.empty(base["q"].numel() + 1, dtype=base["q"].dtype, device="cuda")[1:].view_as(base["q"])
        wide = torch.empty(*base["q"].shape[:2], 80, dtype=base["q"].dtype, device="cuda")[..., :64]
        apart = torch.stack([base["k_cache"], base["v_cache"]], 1)
        calls = [
            {},
            {"q": shifted.copy_(base["q"])},
            {"q": wide.copy_(base["q"])},
            {"k_cache": apart[:, 0], "v_cache": apart[:, 1]},
            {"sinks": base["sinks"].float() + 1},
            {"sinks": base["sinks"].half() - 1},
            {"scale": -0.2},
            {"scale": 1},
            {"scale": 0.125},
            {"window": 1 << 40},
            {"window": 3},
            {"seq_lens": torch.cat([base["seq_lens"], base["seq_lens"]])[3:]},
        ]
        for change in (*calls, *reversed(calls)):
            arguments = base | change
            args, kwargs = split(arguments)
            agrees(kernelhub.paged_attention(*args, backend=kernel, **kwargs), arguments)

    def test_batches_of_other_sizes_compile_nothing(self) -> None:
        for kernel, generated in (("triton.split_kv", split_kernel), ("triton.prefill", prefill_kernel)):
            for lse in (False, True):
                compiled = set()
                for seq_lens in ((40,), (40, 9), (700, 3, 16), tuple(range(1, 18))):
                    arguments = paged_attention_inputs(GROUPED, seq_lens=seq_lens, device="cuda")
                    kernelhub.paged_attention(**arguments, return_lse=lse, backend=kernel)
                    compiled.add(len(generated.device_caches[torch.cuda.current_device()][0]))
                assert len(compiled) == 1, "a batch of another size compiled a kernel"


class TestMemory:
    """Offsets beyond 2^31 elements, each array made so that a 32-bit offset would read or write elsewhere."""

    @pytest.mark.parametrize("kernel", PAGED)
    def test_a_page_beyond_two_to_the_31_elements(self, kernel) -> None:
        pages, page_size = 70_000, 256
        cache = torch.full((pages, page_size, 1, 128), 3.0, dtype=torch.bfloat16, device="cuda")
        assert cache.numel() > 1 << 31
        tokens = torch.randn(2, 4 * page_size, 1, 128, device="cuda").to(torch.bfloat16)
        far = torch.tensor([pages - 1, 7, pages - 3, 65_537], dtype=torch.int32, device="cuda")
        k_cache, v_cache = cache, cache.clone()
        for held, values in ((k_cache, tokens[0]), (v_cache, tokens[1])):
            held[far.long()] = values.view(4, page_size, 1, 128)
        q = torch.randn(1, 4, 128, device="cuda").to(torch.bfloat16)
        lengths = torch.tensor([1000], dtype=torch.int32, device="cuda")
        out = kernelhub.paged_attention(q, k_cache, v_cache, far[None], lengths, backend=kernel)
        want = kernelhub.attention.reference(q[:, None], tokens[:1, :1000], tokens[1:, :1000])[:, 0]
        assert compare_out(out, want, float(tokens[1].abs().max())).ok

    @pytest.mark.parametrize("kernel", ["triton.prefill"])
    def test_queries_beyond_two_to_the_31_elements(self, kernel) -> None:
        heads, first, last = 64, 270_000, 100
        q = torch.randn(first + last, heads, 128, dtype=torch.bfloat16, device="cuda")
        assert (q.numel() - last * heads * 128) > 1 << 31
        kv = torch.randn(2, first + last, 1, 128, dtype=torch.bfloat16, device="cuda")
        offsets = torch.tensor([0, first, first + last], dtype=torch.int32, device="cuda")
        out = kernelhub.attention(
            q,
            kv[0],
            kv[1],
            causal=True,
            window=8,
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=first,
            max_seqlen_k=first,
            backend=kernel,
        )
        for part in (slice(0, 200), slice(first - 200, first), slice(first, first + last)):
            before = max(0, part.start - 8) if part.start != first else first
            seen = slice(before, part.stop)
            want = kernelhub.attention.reference(
                q[None, seen].clone(), kv[:1, seen], kv[1:, seen], causal=True, window=8
            )[0, part.start - before :]
            assert compare_out(out[part], want, float(kv[1, seen].abs().max())).ok


class TestCompiled:
    def test_inductor_keeps_the_numbers(self) -> None:
        arguments = attention_inputs(RICH, batch=2, q_tokens=40, device="cuda")
        torch._dynamo.reset()
        run = torch.compile(lambda arguments: kernelhub.attention(**arguments) * 1, fullgraph=True)
        agrees(run(arguments), arguments)

    def test_graph_trees_capture_the_op(self) -> None:
        arguments = paged_attention_inputs(GROUPED, seq_lens=(300, 299), device="cuda")
        torch._dynamo.reset()
        run = torch.compile(
            lambda arguments: kernelhub.paged_attention(**arguments) * 1, fullgraph=True, mode="reduce-overhead"
        )
        for seq_lens in ((300, 20), (300, 20), (300, 20), (5, 299)):
            arguments["seq_lens"].copy_(torch.tensor(seq_lens))
            torch.compiler.cudagraph_mark_step_begin()
            agrees(run(arguments).clone(), arguments)
