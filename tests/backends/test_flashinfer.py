"""FlashInfer's adapters keep the contracts of the ops, with a FlashInfer of torch that has its conventions."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.backends.flashinfer import kernels as records
from kernelhub.backends.flashinfer.attention.kernels import _few_heads_share, _many_heads_share
from kernelhub.dispatch.constraint import OnDevice, Package, Takes, anything
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.ops.attention.inputs import AttentionModel, paged_attention_inputs
from tests.backends import flashinfer_fake as fake
from tests.contract import mla_attention as mla
from tests.contract.attention import Case, Contract, DenseContract, PagedContract, split
from tests.contract.concat import ConcatContract

_OF_THE_MACHINE = ("Module", "Cubins", "Products", "Cuda", "RunsNvcc", "TakesOne")


def _on_cpu(kernel: Kernel) -> Kernel:
    """The record without what it asks of the machine."""
    kept, fields = [], []
    for constraint in kernel.constraints:
        if isinstance(constraint, OnDevice | Package | Takes) or type(constraint).__name__ in _OF_THE_MACHINE:
            fields += constraint.fields
        else:
            kept.append(constraint)
    return dataclasses.replace(kernel, constraints=(*kept, anything("device", *fields)), band=Band.PLUGIN)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """The backend's records for a CPU, their adapters bound to the fake."""
    _ = HUB.settings
    HUB.remove_backend("flashinfer")
    module = types.SimpleNamespace(
        __name__="flashinfer on a CPU", BACKEND=records.BACKEND, KERNELS=tuple(map(_on_cpu, records.KERNELS))
    )
    handle = kernelhub.register_backend(module)
    try:
        with fake.installed():
            yield
    finally:
        handle.remove()
        HUB.restore()


class OnFake:
    """A contract on a CPU. Its cases are collected with the backend registered so, too."""

    device: ClassVar[str] = "cpu"

    @classmethod
    def accepted_cases(cls) -> list[Any]:
        _ = HUB.settings
        if "flashinfer on a CPU" in {item.origin for item in HUB.registry.backends.values()}:
            return super().accepted_cases()  # type: ignore[misc]
        with on_cpu():
            return super().accepted_cases()  # type: ignore[misc]

    @pytest.fixture(autouse=True)
    def installed(self, clean_hub):
        with on_cpu():
            yield


class OneQuery(OnFake, Contract):
    @classmethod
    def record(cls) -> Kernel:
        """Without causality, which changes nothing for one query."""
        record = super().record()
        return dataclasses.replace(record, features=record.features - {"causal"})

    several = PagedContract.plain
    rich = Case("rich", {"seq_lens": (40, 9, 77)}, features=("window_left",))


class TestDecode(OneQuery, PagedContract):
    kernel = "flashinfer.fa2_decode"
    fewest_cases = 18


class TestDecodeTensorCores(OneQuery, PagedContract):
    kernel = "flashinfer.fa2_decode_tc"
    fewest_cases = 5

    @classmethod
    def inputs(cls, case: Case) -> dict[str, Any]:
        return super().inputs(dataclasses.replace(case, heads=(8, 2) if case.heads == (6, 2) else case.heads))


class TestPrefill(OnFake, PagedContract):
    kernel = "flashinfer.fa2_prefill"
    fewest_cases = 40


class TestPrefillHopper(OnFake, PagedContract):
    kernel = "flashinfer.fa3_prefill"
    fewest_cases = 30


class TestXqa(OneQuery, PagedContract):
    kernel = "flashinfer.xqa"
    fewest_cases = 12


class TestTrtllmGen(OneQuery, PagedContract):
    kernel = "flashinfer.trtllm_gen"
    fewest_cases = 8


class TestRagged(OnFake, DenseContract):
    kernel = "flashinfer.fa2_ragged"
    fewest_cases = 30


class TestRaggedHopper(OnFake, DenseContract):
    kernel = "flashinfer.fa3_ragged"
    fewest_cases = 25


class TestConcat(OnFake, ConcatContract):
    kernel = "flashinfer.concat"
    heads = 128


LATENT = {
    "decode": {"seq_lens": (40, 1, 77)},
    "uniform": {"seq_lens": (40, 5, 77), "q_lens": 4},
    "ragged": {"seq_lens": (40, 9, 77, 0, 3), "q_lens": (1, 9, 20, 0, 5)},
    "empty sequences": {"seq_lens": (0, 30, 0)},
    "more queries than tokens": {"seq_lens": (3, 8), "q_lens": 6},
    "page 1": {"seq_lens": (40, 1, 77), "page_size": 1},
}


@pytest.mark.parametrize("kernel", ["flashinfer.mla_fa2", "flashinfer.mla_fa3"])
class TestLatent(OnFake):
    """The contract of latent attention, for the one width that the records take."""

    check = mla.MlaContract.check

    def case(self, form: str, **changes: Any) -> dict[str, Any]:
        return mla.Case(form, LATENT[form], heads=3, widths=(512, 64), **changes).arguments("cpu")

    def run(self, kernel: str, arguments: dict[str, Any], **more: Any) -> Any:
        return kernelhub.mla_attention(**(arguments | more), backend=kernel)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("form", LATENT)
    def test_matches_the_reference_in_float64(self, form, causal, dtype, kernel) -> None:
        arguments = self.case(form, causal=causal, dtype=dtype)
        out = torch.full((*arguments["q"].shape[:-1], 512), torch.nan, dtype=dtype)
        got = self.run(kernel, arguments, out=out, return_lse=True)
        assert got[0] is out
        self.check(got, arguments)

    @pytest.mark.parametrize("scale", [0.3, -0.3, 0.0, 1, 1e-4])
    def test_the_scale_may_have_any_sign(self, scale, kernel) -> None:
        arguments = self.case("uniform") | {"scale": scale}
        self.check(self.run(kernel, arguments), arguments)

    def test_operands_may_have_any_strides(self, kernel) -> None:
        arguments = self.case("uniform")
        for name in ("q", "kv_cache"):
            wide = arguments[name].new_zeros((*arguments[name].shape[:-1], arguments[name].shape[-1] + 3))
            wide[..., 1:-2] = arguments[name]
            moved = arguments | {name: wide[..., 1:-2]}
            self.check(self.run(kernel, moved), arguments)
        out = torch.empty(*arguments["q"].shape[:-1], 1024, dtype=torch.bfloat16)[..., ::2]
        self.check(self.run(kernel, arguments, out=out), arguments)

    def test_tokens_of_no_sequence_are_left_as_they_are(self, kernel) -> None:
        arguments = self.case("ragged")
        q = torch.cat([arguments["q"], arguments["q"][:4]])
        out = torch.full((*q.shape[:-1], 512), 7.0, dtype=q.dtype)
        self.run(kernel, arguments | {"q": q}, out=out)
        assert (out[-4:] == 7.0).all()
        self.check(out[:-4], arguments)


MODEL = AttentionModel("grouped", 8, 2, 64, 64)


def paged(**form: Any) -> dict[str, Any]:
    return paged_attention_inputs(MODEL, **form)


class TestPlans(OnFake):
    """What a step's plan is made of, and whose it is."""

    def test_layers_of_a_step_share_a_plan(self) -> None:
        args, kwargs = split(paged(seq_lens=(40, 9)))
        plan = kernelhub.paged_attention.prepare(*args, backend="flashinfer.fa2_prefill", **kwargs)
        step = plan.begin(*args[3:])
        for _ in range(5):
            step.run(*args[:3])
        assert [wrapper.plans for wrapper in fake.WRAPPERS] == [1]

    def test_once_its_values_are_known_a_step_is_planned_when_it_begins(self) -> None:
        args, kwargs = split(paged(seq_lens=(40, 9)))
        plan = kernelhub.paged_attention.prepare(*args, backend="flashinfer.fa2_prefill", **kwargs)
        plan.begin(*args[3:]).run(*args[:3])
        step = plan.begin(*args[3:])
        assert sum(wrapper.plans for wrapper in fake.WRAPPERS) == 2
        step.run(*args[:3])
        assert sum(wrapper.plans for wrapper in fake.WRAPPERS) == 2

    def test_steps_that_live_at_once_have_wrappers_of_their_own(self) -> None:
        calls = [paged(seq_lens=lens, spare_pages=spare) for lens, spare in (((40, 9), 4), ((3, 70), 2), ((1, 1), 6))]
        args, kwargs = split(calls[0])
        plan = kernelhub.paged_attention.prepare(*args, backend="flashinfer.fa2_decode_tc", **kwargs)
        for _ in range(3):
            steps = [plan.begin(call["block_table"], call["seq_lens"]) for call in calls]
            for step, call in zip(steps[::-1], calls[::-1], strict=True):
                got = step.run(call["q"], call["k_cache"], call["v_cache"])
                TestPrefill().check(got, call)
            del step, steps
        assert len(fake.WRAPPERS) == 3, "wrappers go from step to step"

    def test_layers_that_differ_in_a_value_have_plans_of_their_own(self) -> None:
        arguments = paged(seq_lens=(40, 90), q_lens=3)
        for scale in (0.1, 0.2):
            for window in (3, 20):
                got = kernelhub.paged_attention(**arguments, scale=scale, window=window, backend="flashinfer")
                TestPrefill().check(got, arguments | {"scale": scale, "window": window})

    def test_scratch_that_is_too_small_is_made_larger(self, monkeypatch) -> None:
        monkeypatch.setattr(fake, "SMALL_SCRATCH", 500 << 20)
        arguments = paged(seq_lens=(40, 9))
        TestPrefill().check(kernelhub.paged_attention(**arguments, backend="flashinfer.fa2_prefill"), arguments)
        monkeypatch.setattr(fake, "SMALL_SCRATCH", 5 << 30)
        with pytest.raises(RuntimeError, match="workspace buffer size"):
            kernelhub.paged_attention(**paged(seq_lens=(40, 9, 3)), backend="flashinfer.fa2_prefill")

    def test_a_wrapper_whose_plan_failed_serves_the_next(self, monkeypatch) -> None:
        monkeypatch.setattr(fake, "SMALL_SCRATCH", 5 << 30)
        arguments = paged(seq_lens=(40, 9))
        for _ in range(3):
            with pytest.raises(RuntimeError, match="workspace buffer size"):
                kernelhub.paged_attention(**arguments, backend="flashinfer.fa2_decode_tc")
        monkeypatch.setattr(fake, "SMALL_SCRATCH", 0)
        made = len(fake.WRAPPERS)
        TestPrefill().check(kernelhub.paged_attention(**arguments, backend="flashinfer.fa2_decode_tc"), arguments)
        assert len(fake.WRAPPERS) == made

    def test_what_it_takes_of_the_device_is_told(self) -> None:
        args, kwargs = split(paged(seq_lens=(40, 9)))
        plan = kernelhub.paged_attention.prepare(*args, backend="flashinfer.fa2_prefill", **kwargs)
        assert plan.adapter.workspace_bytes(2, 2, 40) == (128 + 8) << 20

    def test_a_plan_says_that_it_reads_lengths_and_stands_in_no_graph(self) -> None:
        args, kwargs = split(paged(seq_lens=(40, 9)))
        plan = kernelhub.paged_attention.prepare(*args, backend="flashinfer.fa2_prefill", **kwargs)
        assert plan.reads_lengths
        assert plan.graph.name == "NONE"

    def test_one_query_is_for_cuda_cores_or_tensor_cores(self) -> None:
        for heads in (1, 2, 3, 4, 8, 16):
            problem = types.SimpleNamespace(num_q_heads=heads * 2, num_kv_heads=2)
            assert (_few_heads_share(problem) is None) != (_many_heads_share(problem) is None)
