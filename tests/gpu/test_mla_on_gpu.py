"""What only a GPU can show of latent attention: real sizes, graphs, syncs, compilation, offsets beyond 32 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.triton.mla.cache import write_cache_kernel
from kernelhub.backends.triton.mla.latent import latent_kernel, merge_latent_kernel
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.mla.cache.inputs import write_mla_cache_inputs
from tests.contract.mla_attention import largest_value
from tests.contract.mla_cache import bits
from tests.gpu.test_attention_on_gpu import captured

pytestmark = pytest.mark.gpu

KERNELS = ("triton.split_kv", "triton.split_kv_fixed")
FP8 = torch.float8_e4m3fn


def inputs(**changes: Any) -> dict[str, Any]:
    return mla_attention_inputs(**{"device": "cuda"} | changes)


def agrees(out: torch.Tensor, arguments: dict[str, Any]) -> None:
    agreement = compare_out(out, kernelhub.mla_attention.reference(**arguments), largest_value(arguments))
    assert agreement.ok, str(agreement)


class TestNumbers:
    """Shapes as engines have them; the reference is in float32."""

    @pytest.mark.parametrize("kernel", [*KERNELS, "torch.gathered"])
    @pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["bf16", "fp8"])
    @pytest.mark.parametrize("heads", [8, 16, 128])
    @pytest.mark.parametrize(
        "form",
        [
            {"seq_lens": (9000,)},
            {"seq_lens": (1, 513, 4096, 0, 2047)},
            {"seq_lens": (700, 3000, 64), "q_lens": 4},
            {"seq_lens": (700, 300, 64, 900), "q_lens": (1, 200, 0, 3)},
            {"seq_lens": (700, 3000, 5000), "topk": 2048},
            {"seq_lens": (700, 3000, 64), "q_lens": 2, "topk": 2048},
            {"seq_lens": (700, 300, 64, 900), "q_lens": (1, 9, 0, 3), "topk": 300},
        ],
        ids=["one", "decode", "speculative", "ragged", "sparse", "sparse speculative", "sparse ragged"],
    )
    def test_they_are_those_of_the_reference(self, form, heads, kv_dtype, kernel) -> None:
        arguments = inputs(num_heads=heads, kv_dtype=kv_dtype, **form)
        out, lse = kernelhub.mla_attention(**arguments, return_lse=True, backend=kernel)
        want, want_lse = kernelhub.mla_attention.reference(**arguments, return_lse=True)
        agreement = compare_out(out, want, largest_value(arguments))
        assert agreement.ok, str(agreement)
        assert compare_lse(lse, want_lse) <= lse_tolerance(out.dtype)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_in_other_dtypes(self, dtype) -> None:
        for kernel in KERNELS:
            arguments = inputs(seq_lens=(700, 65, 0, 2048), dtype=dtype, num_heads=20)
            agrees(kernelhub.mla_attention(**arguments, backend=kernel), arguments)

    def test_the_gpu_is_served_by_a_kernel_of_ours(self) -> None:
        arguments = inputs(seq_lens=(700, 65))
        hopper = ("cuda.decode", "gluon.decode")  # the first needs cuda-bindings
        own = hopper if torch.cuda.get_device_capability() == (9, 0) else ("triton.split_kv",)
        first = next(name for name in own if kernelhub.mla_attention.explain(**arguments, backend=name).selected)
        with kernelhub.use(disable="flash_mla"):  # which comes first where it is installed
            assert kernelhub.mla_attention.explain(**arguments).selected == first
            agrees(kernelhub.mla_attention(**arguments), arguments)


class TestGraphs:
    @pytest.mark.parametrize("planned", [False, True], ids=["called", "planned"])
    @pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["bf16", "fp8"])
    @pytest.mark.parametrize("kernel", KERNELS)
    def test_a_captured_decode_reads_the_lengths_of_each_replay(self, kernel, kv_dtype, planned) -> None:
        arguments = inputs(seq_lens=(700, 700, 700), num_heads=16, kv_dtype=kv_dtype)
        operands = [arguments[name] for name in ("q", "kv_cache", "block_table", "seq_lens")]
        out = torch.empty(3, 16, 512, dtype=torch.bfloat16, device="cuda")
        if planned:
            step = kernelhub.mla_attention.prepare(**arguments, backend=kernel).begin(*operands[2:])
            graph = captured(lambda: step.run(*operands[:2], out=out))
        else:
            graph = captured(lambda: kernelhub.mla_attention(**arguments, backend=kernel, out=out))
        for seq_lens in ((700, 1, 64), (0, 333, 650)):
            arguments["seq_lens"].copy_(torch.tensor(seq_lens))
            arguments["block_table"].copy_(arguments["block_table"].flip(0))
            arguments["q"].normal_()
            out.fill_(torch.nan)
            graph.replay()
            agrees(out, arguments)

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_a_captured_sparse_step_reads_the_positions_and_offsets_of_each_replay(self, kernel) -> None:
        arguments = inputs(seq_lens=(900, 400, 700), q_lens=(6, 1, 2), topk=256, num_heads=40)
        out = torch.empty(9, 40, 512, dtype=torch.bfloat16, device="cuda")
        graph = captured(lambda: kernelhub.mla_attention(**arguments, backend=kernel, out=out))
        for offsets in ((0, 1, 2, 9), (0, 4, 9, 9)):
            arguments["cu_seqlens_q"].copy_(torch.tensor(offsets))
            arguments["topk_indices"].copy_(arguments["topk_indices"].flip(0))
            out.fill_(torch.nan)
            graph.replay()
            agrees(out, arguments)

    @pytest.mark.parametrize("kernel", ["triton.write", "torch.scatter"])
    @pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["bf16", "fp8"])
    def test_a_captured_write_reads_the_slots_of_each_replay(self, kv_dtype, kernel) -> None:
        arguments = write_mla_cache_inputs(tokens=300, kv_dtype=kv_dtype, device="cuda")
        graph = captured(lambda: kernelhub.write_mla_cache(**arguments, backend=kernel))
        for _ in range(2):
            arguments["slot_mapping"].copy_(arguments["slot_mapping"].roll(7))
            arguments["kv_c"].normal_()
            want = kernelhub.write_mla_cache.reference(**arguments)
            graph.replay()
            assert torch.equal(bits(arguments["kv_cache"]), bits(want))


class TestSyncs:
    @pytest.fixture(autouse=True)
    def no_syncs(self):
        yield
        torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.parametrize("kernel", KERNELS)
    @pytest.mark.parametrize("topk", [None, 64])
    @pytest.mark.parametrize("q_lens", [None, 4, (6, 1, 9)], ids=["decode", "uniform", "ragged"])
    def test_no_call_waits_for_the_gpu(self, q_lens, topk, kernel) -> None:
        arguments = inputs(seq_lens=(90, 40, 700), q_lens=q_lens, topk=topk, num_heads=16)
        for _ in range(3):  # compile, decide and bind, then serve
            out = kernelhub.mla_attention(**arguments, backend=kernel)
            torch.cuda.set_sync_debug_mode("error")
        torch.cuda.set_sync_debug_mode("default")
        agrees(out, arguments)

    @pytest.mark.parametrize("kernel", ["triton.write", "torch.scatter"])
    @pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["bf16", "fp8"])
    def test_no_write_does(self, kv_dtype, kernel) -> None:
        arguments = write_mla_cache_inputs(tokens=300, kv_dtype=kv_dtype, device="cuda")
        for _ in range(3):
            kernelhub.write_mla_cache(**arguments, backend=kernel)
            torch.cuda.set_sync_debug_mode("error")


class TestCompilation:
    @pytest.mark.parametrize("kernel", KERNELS)
    @pytest.mark.parametrize("topk", [None, 300])
    def test_batches_of_other_sizes_compile_nothing(self, topk, kernel) -> None:
        compiled = set()
        for seq_lens in ((5000, 40), (40, 9, 700, 3), (700, 3, 16), tuple(range(300, 317)), (9000,)):
            arguments = inputs(seq_lens=seq_lens, topk=None if topk is None else topk + len(seq_lens), num_heads=16)
            kernelhub.mla_attention(**arguments, backend=kernel)
            device = torch.cuda.current_device()
            compiled.add(tuple(len(k.device_caches[device][0]) for k in (latent_kernel, merge_latent_kernel)))
        assert len(compiled) == 1, "a batch of another size compiled a kernel"

    def test_calls_that_differ_in_what_triton_compiles_for_do_not_meet(self) -> None:
        base = inputs(seq_lens=(300, 77, 512), num_heads=16)
        shifted = torch.empty(base["q"].numel() + 1, dtype=torch.bfloat16, device="cuda")[1:].view_as(base["q"])
        layers = torch.stack([base["kv_cache"], base["kv_cache"]], 1)
        sinks = torch.linspace(-1, 2, 16, device="cuda")
        calls = [
            {},
            {"q": shifted.copy_(base["q"])},
            {"kv_cache": layers[:, 1]},
            {"kv_cache": base["kv_cache"].unsqueeze(2)},
            {"block_table": base["block_table"].repeat_interleave(2, 1)[:, ::2]},
            {"sinks": sinks},
            {"sinks": sinks.half() - 1},
            {"scale": -0.2},
            {"scale": 1},
            {"seq_lens": torch.cat([base["seq_lens"], base["seq_lens"]])[3:]},
        ]
        for change in (*calls, *reversed(calls)):
            agrees(kernelhub.mla_attention(**(base | change), backend="triton.split_kv"), base | change)

    def test_writes_of_other_sizes_compile_nothing(self) -> None:
        compiled = set()
        for tokens in (64, 1, 3, 1000):
            arguments = write_mla_cache_inputs(tokens=tokens, kv_dtype=FP8, device="cuda")
            want = kernelhub.write_mla_cache.reference(**arguments)
            kernelhub.write_mla_cache(**arguments, backend="triton.write")
            assert torch.equal(bits(arguments["kv_cache"]), bits(want))
            compiled.add(len(write_cache_kernel.device_caches[torch.cuda.current_device()][0]))
        assert len(compiled) == 1


class TestMemory:
    @pytest.mark.parametrize("kernel", KERNELS)
    @pytest.mark.parametrize("topk", [None, 700])
    def test_a_page_beyond_two_to_the_31_elements(self, topk, kernel) -> None:
        pages, page_size = 60_000, 64
        near = inputs(seq_lens=(1000,), num_heads=16, page_size=page_size, topk=topk)
        cache = torch.full((pages, page_size, 576), 3.0, dtype=torch.bfloat16, device="cuda")
        assert cache.numel() > 1 << 31
        held = near["block_table"][0].long()
        far = torch.arange(len(held), device="cuda") * -777 + pages - 1
        cache[far] = near["kv_cache"][held]
        arguments = near | {"kv_cache": cache, "block_table": far[None].int()}
        agrees(kernelhub.mla_attention(**arguments, backend=kernel), near)

    @pytest.mark.parametrize("kernel", ["triton.write", "torch.scatter"])
    def test_a_slot_beyond_two_to_the_31_elements(self, kernel) -> None:
        cache = torch.zeros(60_000, 64, 576, dtype=torch.bfloat16, device="cuda")
        arguments = write_mla_cache_inputs(tokens=3, skipped=0, device="cuda")
        last = cache.shape[0] * 64 - 1
        slots = torch.tensor([last, 0, last - 70], device="cuda")
        kernelhub.write_mla_cache(**(arguments | {"kv_cache": cache, "slot_mapping": slots}), backend=kernel)
        rows = torch.cat([arguments["kv_c"], arguments["k_rope"]], 1)
        assert torch.equal(cache.flatten(0, 1)[slots], rows)
        assert torch.equal(cache.flatten(0, 1).count_nonzero(), rows.count_nonzero())
