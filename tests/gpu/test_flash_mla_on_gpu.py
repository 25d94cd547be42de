"""FlashMLA on a GPU: the contract of latent attention, real sizes, graphs, syncs. Skipped where it cannot run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from tests.contract.mla_attention import Case, MlaContract, largest_value
from tests.gpu.test_attention_on_gpu import captured

pytestmark = pytest.mark.gpu

DENSE, SPARSE, PADDED = "flash_mla.dense", "flash_mla.sparse", "flash_mla.sparse_padded"


def inputs(**changes: Any) -> dict[str, Any]:
    return mla_attention_inputs(**{"device": "cuda"} | changes)


def needs(kernel: str, arguments: dict[str, Any]) -> None:
    """Skip where the kernel cannot run a call that its record should take, with the reason."""
    selection = kernelhub.mla_attention.explain(**arguments, backend=kernel)
    if selection.selected != kernel:
        decision = next(item for item in selection.decisions if item.kernel == kernel)
        pytest.skip(f"{kernel}: {decision.reason}")


def agrees(out: torch.Tensor, arguments: dict[str, Any], lse: torch.Tensor | None = None) -> None:
    want, want_lse = kernelhub.mla_attention.reference(**arguments, return_lse=True)
    agreement = compare_out(out, want, largest_value(arguments))
    assert agreement.ok, str(agreement)
    if lse is not None:
        assert compare_lse(lse, want_lse) <= lse_tolerance(out.dtype)


class OfOneShape(MlaContract):
    widths = (512, 64)

    def test_takes_enough_cases(self) -> None:
        needs(self.kernel, self.inputs(Case("plain")))
        super().test_takes_enough_cases()


class TestDense(OfOneShape):
    kernel = DENSE
    page_size = 64
    fewest_cases = 30


class TestSparse(OfOneShape):
    kernel = SPARSE
    lists_all = True
    heads = 64
    fewest_cases = 10


class TestSparsePadded(OfOneShape):
    kernel = PADDED
    lists_all = True
    fewest_cases = 10


class TestNumbers:
    """Shapes as engines have them; the reference is in float32."""

    @pytest.mark.parametrize("heads", [8, 16, 64, 128])
    @pytest.mark.parametrize(
        "form",
        [
            {"seq_lens": (9000,)},
            {"seq_lens": (1, 513, 4096, 0, 2047)},
            {"seq_lens": (700, 3000, 64), "q_lens": 4},
            {"seq_lens": (700, 300), "q_lens": 200},
            {"seq_lens": tuple(range(1, 300, 2))},
        ],
        ids=["one", "decode", "speculative", "prefill", "many"],
    )
    def test_dense(self, form, heads) -> None:
        arguments = inputs(num_heads=heads, **form)
        needs(DENSE, arguments)
        agrees(*self._run(DENSE, arguments))

    @pytest.mark.parametrize("heads", [16, 64, 100, 128])
    @pytest.mark.parametrize("page_size", [1, 64])
    @pytest.mark.parametrize(
        "form",
        [
            {"seq_lens": (700, 3000, 5000), "topk": 2048},
            {"seq_lens": (700, 3000, 64), "q_lens": 2, "topk": 2048},
            {"seq_lens": (700, 300, 64, 900), "q_lens": (1, 9, 0, 3), "topk": 300},
            {"seq_lens": (0, 4000), "q_lens": (0, 400), "topk": 1024},
        ],
        ids=["decode", "speculative", "ragged", "prefill"],
    )
    def test_sparse(self, form, page_size, heads) -> None:
        arguments = inputs(num_heads=heads, page_size=page_size, **form)
        kernel = SPARSE if heads in (64, 128) else PADDED
        needs(kernel, arguments)
        agrees(*self._run(kernel, arguments))

    @staticmethod
    def _run(kernel: str, arguments: dict[str, Any]) -> Any:
        out, lse = kernelhub.mla_attention(**arguments, return_lse=True, backend=kernel)
        plain = kernelhub.mla_attention(**arguments, backend=kernel)
        assert torch.equal(plain, out)
        return out, arguments, lse

    @pytest.mark.parametrize("kernel", [DENSE, PADDED])
    def test_a_cache_beyond_two_to_the_31_elements(self, kernel) -> None:
        near = inputs(seq_lens=(1000,), num_heads=16, topk=None if kernel == DENSE else 700)
        needs(kernel, near)
        cache = torch.full((60_000, 64, 576), 3.0, dtype=torch.bfloat16, device="cuda")
        assert cache.numel() > 1 << 31
        held = near["block_table"][0].long()
        far = torch.arange(len(held), device="cuda") * -777 + cache.shape[0] - 1
        cache[far] = near["kv_cache"][held]
        arguments = near | {"kv_cache": cache, "block_table": far[None].int()}
        agrees(kernelhub.mla_attention(**arguments, backend=kernel), near)

    def test_sparse_rows_do_not_depend_on_the_batch(self) -> None:
        arguments = inputs(seq_lens=(700, 3000, 5000), topk=2048, num_heads=64)
        needs(SPARSE, arguments)
        together = kernelhub.mla_attention(**arguments, backend=SPARSE)
        for row in range(3):
            one = {name: arguments[name][row : row + 1] for name in ("q", "block_table", "seq_lens", "topk_indices")}
            assert torch.equal(kernelhub.mla_attention(**(arguments | one), backend=SPARSE)[0], together[row])


class TestGraphs:
    @pytest.mark.parametrize("planned", [False, True], ids=["called", "planned"])
    @pytest.mark.parametrize("kernel", [DENSE, SPARSE, PADDED])
    def test_a_captured_decode_reads_the_lengths_of_each_replay(self, kernel, planned) -> None:
        heads = 64 if kernel == SPARSE else 16
        arguments = inputs(seq_lens=(700, 700, 700), num_heads=heads, topk=None if kernel == DENSE else 256)
        needs(kernel, arguments)
        operands = [arguments[name] for name in ("q", "kv_cache", "block_table", "seq_lens")]
        listed = arguments.get("topk_indices")
        out = torch.empty(3, heads, 512, dtype=torch.bfloat16, device="cuda")
        if planned:
            step = kernelhub.mla_attention.prepare(**arguments, backend=kernel).begin(*operands[2:])
            graphs = [captured(lambda: step.run(*operands[:2], listed, out=out)) for _ in range(2)]
        else:
            graphs = [captured(lambda: kernelhub.mla_attention(**arguments, backend=kernel, out=out))]
        for seq_lens in ((700, 1, 64), (0, 333, 650)):
            for graph in reversed(graphs):
                arguments["seq_lens"].copy_(torch.tensor(seq_lens))
                arguments["block_table"].copy_(arguments["block_table"].flip(0))
                arguments["q"].normal_()
                out.fill_(torch.nan)
                graph.replay()
                agrees(out, arguments)

    def test_layers_of_a_captured_step_share_one_schedule(self) -> None:
        arguments = inputs(seq_lens=(700, 90, 4000), num_heads=16)
        needs(DENSE, arguments)
        operands = [arguments[name] for name in ("q", "kv_cache", "block_table", "seq_lens")]
        outs = [torch.empty(3, 16, 512, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        step = kernelhub.mla_attention.prepare(**arguments, backend=DENSE).begin(*operands[2:])
        graph = captured(lambda: [step.run(*operands[:2], out=out) for out in outs])
        assert len(step.metadata.state) == 2, "one schedule outside of the graph, one in it"
        arguments["seq_lens"].copy_(torch.tensor((64, 700, 3000)))
        arguments["block_table"].copy_(arguments["block_table"].flip(0).clamp(min=0))
        arguments["kv_cache"].nan_to_num_()
        graph.replay()
        assert all(torch.equal(out, outs[0]) for out in outs)
        agrees(outs[0], arguments)


class TestSyncs:
    @pytest.fixture(autouse=True)
    def no_syncs(self):
        yield
        torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.parametrize("kernel", [DENSE, SPARSE, PADDED])
    @pytest.mark.parametrize("q_lens", [None, 4, (6, 1, 9)], ids=["decode", "uniform", "ragged"])
    def test_no_call_waits_for_the_gpu(self, q_lens, kernel) -> None:
        topk, heads = None if kernel == DENSE else 64, 64 if kernel == SPARSE else 16
        arguments = inputs(seq_lens=(90, 40, 700), q_lens=q_lens, topk=topk, num_heads=heads)
        needs(kernel, arguments)
        for _ in range(3):
            out = kernelhub.mla_attention(**arguments, return_lse=True, backend=kernel)[0]
            torch.cuda.set_sync_debug_mode("error")
        torch.cuda.set_sync_debug_mode("default")
        agrees(out, arguments)
