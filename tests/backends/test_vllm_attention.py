"""vLLM's builds of FlashAttention: their adapters keep the contracts, given operators that keep their own word."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.backends.flash_attn import vllm_builds
from kernelhub.backends.flash_attn import vllm_libraries as libraries
from kernelhub.backends.shared.operators import mismatch
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.ops.attention.cases import largest_value
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out
from kernelhub.ops.models.shapes import AttentionModel
from tests.backends import vllm_attention_fakes as fakes
from tests.backends.flash_attn_numbers import WINDOWS
from tests.contract.attention import DenseContract, PagedContract
from tests.contract.few import check_few_cases
from tests.contract.test_liars import failures
from tests.dispatch.backends import OF_TRUST

MODEL = AttentionModel("grouped", 6, 2, 64, 64)


@pytest.fixture
def on_the_cpu(clean_hub):
    with fakes.on_the_cpu():
        yield


@pytest.mark.parametrize("variant", ["fa3", "fa2"])
@pytest.mark.parametrize("contract", [DenseContract, PagedContract], ids=["dense", "paged"])
def test_each_feature_is_right(on_the_cpu, variant, contract) -> None:
    check_few_cases(contract, f"fake.{variant}")


@pytest.mark.parametrize("variant", ["fa3", "fa2"])
@pytest.mark.parametrize(("contract", "fewest"), [(DenseContract, 30), (PagedContract, 30)], ids=["dense", "paged"])
def test_the_adapter_keeps_the_contract(on_the_cpu, variant, contract, fewest) -> None:
    name = f"fake.{variant}"
    subject = type("Subject", (contract,), {"kernel": name, "device": "cpu"})
    assert len(subject.accepted_cases()) >= fewest
    assert failures(contract, name, "cpu") == []


@pytest.mark.parametrize("variant", ["fa3", "fa2"])
@pytest.mark.parametrize("op", ["attention", "paged_attention"])
def test_tokens_past_the_last_sequence_are_left_as_they_are(on_the_cpu, variant, op) -> None:
    if op == "attention":
        arguments = attention_inputs(MODEL, q_lens=(17, 3), kv_lens=(17, 30))
    else:
        arguments = paged_attention_inputs(MODEL, seq_lens=(17, 30), q_lens=(17, 3), page_size=16)
    arguments["q"] = torch.cat([arguments["q"], torch.randn_like(arguments["q"][:5])])
    for spread in (1, 2):
        wide = torch.full((25, 6, 64 * spread), 3.0, dtype=torch.bfloat16)
        out = wide[..., ::spread]
        function = getattr(kernelhub, op)
        _, lse = function(**arguments, out=out, return_lse=True, backend=f"fake.{variant}")
        want, want_lse = function.reference(**arguments, return_lse=True)
        assert compare_out(out[:20], want[:20], largest_value(arguments)).ok
        assert compare_lse(lse[:, :20], want_lse[:, :20]) < 1e-4
        assert (out[20:] == 3.0).all()


@pytest.mark.parametrize("table", ["whole", "of -1 where nothing is"])
def test_sequences_without_keys_are_kept_from_fa2_over_pages(on_the_cpu, monkeypatch, table) -> None:
    arguments = paged_attention_inputs(MODEL, seq_lens=(0, 30, 0, 40, 0), q_lens=(2, 5, 0, 40, 70), page_size=16)
    if table != "whole":
        for row, length in enumerate((0, 30, 0, 40, 0)):
            arguments["block_table"][row, -(-length // 16) :] = -1
    arguments["q"] = torch.cat([arguments["q"], torch.randn_like(arguments["q"][:3])])
    for causal in (False, True):
        out = torch.full_like(arguments["q"], 3.0)
        _, lse = kernelhub.paged_attention(**arguments, causal=causal, out=out, return_lse=True, backend="fake.fa2")
        want, want_lse = kernelhub.paged_attention.reference(**arguments, causal=causal, return_lse=True)
        assert compare_out(out[:117], want[:117], largest_value(arguments)).ok
        assert compare_lse(lse[:, :117], want_lse[:, :117]) < 1e-4
        assert (out[117:] == 3.0).all()
    monkeypatch.setattr(vllm_builds, "with_keys", lambda ends, page_size, tokens: (ends, None))
    with pytest.raises(AssertionError, match="past the LSE"):
        kernelhub.paged_attention(**arguments, backend="fake.fa2")


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("variant", ["fa3", "fa2"])
def test_windows_of_sequences_of_more_queries_than_keys(on_the_cpu, variant, window) -> None:
    """FlashAttention-2 reads an open side as the bound on keys, which does not reach that far."""
    paged = paged_attention_inputs(MODEL, seq_lens=(7, 11), q_lens=(45, 40), page_size=16)
    for op, arguments in (
        ("attention", attention_inputs(MODEL, batch=2, q_tokens=45, kv_tokens=7)),
        ("attention", attention_inputs(MODEL, q_lens=(45, 3), kv_lens=(7, 30))),
        ("paged_attention", paged),
        ("paged_attention", paged | {"q": torch.randn(2, 45, 6, 64).to(torch.bfloat16), "cu_seqlens_q": None}),
    ):
        windowed = arguments | {"window": window[0] if window[1] == 0 else window, "causal": window[1] == 0}
        function = getattr(kernelhub, op)
        out, lse = function(**windowed, return_lse=True, backend=f"fake.{variant}")
        want, want_lse = function.reference(**windowed, return_lse=True)
        assert compare_out(out, want, largest_value(arguments)).ok
        assert compare_lse(lse, want_lse) < 1e-4


@pytest.mark.parametrize("page_size", [64, 80, 128, 256])
def test_unused_rows_of_large_pages_do_not_matter_to_fa3(on_the_cpu, page_size) -> None:
    model = AttentionModel("grouped", 16, 1, 64, 64)
    arguments = paged_attention_inputs(model, seq_lens=(150, 90, 7), q_lens=(60, 1, 7), page_size=page_size)
    out = kernelhub.paged_attention(**arguments, backend="fake.fa3")
    assert compare_out(out, kernelhub.paged_attention.reference(**arguments), largest_value(arguments)).ok


def test_batches_with_gaps_are_given_whole(on_the_cpu) -> None:
    arguments = attention_inputs(MODEL, batch=3, q_tokens=20, kv_tokens=33) | {"causal": True}
    for variant in ("fa3", "fa2"):
        for layout in (lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), lambda t: t[:, :-3]):
            moved = {name: layout(arguments[name]) for name in "qkv"}
            out = torch.full((3, 64, 6, 64), torch.nan, dtype=torch.bfloat16)[:, : moved["q"].shape[1]]
            got, lse = kernelhub.attention(**arguments | moved, out=out, return_lse=True, backend=f"fake.{variant}")
            want, want_lse = kernelhub.attention.reference(**arguments | moved, return_lse=True)
            assert got is out
            assert compare_out(out, want, largest_value(arguments)).ok
            assert compare_lse(lse, want_lse) < 1e-4


SIZES: dict[str, Any] = {"q_len": "many", "causal": True}


class TestLimits:
    machine: ClassVar = SimulatedMachine({"triton": "3.7.1", "vllm": "0.33.0"})

    def codes(self, op: str, variant: str, device: str = "H200", machine: Any = None, **facets: Any) -> set[str]:
        selection = kernelhub.explain(op, device=device, machine=machine or self.machine, **facets)
        own = next(item for item in selection.decisions if item.kernel == f"flash_attn.vllm_{variant}")
        return {rejection.code for rejection in own.rejections} - OF_TRUST

    @pytest.mark.parametrize("op", ["attention", "paged_attention"])
    def test_on_devices_and_versions(self, op) -> None:
        for device, able in (("H200", {"fa2", "fa3"}), ("A100", {"fa2"}), ("L40S", {"fa2"}), ("B200", set())):
            for variant in ("fa2", "fa3"):
                assert self.codes(op, variant, device, **SIZES) == (set() if variant in able else {"capability"})
        older = SimulatedMachine({"triton": "3.7.1", "vllm": "0.32.0"})
        without = SimulatedMachine({"triton": "3.7.1"})
        for variant in ("fa2", "fa3"):
            assert self.codes(op, variant, machine=older, **SIZES) == {"package_version"}
            assert self.codes(op, variant, machine=without, **SIZES) == {"package_missing"}

    def test_of_widths(self) -> None:
        for qk, vo, fa3, fa2 in (
            (64, 64, True, True),
            (96, 96, True, True),
            (256, 256, True, True),
            (80, 80, False, False),
            (32, 32, False, False),
            (192, 128, True, False),
            (160, 128, False, False),
        ):
            widths = {"head_dim_qk": qk, "head_dim_vo": vo}
            assert (self.codes("attention", "fa3", **SIZES, **widths) == set()) == fa3
            assert (self.codes("attention", "fa2", **SIZES, **widths) == set()) == fa2
            assert (self.codes("paged_attention", "fa3", **SIZES, **widths) == set()) == (fa3 and qk == vo)

    def test_of_pages_and_features(self) -> None:
        assert self.codes("paged_attention", "fa2", **SIZES, page_size=16) == set()
        assert self.codes("paged_attention", "fa2", **SIZES, page_size=8) == {"divisibility"}
        assert self.codes("paged_attention", "fa3", **SIZES, page_size=7) == set()
        assert self.codes("attention", "fa3", **SIZES, sinks=True) == {"feature"}
        assert self.codes("attention", "fa2", **SIZES, sinks=True) == set()
        fp8 = {"kv_dtype": "float8_e4m3fn", "kv_scale": "value"}
        assert "mismatch" in self.codes("paged_attention", "fa3", **SIZES, **fp8)


def test_calls_fit_the_schemas_of_the_released_version() -> None:
    pairs = (
        ("fwd", fakes.FA3, libraries.FA3_FORWARD),
        ("varlen_fwd", fakes.FA2_VARLEN, libraries.FA2_VARLEN),
    )
    for name, schema, ours in pairs:
        assert mismatch(torch._C.parse_schema(name + schema), name, ours) is None
    chunked = fakes.FA3.replace("float    softcap", "int attention_chunk, float softcap")
    assert "attention_chunk" in (mismatch(torch._C.parse_schema("fwd" + chunked), "fwd", libraries.FA3_FORWARD) or "")


def test_files_lie_in_vllm_s_folder(tmp_path, monkeypatch) -> None:
    from kernelhub.probes.package import find_library

    folder = tmp_path / "vllm" / "vllm_flash_attn"
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for library, name in ((libraries.FA2, "_vllm_fa2_C.abi3.so"), (libraries.FA3, "_vllm_fa3_C.abi3.so")):
        assert find_library(library, (9, 0)).code == "package_broken"
        (folder / name).touch()
        assert find_library(library, (9, 0)).value == str(folder / name)
