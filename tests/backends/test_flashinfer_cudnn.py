"""FlashInfer's calls of cuDNN keep the contracts of attention, with a model of the library that keeps its graphs."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.backends.flashinfer import cudnn as records
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.errors import NoKernel, NotWarmed
from kernelhub.ops.attention.cases import largest_value
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.models.shapes import AttentionModel
from tests.backends.fake import flashinfer_cudnn as fake
from tests.backends.test_flashinfer import OneQuery, OnFake
from tests.contract.attention import DenseContract, PagedContract, split
from tests.contract.varied_attention import VariedContract, varied, with_finite_ends

MODEL = AttentionModel("wide", 4, 2, 128, 128)
LIBRARY = "kernelhub.backends.flashinfer.cudnn.library"


class TestDecode(OneQuery):
    kernel = "flashinfer.cudnn_decode"
    model = MODEL
    rich = PagedContract.plain


class TestPrefill(OnFake, VariedContract, PagedContract):
    kernel = "flashinfer.cudnn_prefill"
    model = MODEL
    table = varied("paged_attention", change=with_finite_ends)
    rich: ClassVar = PagedContract.plain | {"q_lens": 3, "causal": True}


class TestRagged(OnFake, DenseContract):
    kernel = "flashinfer.cudnn_ragged"
    model = MODEL


class TestGraphs(OnFake):
    """What the library keeps, and what it was told of."""

    ragged: ClassVar[dict[str, Any]] = {"q_lens": (9, 40, 2), "kv_lens": (9, 50, 30)}

    @pytest.fixture(autouse=True)
    def none_kept(self) -> Iterator[None]:
        fake.GRAPHS.clear()
        yield
        fake.GRAPHS.clear()

    def run(self, kernel: str, arguments: dict[str, Any], **more: Any) -> Any:
        args, kwargs = split(arguments)
        op = kernelhub.attention if "k" in arguments else kernelhub.paged_attention
        return op(*args, backend=f"flashinfer.{kernel}", **kwargs, **more)

    def test_calls_of_one_class_of_sizes_share_a_graph(self) -> None:
        for q_lens in ((9, 40, 2), (1, 1, 1), (100, 7, 3, 3)):
            self.run("cudnn_ragged", attention_inputs(MODEL, q_lens=q_lens))
        assert len(fake.GRAPHS) == 1
        fake.GRAPHS.clear()
        cache = with_finite_ends(paged_attention_inputs(MODEL, seq_lens=(100, 60, 3, 120)))
        for rows in ((0, 1, 2, 3), (3, 1, 0)):
            step = {name: cache[name][list(rows)] for name in ("q", "block_table", "seq_lens")}
            for kernel in ("cudnn_decode", "cudnn_prefill"):
                self.run(kernel, cache | step)
        assert len(fake.GRAPHS) == 2

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("kernel", ["cudnn_ragged", "cudnn_prefill", "cudnn_decode"])
    def test_autocast_changes_nothing(self, kernel: str, dtype: torch.dtype) -> None:
        arguments = attention_inputs(MODEL, **self.ragged)
        if kernel != "cudnn_ragged":
            arguments = with_finite_ends(paged_attention_inputs(MODEL, seq_lens=(100, 60, 3)))
        want = self.run(kernel, arguments)
        with torch.autocast("cpu", dtype):
            assert torch.equal(self.run(kernel, arguments).float(), want.float())

    def test_a_new_class_is_reported_and_refused_once_sealed(self) -> None:
        known, new = (attention_inputs(MODEL, q_lens=(most, 7)) for most in (100, 300))
        self.run("cudnn_ragged", known)
        told = [(item.kind, item.by, item.op, item.kernel) for item in kernelhub.report().work]
        assert told == [("compile", "flashinfer", "attention", "flashinfer.cudnn_ragged")]
        with kernelhub.seal():
            self.run("cudnn_ragged", known)
            with pytest.raises(NotWarmed, match="compile cuDNN's graph"):
                self.run("cudnn_ragged", new)
        assert len(fake.GRAPHS) == 1
        self.run("cudnn_ragged", new)
        with kernelhub.seal():
            self.run("cudnn_ragged", new)

    @pytest.mark.parametrize("kernel", ["cudnn_ragged", "cudnn_prefill"])
    def test_an_lse_of_older_releases_is_natural_too(self, kernel, monkeypatch) -> None:
        if kernel == "cudnn_ragged":
            arguments = attention_inputs(MODEL, **self.ragged)
        else:
            arguments = with_finite_ends(paged_attention_inputs(MODEL, seq_lens=(9, 50, 30), q_lens=(9, 40, 2)))
        for name, older in (("ragged", {"NATURAL": {}}), ("paged", {"NATURAL": {}}), ("packed", {"TAKES_BASE": False})):
            module = importlib.import_module(f"kernelhub.backends.flashinfer.cudnn.{name}")
            for constant, value in older.items():
                monkeypatch.setattr(module, constant, value)
        with fake.of_0_6():
            out, lse = self.run(kernel, arguments, return_lse=True)
        args, kwargs = split(arguments)
        op = kernelhub.attention if kernel == "cudnn_ragged" else kernelhub.paged_attention
        want, want_lse = op.reference(*args, return_lse=True, **kwargs)
        assert compare_out(out, want, largest_value(arguments)).ok
        assert compare_lse(lse, want_lse) <= lse_tolerance(out.dtype)

    @pytest.mark.parametrize(
        "change",
        [
            lambda cache: {"scale": 0.3},
            lambda cache: {name: torch.stack([cache[name], cache[name]], 1)[:, 0] for name in ("k_cache", "v_cache")},
            lambda cache: {name: cache[name].half() for name in ("q", "k_cache", "v_cache")},
        ],
        ids=["factor", "strides", "dtype"],
    )
    def test_older_releases_answer_by_a_graph_that_was_made_for_something_else(self, change) -> None:
        """Which is why they are known to be bad; and 0.7.1 and later do not."""
        cache = with_finite_ends(paged_attention_inputs(MODEL, seq_lens=(100, 60, 3, 120)))
        changed = cache | change(cache)
        args, kwargs = split(changed)
        want = kernelhub.paged_attention.reference(*args, **kwargs)

        def right(out: torch.Tensor) -> bool:
            return bool(compare_out(out, want, largest_value(changed)).ok)

        self.run("cudnn_decode", cache)
        assert right(self.run("cudnn_decode", changed))
        with fake.of_0_6():
            fake.GRAPHS.clear()
            self.run("cudnn_decode", cache)
            assert not right(self.run("cudnn_decode", changed))

    def test_nan_in_the_unused_end_of_a_page_reaches_the_result(self) -> None:
        poisoned = paged_attention_inputs(MODEL, seq_lens=(40, 200, 128, 0))
        want = self.run("cudnn_prefill", with_finite_ends(poisoned))
        assert want.isfinite().all()
        got = self.run("cudnn_prefill", poisoned)
        assert got.isnan().any(2).any(1).tolist() == [True, True, False, False]
        assert torch.equal(got[2:], want[2:])

    def test_tokens_past_the_last_offset_are_left_alone(self) -> None:
        arguments = attention_inputs(MODEL, **self.ragged)
        arguments["q"] = torch.cat([arguments["q"], arguments["q"][:3]])
        for out in (torch.full((54, 4, 128), -777.0).bfloat16(), torch.full((54, 5, 128), -777.0).bfloat16()[:, :4]):
            self.run("cudnn_ragged", arguments, out=out)
            assert (out[-3:] == -777.0).all()
            assert (out[:-3] != -777.0).all()

    def test_without_a_frontend_or_with_an_old_cudnn_it_gives_way_with_its_reason(self, monkeypatch) -> None:
        arguments = attention_inputs(MODEL, **self.ragged)
        library = importlib.import_module(LIBRARY)
        for name, value, reason in (
            ("CUDNN_AVAILABLE", False, "would run other kernels instead"),
            ("cudnn", fake_cudnn(90700), "cuDNN is 90700, 91900 is needed"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(library, name, value)
                with pytest.raises(NoKernel, match=reason):
                    self.run("cudnn_ragged", arguments)
            HUB.machine.forget()


def fake_cudnn(version: int) -> Any:
    return types.SimpleNamespace(backend_version=lambda: version)


class TestRecords:
    @pytest.mark.parametrize(
        ("packages", "facets", "code"),
        [
            ({"flashinfer": "0.7.2.post1"}, {}, "package_missing"),
            ({"flashinfer": "0.7.2.post1", "cudnn": "1.31.0"}, {}, "package_version"),
            ({"flashinfer": "0.7.2.post1", "cudnn": "1.32.0"}, {"head_dim_qk": 64}, "value"),
            ({"flashinfer": "0.7.2.post1", "cudnn": "1.32.0"}, {"window_left": True}, "feature"),
            ({"flashinfer": "0.7.0", "cudnn": "1.32.0"}, {}, "known_bad"),
        ],
        ids=str,
    )
    def test_its_rejection_is_reported(self, packages, facets, code) -> None:
        machine = SimulatedMachine({"triton": "3.7.1"} | packages)
        for kernel in records.KERNELS:
            selection = kernelhub.explain(kernel.op, device="H200", machine=machine, **facets)
            decision = next(item for item in selection.decisions if item.kernel == kernel.name)
            assert code in {rejection.code for rejection in decision.rejections}, kernel.name

    def test_packed_sequences_are_taken_from_0_7_1_on_where_they_are_requested(self) -> None:
        machine = SimulatedMachine({"triton": "3.7.1", "flashinfer": "0.7.1", "cudnn": "1.32.0"})
        asked = {"device": "H200", "machine": machine, "ragged": True, "causal": True}
        selection = kernelhub.explain("attention", backend="flashinfer.cudnn_ragged", **asked)
        assert selection.selected == "flashinfer.cudnn_ragged"
        assert kernelhub.explain("attention", **asked).selected == "gluon.prefill_pipelined"
        with kernelhub.use(disable="gluon.prefill_pipelined"):
            assert kernelhub.explain("attention", **asked).selected == "flashinfer.fa3_ragged"
        elsewhere = kernelhub.explain("attention", backend="flashinfer.cudnn_ragged", **asked | {"device": "B200"})
        assert elsewhere.selected is None
