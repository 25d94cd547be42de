"""FlashInfer's kernels on the device, by the contracts of the ops.

Only what is built ahead runs (FLASHINFER_DISABLE_JIT=1), or compiling would take an hour; so heads are 128 wide. A
class whose kernel cannot run here is skipped with the reason.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

import kernelhub
from kernelhub.backends.flashinfer import kernels as records
from kernelhub.errors import KernelUnavailable
from kernelhub.ops.attention.cases import largest_value
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.testing import KernelCase
from tests.conftest import HAS_GPU
from tests.contract import mla_attention as mla
from tests.contract.attention import DenseContract, PagedContract, split
from tests.contract.concat import ConcatContract
from tests.contract.varied_attention import VariedContract, varied
from tests.gpu.test_attention_on_gpu import captured

pytestmark = pytest.mark.gpu

MODEL = AttentionModel("Llama 3.1 70B on 8 GPUs", 8, 1, 128, 128)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    monkeypatch.setenv("FLASHINFER_NO_DOWNLOAD", "1")


def reasons(selection: Any) -> str:
    return "; ".join(f"{d.kernel}: {d.rejections[0].reason}" for d in selection.decisions if d.rejections)[:300]


THREE = AttentionModel("three heads a group", 6, 2, 128, 128)
EIGHT = AttentionModel("eight heads a group", 16, 2, 128, 128)


class Wide(VariedContract):
    """The cases of a contract with heads of the width and the group that modules are built for."""

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        with mock.patch.dict(os.environ, {"FLASHINFER_DISABLE_JIT": "1"}):  # when cases are collected, too
            return super().accepted_cases() if HAS_GPU else []

    @pytest.fixture(autouse=True)
    def runs_here(self):
        selection = self.function().explain(**self.inputs(**self.plain), backend=self.kernel)
        if selection.selected != self.kernel:
            pytest.skip(f"{self.kernel} cannot run here, which leaves its contract unchecked: {reasons(selection)}")


class OneQuery(Wide, PagedContract):
    table = varied("paged_attention", model=THREE)
    rich: ClassVar = PagedContract.plain | {"window": (5, -1)}


class TestDecode(OneQuery):
    kernel = "flashinfer.fa2_decode"


class TestDecodeTensorCores(OneQuery):
    kernel = "flashinfer.fa2_decode_tc"
    table = varied("paged_attention", model=EIGHT)


class TestPrefill(Wide, PagedContract):
    kernel = "flashinfer.fa2_prefill"
    table = varied("paged_attention", model=THREE)


class TestPrefillHopper(Wide, PagedContract):
    kernel = "flashinfer.fa3_prefill"
    table = varied("paged_attention", model=THREE)
    rich: ClassVar = PagedContract.plain | {"q_lens": 3, "causal": True}


class TestXqa(OneQuery):
    kernel = "flashinfer.xqa"
    table = varied("paged_attention", model=EIGHT, inputs={"page_size": 64})


class WithSinks(Wide, PagedContract):
    """Every case with sinks, and with heads of 64, the one width."""

    table = varied("paged_attention", model=AttentionModel("narrow", 6, 2, 64, 64), features={"sinks": True})
    rich: ClassVar = PagedContract.plain | {"q_lens": 3, "causal": True}


class TestSinks(WithSinks):
    kernel = "flashinfer.fa2_sinks"


class TestSinksHopper(WithSinks):
    kernel = "flashinfer.fa3_sinks"


class TestRagged(Wide, DenseContract):
    kernel = "flashinfer.fa2_ragged"
    table = varied("attention", model=THREE)


class TestRaggedHopper(Wide, DenseContract):
    kernel = "flashinfer.fa3_ragged"
    table = varied("attention", model=THREE)


class TestConcat(ConcatContract):
    kernel = "flashinfer.concat"
    heads = 128

    @pytest.fixture(autouse=True)
    def runs_here(self):
        selection = self.selection()
        if selection.selected != self.kernel:
            pytest.skip(f"{self.kernel} cannot run here, which leaves its contract unchecked: {reasons(selection)}")


LATENT = ("flashinfer.mla_fa2", "flashinfer.mla_fa3")
WITHOUT_LSE = ("flashinfer.fa2_decode_tc", "flashinfer.fa2_prefill", "flashinfer.fa2_ragged", "flashinfer.mla_fa2")


class TestLatent:
    @pytest.mark.parametrize("kernel", LATENT)
    @pytest.mark.parametrize("heads", [16, 128])
    @pytest.mark.parametrize(
        "form",
        [
            {"seq_lens": (9000,)},
            {"seq_lens": (1, 513, 4096, 0, 2047)},
            {"seq_lens": (700, 3000, 64), "q_lens": 4},
            {"seq_lens": (700, 300, 64, 900), "q_lens": (1, 200, 0, 3)},
            {"seq_lens": (3, 8, 200), "q_lens": 6},
        ],
        ids=["one", "decode", "speculative", "ragged", "more queries than tokens"],
    )
    def test_numbers_are_those_of_the_reference(self, form, heads, kernel) -> None:
        arguments = mla_attention_inputs(num_heads=heads, device="cuda", **form)
        self.check(arguments, kernel)

    @pytest.mark.parametrize("kernel", LATENT)
    @pytest.mark.parametrize("change", [{"causal": False}, {"scale": -0.02}, {"scale": 0.0}, {"scale": 1e-4}], ids=str)
    def test_features_are_honoured(self, change, kernel) -> None:
        arguments = mla_attention_inputs(num_heads=16, device="cuda", seq_lens=(70, 300, 64), q_lens=4)
        self.check(arguments | change, kernel)

    def check(self, arguments: dict[str, Any], kernel: str) -> None:
        selection = kernelhub.mla_attention.explain(**arguments, backend=kernel)
        if selection.selected != kernel:
            pytest.skip(f"{kernel} cannot run here: {reasons(selection)}")
        has_lse = kernel not in WITHOUT_LSE
        got = kernelhub.mla_attention(**arguments, return_lse=has_lse, backend=kernel)
        out, lse = got if has_lse else (got, None)
        want, want_lse = kernelhub.mla_attention.reference(**arguments, return_lse=True)
        agreement = compare_out(out, want, mla.largest_value(arguments))
        assert agreement.ok, str(agreement)
        if lse is not None:
            assert compare_lse(lse, want_lse) <= lse_tolerance(out.dtype)


class TestNoLse:
    """Their contracts above run without an LSE: it is summed from weights rounded to half precision."""

    @pytest.mark.parametrize("kernel", WITHOUT_LSE)
    def test_it_is_refused_with_the_reason(self, kernel) -> None:
        op = next(record.op for record in records.KERNELS if record.name == kernel)
        selection = kernelhub.explain(op, device="H200", backend=kernel, lse=True)
        assert selection.selected != kernel
        (decision,) = [decision for decision in selection.decisions if decision.kernel == kernel]
        assert any("rounded to half precision" in item.reason for item in decision.rejections)


def runs(kernel: str, **changes: Any) -> dict[str, Any]:
    """A call of `paged_attention` that the kernel takes here."""
    arguments = paged_attention_inputs(MODEL, **{"page_size": 64, "device": "cuda"} | changes)
    selection = kernelhub.paged_attention.explain(**arguments, backend=kernel)
    if selection.selected != kernel:
        pytest.skip(f"{kernel} cannot run here: {reasons(selection)}")
    return arguments


def agrees(out: torch.Tensor, arguments: dict[str, Any]) -> None:
    args, kwargs = split(arguments)
    agreement = compare_out(out, kernelhub.paged_attention.reference(*args, **kwargs), largest_value(arguments))
    assert agreement.ok, str(agreement)


PLANNED = ("flashinfer.fa2_decode_tc", "flashinfer.fa2_prefill", "flashinfer.fa3_prefill")


class TestSteps:
    @pytest.mark.parametrize("kernel", [*PLANNED, "flashinfer.xqa"])
    def test_numbers_at_real_sizes(self, kernel) -> None:
        arguments = runs(kernel, seq_lens=(9000, 1, 513, 0, 4096, 64, 63, 65) * 16)
        agrees(kernelhub.paged_attention(**arguments, backend=kernel), arguments)

    @pytest.mark.parametrize("kernel", PLANNED[1:])
    def test_a_long_prefill(self, kernel) -> None:
        arguments = runs(kernel, seq_lens=(3000, 70, 500), q_lens=(3000, 1, 100))
        agrees(kernelhub.paged_attention(**arguments, backend=kernel), arguments)

    @pytest.mark.parametrize("kernel", PLANNED)
    def test_steps_may_be_planned_ahead_and_run_in_any_order(self, kernel) -> None:
        forms = (((700, 30), 108), ((5, 6000), 25), ((64, 64), 118), ((1, 2), 118))  # 120 pages in all
        calls = [runs(kernel, seq_lens=lens, spare_pages=spare) for lens, spare in forms]
        args, kwargs = split(calls[0])
        plan = kernelhub.paged_attention.prepare(*args, backend=kernel, **kwargs)
        for _ in range(3):
            steps = [plan.begin(call["block_table"], call["seq_lens"]) for call in calls]
            for step, call in reversed(list(zip(steps, calls, strict=True))):
                agrees(step.run(*(call[name] for name in ("q", "k_cache", "v_cache"))), call)

    def test_a_plan_for_a_graph_is_refused_with_a_remedy(self) -> None:
        kernel = "flashinfer.fa2_prefill"
        arguments = runs(kernel, seq_lens=(700, 30))
        args, kwargs = split(arguments)
        plan = kernelhub.paged_attention.prepare(*args, backend=kernel, **kwargs)
        lens = arguments["seq_lens"].tolist()
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(KernelUnavailable, match="choose a capture-safe"):
            plan.begin(*args[3:], seq_lens_cpu=lens).run(*args[:3])
        with (
            torch.cuda.graph(torch.cuda.CUDAGraph()),
            pytest.raises(KernelUnavailable, match="reads seq_lens on the host"),
        ):
            kernelhub.paged_attention(**arguments, backend=kernel)
        agrees(kernelhub.paged_attention(**arguments, backend=kernel), arguments)

    @pytest.mark.parametrize("kernel", PLANNED)
    def test_a_step_runs_on_another_stream_than_it_began_on(self, kernel) -> None:
        arguments = runs(kernel, seq_lens=(700, 30, 4000))
        args, kwargs = split(arguments)
        plan = kernelhub.paged_attention.prepare(*args, backend=kernel, **kwargs)
        side = torch.cuda.Stream()
        for _ in range(3):
            step = plan.begin(*args[3:])
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                out = step.run(*args[:3])
            torch.cuda.current_stream().wait_stream(side)
            agrees(out, arguments)

    @pytest.mark.parametrize("kernel", PLANNED)
    def test_with_lengths_on_the_host_nothing_waits_for_the_gpu(self, kernel) -> None:
        lens = (700, 30, 4000)
        arguments = runs(kernel, seq_lens=lens)
        args, kwargs = split(arguments)
        plan = kernelhub.paged_attention.prepare(*args, backend=kernel, **kwargs)
        for _ in range(2):
            plan.begin(*args[3:], seq_lens_cpu=lens).run(*args[:3])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(200_000_000)  # a tenth of a second
            end = torch.cuda.Event()
            end.record()
            out = plan.begin(*args[3:], seq_lens_cpu=lens).run(*args[:3])
            assert not end.query(), "the host waited for the device"
        finally:
            torch.cuda.set_sync_debug_mode("default")
        agrees(out, arguments)


class TestXqaGraphs:
    @pytest.mark.parametrize("sinks", [False, True])
    def test_a_captured_decode_reads_the_lengths_of_each_replay(self, sinks) -> None:
        kernel = "flashinfer.xqa"
        arguments = runs(kernel, seq_lens=(700, 700, 700))
        if sinks:
            arguments["sinks"] = torch.linspace(-1, 4, 8, device="cuda")
        out = torch.empty_like(arguments["q"])
        graph = captured(lambda: kernelhub.paged_attention(**arguments, backend=kernel, out=out))
        for seq_lens in ((700, 1, 16), (0, 333, 650)):
            arguments["seq_lens"].copy_(torch.tensor(seq_lens))
            arguments["block_table"].copy_(arguments["block_table"].flip(0))
            arguments["q"].normal_()
            out.fill_(torch.nan)
            graph.replay()
            agrees(out, arguments)


@pytest.mark.skipif(
    HAS_GPU and torch.cuda.get_device_capability()[0] < 10, reason="kernels for Blackwell, which `unsafe` would launch"
)
class TestTrtllm:
    """TensorRT-LLM's kernels, where there are a device for them and flashinfer-cubin."""

    @pytest.mark.parametrize("sinks", [False, True])
    @pytest.mark.parametrize(
        "form",
        [
            {"seq_lens": (9000, 1, 513, 4096)},
            {"seq_lens": (3000, 70, 500), "q_lens": (3000, 1, 100)},
            {"seq_lens": (40, 0, 9), "q_lens": (20, 3, 12)},
        ],
        ids=["decode", "prefill", "queries that see nothing"],
    )
    @pytest.mark.parametrize("kernel", ["flashinfer.trtllm_gen", "flashinfer.trtllm_context"])
    def test_paged(self, form, sinks, kernel) -> None:
        arguments = paged_attention_inputs(MODEL, page_size=64, device="cuda", **form)
        if sinks:
            arguments["sinks"] = torch.linspace(-1, 4, 8, device="cuda")
        if kernel == "flashinfer.trtllm_context":  # a known defect: NaN in the ends of pages reaches the result
            for name in ("k_cache", "v_cache"):
                arguments[name] = arguments[name].nan_to_num()
        with kernelhub.use(unsafe=True):
            selection = kernelhub.paged_attention.explain(**arguments, backend=kernel)
            if selection.selected != kernel:
                pytest.skip(f"{kernel} cannot run here: {reasons(selection)}")
            agrees(kernelhub.paged_attention(**arguments, backend=kernel), arguments)

    @pytest.mark.parametrize("causal", [False, True])
    def test_ragged(self, causal) -> None:
        kernel, model = "flashinfer.trtllm_ragged", AttentionModel("prefill", 16, 16, 192, 128)
        arguments = attention_inputs(model, q_lens=(2000, 0, 1, 700), kv_lens=(2000, 5, 300, 0), device="cuda")
        arguments["causal"] = causal
        selection = kernelhub.attention.explain(**arguments, backend=kernel)
        if selection.selected != kernel:
            pytest.skip(f"{kernel} cannot run here: {reasons(selection)}")
        args, kwargs = split(arguments)
        out = kernelhub.attention(**arguments, backend=kernel)
        agreement = compare_out(out, kernelhub.attention.reference(*args, **kwargs), largest_value(arguments))
        assert agreement.ok, str(agreement)

    @pytest.mark.parametrize("heads", [16, 64, 128])
    @pytest.mark.parametrize(
        "form",
        [
            {"seq_lens": (9000,)},
            {"seq_lens": (1, 513, 4096, 0, 2047)},
            {"seq_lens": (700, 3000, 64), "q_lens": 4},
            {"seq_lens": (700, 3000, 64), "topk": 128},
            {"seq_lens": (700, 3000, 64), "q_lens": (1, 200, 3), "topk": 2048},
        ],
        ids=["one", "decode", "speculative", "listed", "listed, ragged"],
    )
    @pytest.mark.parametrize("kernel", ["mla_trtllm", "mla_trtllm_listed", "mla_xqa"])
    def test_latent(self, form, heads, kernel) -> None:
        arguments = mla_attention_inputs(num_heads=heads, device="cuda", **form)
        selection = kernelhub.mla_attention.explain(**arguments, backend=f"flashinfer.{kernel}")
        if selection.selected != f"flashinfer.{kernel}":
            pytest.skip(f"{kernel} cannot run here: {reasons(selection)}")
        out = kernelhub.mla_attention(**arguments, backend=f"flashinfer.{kernel}")
        want = kernelhub.mla_attention.reference(**arguments)
        agreement = compare_out(out, want, mla.largest_value(arguments))
        assert agreement.ok, str(agreement)


@pytest.mark.skipif(
    HAS_GPU and torch.cuda.get_device_capability()[0] != 10, reason="kernels for sm_100 and sm_103 alone"
)
class TestCutlass:
    """CUTLASS's attention for Blackwell, where its modules are built."""

    @pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128)])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("causal", [False, True])
    def test_ragged(self, causal, dtype, widths) -> None:
        """Whose results lie where, and that nothing is written before them, is seen by a result in the middle."""
        kernel, model = "flashinfer.cutlass_ragged", AttentionModel("prefill", 16, 4, *widths)
        lengths = {"q_lens": (2000, 0, 1, 700, 5), "kv_lens": (2000, 5, 300, 0, 1000)}
        arguments = attention_inputs(model, dtype=dtype, device="cuda", **lengths) | {"causal": causal}
        selection = kernelhub.attention.explain(**arguments, backend=kernel)
        if selection.selected != kernel:
            pytest.skip(f"{kernel} cannot run here: {reasons(selection)}")
        args, kwargs = split(arguments)
        want, want_lse = kernelhub.attention.reference(*args, **kwargs, return_lse=True)
        tokens = arguments["q"].shape[0]
        whole = torch.full((tokens + 5000, 16, widths[1]), 7.0, dtype=dtype, device="cuda")
        _, lse = kernelhub.attention(**arguments, backend=kernel, return_lse=True, out=whole[2500:-2500])
        for out in (whole[2500:-2500], kernelhub.attention(**arguments, backend=kernel)):
            agreement = compare_out(out, want, largest_value(arguments))
            assert agreement.ok, str(agreement)
        assert compare_lse(lse, want_lse) <= lse_tolerance(dtype)
        assert (whole[:2500] == 7.0).all()
        assert (whole[-2500:] == 7.0).all()

    def test_more_tiles_than_the_library_has_room_for(self) -> None:
        kernel, lengths = "flashinfer.cutlass_ragged", [1] * 1100
        model = AttentionModel("many tiles", 128, 128, 64, 64)
        arguments = attention_inputs(model, q_lens=lengths, kv_lens=lengths, device="cuda")
        selection = kernelhub.attention.explain(**arguments, backend=kernel)
        if selection.selected != kernel:
            pytest.skip(f"{kernel} cannot run here: {reasons(selection)}")
        assert torch.equal(kernelhub.attention(**arguments, backend=kernel), arguments["v"]), "one key each"

    @pytest.mark.parametrize("factor", [1.0, -0.5, 1.8738], ids=["its own", "a power of two", "YaRN's"])
    @pytest.mark.parametrize("seq_lens", [(9000,), (1, 513, 4096, 0, 2047), (130,) * 200], ids=["one", "some", "many"])
    @pytest.mark.parametrize("page_size", [1, 48, 64])
    def test_latent(self, page_size, seq_lens, factor) -> None:
        """Ends of pages, and what no sequence has, hold NaN."""
        kernel = "flashinfer.mla_cutlass"
        arguments = mla_attention_inputs(num_heads=128, page_size=page_size, seq_lens=seq_lens, device="cuda")
        arguments["scale"] *= factor
        selection = kernelhub.mla_attention.explain(**arguments, backend=kernel)
        if selection.selected != kernel:
            pytest.skip(f"{kernel} cannot run here: {reasons(selection)}")
        out = kernelhub.mla_attention(**arguments, backend=kernel)
        agreement = compare_out(out, kernelhub.mla_attention.reference(**arguments), mla.largest_value(arguments))
        assert agreement.ok, str(agreement)


class TestDense:
    @pytest.mark.parametrize("kernel", ["flashinfer.fa2_ragged", "flashinfer.fa3_ragged"])
    @pytest.mark.parametrize("widths", [(128, 128), (192, 128)])
    def test_packed_sequences_at_real_sizes(self, widths, kernel) -> None:
        model = AttentionModel("prefill", 16, 16, *widths)
        arguments = attention_inputs(model, q_lens=(2000, 0, 1, 700), kv_lens=(2000, 5, 300, 700), device="cuda")
        selection = kernelhub.attention.explain(**arguments, backend=kernel)
        if selection.selected != kernel:
            pytest.skip(f"{kernel} cannot run here: {reasons(selection)}")
        args, kwargs = split(arguments)
        out = kernelhub.attention(**arguments, backend=kernel)
        agreement = compare_out(out, kernelhub.attention.reference(*args, **kwargs), largest_value(arguments))
        assert agreement.ok, str(agreement)
