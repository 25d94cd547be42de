"""FlashInfer's adapters keep the contracts of the ops, with a FlashInfer of torch that has its conventions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.backends.flashinfer import kernels as records
from kernelhub.backends.flashinfer.attention import _few_heads_share, _many_heads_share
from kernelhub.dispatch.constraint import OnDevice, Package, Takes, anything
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.errors import KernelUnavailable
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.models.shapes import AttentionModel
from tests.backends import flashinfer_fake as fake
from tests.contract import mla_attention as mla
from tests.contract.attention import DenseContract, PagedContract, split
from tests.contract.concat import ConcatContract
from tests.contract.varied_attention import VariedContract, varied
from tests.dispatch.backends import EVERYWHERE

_OF_THE_MACHINE = (
    "Module",
    "Cubins",
    "Products",
    "TorchBuilt",
    "RunsNvcc",
    "TakesOne",
    "CompilesForRows",
    "AnyOf",
    "CompilesTiles",
)


def _on_cpu(kernel: Kernel) -> Kernel:
    """The record without what it asks of the machine."""
    kept, fields = [], []
    for constraint in kernel.constraints:
        if isinstance(constraint, OnDevice | Package | Takes) or type(constraint).__name__ in _OF_THE_MACHINE:
            fields += constraint.fields
        else:
            kept.append(constraint)
    return dataclasses.replace(
        kernel, constraints=(*kept, anything("device", *fields)), band=Band.PLUGIN, standings=EVERYWHERE
    )


@functools.cache
def _all_on_cpu() -> tuple[Kernel, ...]:
    return tuple(map(_on_cpu, records.KERNELS))


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """The backend's records for a CPU, their adapters bound to the fake."""
    _ = HUB.settings
    HUB.remove_backend("flashinfer")
    module = types.SimpleNamespace(__name__="flashinfer on a CPU", BACKEND=records.BACKEND, KERNELS=_all_on_cpu())
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
    accepted: ClassVar[dict[type, list[Any]]] = {}

    @classmethod
    def accepted_cases(cls) -> list[Any]:
        if cls not in OnFake.accepted:
            _ = HUB.settings
            here = "flashinfer on a CPU" in {item.origin for item in HUB.registry.backends.values()}
            with contextlib.nullcontext() if here else on_cpu():
                OnFake.accepted[cls] = super().accepted_cases()  # type: ignore[misc]
                cls._accept_those_of_the_module()
        return OnFake.accepted[cls]

    @classmethod
    def _accept_those_of_the_module(cls) -> None:
        """While the backend is registered: what records say of a call is asked anew after each registration."""
        for other in vars(sys.modules[cls.__module__]).values():
            if not isinstance(other, type) or not issubclass(other, OnFake) or other in OnFake.accepted:
                continue
            if hasattr(other, "kernel") and hasattr(super(OnFake, other), "accepted_cases"):
                with contextlib.suppress(KernelUnavailable):  # said where the class is collected
                    OnFake.accepted[other] = super(OnFake, other).accepted_cases()  # type: ignore[misc]

    @pytest.fixture(autouse=True)
    def installed(self, clean_hub):
        with on_cpu():
            yield


class OneQuery(OnFake, PagedContract):
    rich: ClassVar = PagedContract.plain | {"window": (5, -1)}


class TestDecode(OneQuery):
    kernel = "flashinfer.fa2_decode"


class TestDecodeTensorCores(OneQuery):
    kernel = "flashinfer.fa2_decode_tc"
    model = AttentionModel("four heads a group", 8, 2, 64, 64)


class TestPrefill(OnFake, PagedContract):
    kernel = "flashinfer.fa2_prefill"


class TestPrefillHopper(OnFake, PagedContract):
    kernel = "flashinfer.fa3_prefill"


class TestXqa(OneQuery):
    kernel = "flashinfer.xqa"


class TestTrtllmGen(OneQuery):
    kernel = "flashinfer.trtllm_gen"


class TestTrtllmContext(OnFake, PagedContract):
    kernel = "flashinfer.trtllm_context"


class WithSinks(OnFake, VariedContract, PagedContract):
    """The cases with sinks, which every call of the kernels has."""

    table = varied("paged_attention", features={"sinks": True})
    rich: ClassVar = PagedContract.plain | {"q_lens": 3, "causal": True}


class TestSinks(WithSinks):
    kernel = "flashinfer.fa2_sinks"


class TestSinksHopper(WithSinks):
    kernel = "flashinfer.fa3_sinks"


class TestTrtllmRagged(OnFake, VariedContract, DenseContract):
    kernel = "flashinfer.trtllm_ragged"
    table = varied("attention", model=AttentionModel("two widths", 6, 2, 192, 128))

    def test_keys_of_sequences_without_queries_are_left_out(self) -> None:
        for causal in (False, True):
            arguments = self.inputs(q_lens=(3, 0, 40, 2, 0), kv_lens=(0, 9, 30, 50, 7), causal=causal)
            out = torch.full((*arguments["q"].shape[:2], 128), torch.nan, dtype=torch.bfloat16)
            self.check(self.run(arguments, out=out), arguments)
            assert self.run(arguments).isfinite().all()


class TestRagged(OnFake, DenseContract):
    kernel = "flashinfer.fa2_ragged"


class TestRaggedHopper(OnFake, DenseContract):
    kernel = "flashinfer.fa3_ragged"


@pytest.mark.parametrize(("kernel", "width"), [("fa2_ragged", 128), ("fa3_ragged", 128), ("trtllm_ragged", 192)])
class TestKeysOfNoSequence(OnFake):
    def test_what_follows_the_last_sequence_may_be_anything(self, kernel, width) -> None:
        model = AttentionModel("packed", 4, 4, width, 128)
        arguments = attention_inputs(model, q_lens=(3, 40, 2), kv_lens=(9, 50, 30))
        want = kernelhub.attention(**arguments, backend=f"flashinfer.{kernel}")
        assert want.isfinite().all()
        for name in ("k", "v"):
            arguments[name] = torch.cat([arguments[name], torch.full_like(arguments[name][:5], torch.nan)])
        assert torch.equal(kernelhub.attention(**arguments, backend=f"flashinfer.{kernel}"), want)


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


class TestWidthsWithSinks(OnFake):
    def test_a_second_width_is_refused_with_the_reason_and_spoils_nothing_for_the_first(self) -> None:
        sinks = torch.linspace(-1, 4, 8)
        asked = ((64, 1, "flashinfer.fa2_sinks"), (128, 1, "torch.blocked"), (64, 3, "flashinfer.fa2_sinks"))
        for width, queries, chosen in asked:
            model = AttentionModel("wide", 8, 2, width, width)
            args, kwargs = split(paged_attention_inputs(model, seq_lens=(40, 9), q_lens=queries))
            order = ("flashinfer.fa2_sinks", "torch.blocked")
            with kernelhub.use(paged_attention=order):
                plan = kernelhub.paged_attention.prepare(*args, sinks=sinks, **kwargs)
            assert plan.kernel == chosen
        with pytest.raises(kernelhub.errors.KernelhubError, match="does not include the width"):
            kernelhub.paged_attention(
                **paged_attention_inputs(AttentionModel("wide", 8, 2, 128, 128), seq_lens=(40, 9)),
                sinks=sinks,
                backend="flashinfer.fa2_sinks",
            )


class Latent(OnFake):
    """Latent attention of the one shape that its kernels take, which say no LSE."""

    kernel: ClassVar[str]
    page_sizes: ClassVar[tuple[int, ...]]
    heads: ClassVar[int] = 128
    check = mla.MlaContract.check

    def case(self, **changes: Any) -> dict[str, Any]:
        case = mla.Case("latent", {"page_size": 64} | changes, heads=self.heads, widths=(512, 64))
        return case.arguments("cpu")

    def run(self, arguments: dict[str, Any], **more: Any) -> Any:
        return kernelhub.mla_attention(**(arguments | more), backend=self.kernel)

    @pytest.mark.parametrize("seq_lens", [(40, 1, 77), (0, 30, 0), (700, 300)], ids=str)
    def test_matches_the_reference_in_float64(self, seq_lens) -> None:
        for page_size in self.page_sizes:
            arguments = self.case(seq_lens=seq_lens, page_size=page_size)
            out = torch.full((*arguments["q"].shape[:-1], 512), torch.nan, dtype=torch.bfloat16)
            assert self.run(arguments, out=out) is out
            self.check(out, arguments)

    @pytest.mark.parametrize("causal", [False, True])
    def test_one_query_sees_all_keys_causal_or_not(self, causal) -> None:
        arguments = self.case(seq_lens=(40, 9)) | {"causal": causal}
        self.check(self.run(arguments), arguments)

    @pytest.mark.parametrize("scale", [0.3, -0.3, 0.0, 1, 1e-4])
    def test_the_scale_may_have_any_sign(self, scale) -> None:
        arguments = self.case(seq_lens=(40, 9)) | {"scale": scale}
        self.check(self.run(arguments), arguments)

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.case(seq_lens=(40, 9))
        for name in ("q", "kv_cache"):
            wide = arguments[name].new_zeros((*arguments[name].shape[:-1], arguments[name].shape[-1] + 3))
            wide[..., 1:-2] = arguments[name]
            self.check(self.run(arguments | {name: wide[..., 1:-2]}), arguments)
        out = torch.empty(*arguments["q"].shape[:-1], 1024, dtype=torch.bfloat16)[..., ::2]
        self.check(self.run(arguments, out=out), arguments)

    def test_a_plan_reads_lengths_on_the_device_and_may_stand_in_graphs_of_decode(self) -> None:
        arguments = self.case(seq_lens=(40, 9))
        plan = kernelhub.mla_attention.prepare(**arguments, backend=self.kernel)
        assert not plan.reads_lengths
        assert plan.graph.name == "UNIFORM_DECODE"
        step = plan.begin(arguments["block_table"], arguments["seq_lens"])
        self.check(step.run(arguments["q"], arguments["kv_cache"]), arguments)

    @pytest.mark.parametrize(
        "facets",
        [
            {"lse": True},
            {"q_dtype": "float16", "kv_dtype": "float16"},
            {"sinks": True},
            {"ragged": True},
            {"sparse": True},
        ],
        ids=str,
    )
    def test_what_it_does_not_do_is_refused(self, facets) -> None:
        assert kernelhub.explain("mla_attention", device="cpu", backend=self.kernel, **facets).selected is None


class TestTrtllmLatent(Latent):
    kernel = "flashinfer.mla_trtllm"
    page_sizes = (32, 64)

    @pytest.mark.parametrize("heads", [16, 64, 128])
    @pytest.mark.parametrize("seq_lens", [(40, 5, 77), (3, 8, 0)], ids=str)
    def test_several_queries_see_the_keys_up_to_their_own(self, seq_lens, heads, monkeypatch) -> None:
        monkeypatch.setattr(type(self), "heads", heads)
        arguments = self.case(seq_lens=seq_lens, q_lens=4)
        self.check(self.run(arguments), arguments)

    def test_so_they_are_not_run_without_causality(self) -> None:
        for facets in ({"q_len": "few", "causal": False}, {"q_len": "many", "causal": True}, {"num_heads": 96}):
            assert kernelhub.explain("mla_attention", device="cpu", backend=self.kernel, **facets).selected is None


class TestListed(OnFake):
    """The contract of latent attention to listed tokens, for the shape that its kernel takes, without an LSE."""

    kernel = "flashinfer.mla_trtllm_listed"
    check = mla.MlaContract.check
    forms: ClassVar[dict[str, dict[str, Any]]] = {
        "decode": {"seq_lens": (40, 1, 77)},
        "uniform": {"seq_lens": (40, 5, 77), "q_lens": 4},
        "ragged": {"seq_lens": (40, 9, 77, 0, 3), "q_lens": (1, 9, 20, 0, 5)},
        "empty sequences": {"seq_lens": (0, 30, 0)},
    }

    def case(self, form: str, topk: int, **changes: Any) -> dict[str, Any]:
        inputs = self.forms[form] | {"topk": topk, "page_size": 32}
        return mla.Case(form, inputs, heads=64, widths=(512, 64), **changes).arguments("cpu")

    def run(self, arguments: dict[str, Any], **more: Any) -> Any:
        return kernelhub.mla_attention(**(arguments | more), backend=self.kernel)

    @pytest.mark.parametrize("topk", [0, 1, 20, 130])
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("form", forms)
    def test_matches_the_reference_in_float64(self, form, causal, topk) -> None:
        arguments = self.case(form, topk, causal=causal)
        out = torch.full((*arguments["q"].shape[:-1], 512), torch.nan, dtype=torch.bfloat16)
        assert self.run(arguments, out=out) is out
        self.check(out, arguments)

    def test_positions_that_a_query_does_not_see_are_passed_over(self) -> None:
        arguments = self.case("uniform", 30)
        want, listed = self.run(arguments), arguments["topk_indices"]
        nothing = torch.full_like(listed, -1)
        lengths = arguments["seq_lens"].view(-1, 1, 1)
        foreign = torch.cat([nothing - 7, listed, lengths.expand_as(listed), nothing + (1 << 30)], 2)
        got = self.run(arguments | {"topk_indices": foreign})
        self.check(got, arguments)
        assert torch.equal(got, want)

    @pytest.mark.parametrize("scale", [0.3, -0.3, 0.0, 1e-4])
    def test_the_scale_may_have_any_sign(self, scale) -> None:
        arguments = self.case("uniform", 20) | {"scale": scale}
        self.check(self.run(arguments), arguments)

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.case("uniform", 20)
        for name in ("q", "kv_cache", "topk_indices", "block_table"):
            wide = arguments[name].new_zeros((*arguments[name].shape[:-1], arguments[name].shape[-1] + 3))
            wide[..., 1:-2] = arguments[name]
            self.check(self.run(arguments | {name: wide[..., 1:-2]}), arguments)
        out = torch.empty(*arguments["q"].shape[:-1], 1024, dtype=torch.bfloat16)[..., ::2]
        self.check(self.run(arguments, out=out), arguments)

    def test_tokens_past_the_block_table_mean_no_token(self) -> None:
        """On a GPU lengths are not looked at: no entry is asked for that a row of the table does not have."""
        arguments = self.case("decode", 60)
        within = {"block_table": arguments["block_table"][:, :1], "seq_lens": arguments["seq_lens"].clamp(max=32)}
        plan = kernelhub.mla_attention.prepare(**arguments | within, backend=self.kernel)
        step, out = PagedStep(within["block_table"], arguments["seq_lens"]), torch.empty(3, 64, 512).bfloat16()
        operands = (arguments["q"], arguments["kv_cache"], arguments["topk_indices"])
        plan.adapter.launch(*operands, step, MlaValues(arguments["scale"]), out, None)
        self.check(out, arguments | within)

    def test_tokens_of_no_sequence_are_left_as_they_are(self) -> None:
        arguments = self.case("ragged", 20)
        more = {name: torch.cat([arguments[name], arguments[name][:4]]) for name in ("q", "topk_indices")}
        out = torch.full((*more["q"].shape[:-1], 512), 7.0, dtype=torch.bfloat16)
        self.run(arguments | more, out=out)
        assert (out[-4:] == 7.0).all()
        self.check(out[:-4], arguments)

    def test_without_lists_it_is_refused(self) -> None:
        assert kernelhub.explain("mla_attention", device="cpu", backend=self.kernel).selected is None
        for facets in ({"lse": True}, {"num_heads": 16}, {"page_size": 16}):
            selection = kernelhub.explain("mla_attention", device="cpu", backend=self.kernel, sparse=True, **facets)
            assert selection.selected is None


class TestXqaLatent(Latent):
    kernel = "flashinfer.mla_xqa"
    page_sizes = (16, 32, 64, 128)


@pytest.mark.parametrize("kernel", ["flashinfer.mla_fa2", "flashinfer.mla_fa3"])
class TestFlashLatent(OnFake):
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
        has_lse = "lse" in next(record.features for record in records.KERNELS if record.name == kernel)
        got = self.run(kernel, arguments, out=out, return_lse=has_lse)
        assert (got[0] if has_lse else got) is out
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


class TestLse(OnFake):
    """FlashAttention-2's kernels sum weights that were rounded to half precision, and say no LSE."""

    @pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize(
        ("op", "kernel"),
        [
            ("paged_attention", "fa2_decode_tc"),
            ("paged_attention", "fa2_prefill"),
            ("attention", "fa2_ragged"),
            ("mla_attention", "mla_fa2"),
        ],
    )
    def test_it_is_refused_with_the_reason(self, op, kernel, q_dtype) -> None:
        selection = kernelhub.explain(op, device="cpu", backend=f"flashinfer.{kernel}", lse=True, q_dtype=q_dtype)
        (decision,) = [decision for decision in selection.decisions if decision.kernel == f"flashinfer.{kernel}"]
        assert any("rounded to half precision" in item.reason for item in decision.rejections)


class TestSoftcap(OnFake):
    """Its tanh is an approximate one."""

    @pytest.mark.parametrize("kernel", ["fa2_decode", "fa3_prefill", "fa3_ragged"])
    def test_it_is_too_inexact_for_an_lse_and_for_float16(self, kernel) -> None:
        op = next(record.op for record in records.KERNELS if record.name == f"flashinfer.{kernel}")
        facets = {"num_q_heads": 8, "num_kv_heads": 4, "head_dim_qk": 128, "softcap": True}
        asked: dict[str, Any] = {"device": "cpu", "backend": f"flashinfer.{kernel}"}
        assert kernelhub.explain(op, **asked, **facets).selected == f"flashinfer.{kernel}"
        for more, what in (({"lse": True}, "an LSE"), ({"q_dtype": "float16"}, "float16")):
            selection = kernelhub.explain(op, **asked, **facets, **more)
            assert selection.selected is None
            (decision,) = [decision for decision in selection.decisions if decision.kernel == f"flashinfer.{kernel}"]
            assert any(f"too inexact for {what}" in item.reason for item in decision.rejections)


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
        monkeypatch.setattr("kernelhub.backends.flashinfer.steps._MOST_BYTES", 512 << 20)
        monkeypatch.setattr(fake, "SMALL_SCRATCH", 500 << 20)
        arguments = paged(seq_lens=(40, 9))
        TestPrefill().check(kernelhub.paged_attention(**arguments, backend="flashinfer.fa2_prefill"), arguments)
        monkeypatch.setattr(fake, "SMALL_SCRATCH", 5 << 30)
        with pytest.raises(RuntimeError, match="workspace buffer size"):
            kernelhub.paged_attention(**paged(seq_lens=(40, 9, 3)), backend="flashinfer.fa2_prefill")

    def test_a_wrapper_whose_plan_failed_serves_the_next(self, monkeypatch) -> None:
        monkeypatch.setattr("kernelhub.backends.flashinfer.steps._MOST_BYTES", 256 << 20)
        monkeypatch.setattr(fake, "SMALL_SCRATCH", 5 << 30)
        arguments = paged(seq_lens=(40, 9))
        for _ in range(3):
            with pytest.raises(RuntimeError, match="workspace buffer size"):
                kernelhub.paged_attention(**arguments, backend="flashinfer.fa2_decode_tc")
        monkeypatch.setattr(fake, "SMALL_SCRATCH", 0)
        made = len(fake.WRAPPERS)
        TestPrefill().check(kernelhub.paged_attention(**arguments, backend="flashinfer.fa2_decode_tc"), arguments)
        assert len(fake.WRAPPERS) == made

    def test_what_it_takes_of_the_device_is_reported(self) -> None:
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
