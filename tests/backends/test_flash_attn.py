"""FlashAttention's adapters keep the contracts, given libraries that keep their own word."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.backends.flash_attn import fa3
from kernelhub.dispatch.constraint import OnDevice
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Band
from kernelhub.ops.attention.cases import largest_value
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out
from kernelhub.ops.models.shapes import AttentionModel
from tests.backends.flash_attn_numbers import WINDOWS
from tests.contract.attention import DenseContract, PagedContract
from tests.contract.few import check_few_cases
from tests.contract.test_liars import failures
from tests.contract.varied_attention import VariedContract, varied
from tests.dispatch.backends import EVERYWHERE, OF_TRUST, register

SITE = Path(__file__).parent / "flash_attn_site"


class PagesOf256(VariedContract, PagedContract):
    """The cases with the pages that FlashAttention-2 takes."""

    __test__ = False
    table = varied("paged_attention", inputs={"page_size": 256})


class RaggedPages(PagedContract):
    """With ragged queries where the contract has decode, which FlashAttention-4 is not asked for."""

    __test__ = False
    plain: ClassVar = {"seq_lens": (40, 9, 77), "q_lens": (3, 1, 6)}
    rich: ClassVar = plain | {"causal": True, "window": (5, -1)}


CONTRACTS = {
    ("fa3", "attention"): (DenseContract, 40),
    ("fa3", "paged_attention"): (PagedContract, 40),
    ("fa2", "attention"): (DenseContract, 40),
    ("fa2", "paged_attention"): (PagesOf256, 40),
    ("fa4", "attention"): (DenseContract, 20),
    ("fa4", "paged_attention"): (RaggedPages, 8),
}
LIBRARIES = {"fa2": "flash_attn", "fa3": "flash_attn_3", "fa4": "flash_attn"}


def forget_stand_ins() -> None:
    """The operator stays registered, so the module that holds it stays known."""
    sys.modules.pop("flash_attn_3", None)
    adapters = ("kernelhub.backends.flash_attn.fa2", "kernelhub.backends.flash_attn.fa4")
    for name in list(sys.modules):
        if name in adapters or name.split(".")[0] in ("flash_attn", "flash_attn_2_cuda", "cutlass", "quack", "tvm_ffi"):
            del sys.modules[name]


@pytest.fixture
def nothing_real():
    """Nothing of the real libraries is here."""
    for name in set(LIBRARIES.values()):
        if importlib.util.find_spec(name) is not None:
            pytest.skip(f"the real {name} is installed here; these cases are for machines without it")
    yield
    forget_stand_ins()


@pytest.fixture
def stand_ins(nothing_real, monkeypatch):
    """The stand-ins can be imported."""
    monkeypatch.syspath_prepend(str(SITE))
    return SITE


@pytest.fixture
def changed_site(nothing_real, monkeypatch, tmp_path):
    """A copy of the stand-ins that a test may break."""
    site = tmp_path / "site"
    shutil.copytree(SITE, site, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(str(site))
    return site


def on_this_cpu(op: str, variant: str) -> str:
    """Register the record as it is, but for a CPU; the name under which it runs."""
    _ = HUB.settings
    kernel = next(k for k in HUB.registry.candidates(op).kernels if k.name == f"flash_attn.{variant}")
    constraints = tuple(OnDevice("cpu") if isinstance(item, OnDevice) else item for item in kernel.constraints)
    copy = dataclasses.replace(
        kernel, name=f"stand_in.{variant}", constraints=constraints, band=Band.PLUGIN, standings=EVERYWHERE
    )
    register("stand_in", copy)
    return copy.name


@pytest.mark.parametrize(("variant", "op"), list(CONTRACTS))
def test_each_feature_is_right(stand_ins, variant, op) -> None:
    check_few_cases(CONTRACTS[variant, op][0], on_this_cpu(op, variant))


@pytest.mark.parametrize(("variant", "op"), list(CONTRACTS))
def test_the_adapter_keeps_the_contract(stand_ins, variant, op) -> None:
    contract, fewest = CONTRACTS[variant, op]
    name = on_this_cpu(op, variant)
    subject = type("Subject", (contract,), {"kernel": name, "device": "cpu"})
    assert len(subject.accepted_cases()) >= fewest
    assert failures(contract, name, "cpu") == []


MODEL = AttentionModel("grouped", 6, 2, 64, 64)
EVERY = [(variant, op) for variant, op in CONTRACTS]


def selection(op: str, device: str = "H200", **facets: Any) -> Any:
    """What this machine, with its stand-ins, says of a device that is not here."""
    return kernelhub.explain(op, device=device, **facets)


def codes(op: str, kernel: str, **facets: Any) -> set[str]:
    """Why a kernel is refused on an H200; empty if it is not."""
    decisions = selection(op, **facets).decisions
    decision = next(item for item in decisions if item.kernel == kernel)
    return {item.code for item in decision.rejections} - OF_TRUST


class TestMachine:
    def test_without_the_libraries_the_remedy_installs_them(self, nothing_real) -> None:
        for op in ("attention", "paged_attention"):
            for decision in selection(op, q_len="many", causal=True).decisions:
                if decision.kernel.startswith("flash_attn."):
                    assert decision.code == "package_missing"
                    assert decision.remedy.startswith("pip install")

    @pytest.mark.parametrize("op", ["attention", "paged_attention"])
    def test_with_them_every_kernel_is_supported(self, stand_ins, op) -> None:
        page = {"page_size": 256} if op == "paged_attention" else {}
        for variant in ("fa2", "fa3"):
            assert codes(op, f"flash_attn.{variant}", q_len="many", causal=True, **page) == set()
        assert codes(op, "flash_attn.fa4", q_len="many", causal=True) == set()

    def test_nothing_is_imported_to_say_so(self, stand_ins) -> None:
        before = set(sys.modules)
        assert selection("attention", q_len="many", causal=True).selected == "flash_attn.fa3"
        assert not {name for name in set(sys.modules) - before if name.startswith(("flash_attn", "cutlass", "quack"))}

    def test_a_missing_library_file_is_reported(self, changed_site) -> None:
        (changed_site / "flash_attn_3" / "_C.py").unlink()
        assert codes("attention", "flash_attn.fa3", q_len="many") == {"package_broken"}
        (changed_site / "flash_attn_2_cuda.py").unlink()
        kernelhub.explain("attention", device="H200")  # asked anew below, on a clean machine
        HUB.restore()
        assert codes("attention", "flash_attn.fa2", q_len="many") == {"package_missing"}

    def test_without_a_list_of_parts_nothing_is_taken_for_granted(self, changed_site) -> None:
        for text in (None, "CONFIG = {}", "CONFIG = made()", "CONFIG = {"):
            HUB.restore()
            config = changed_site / "flash_attn_config.py"
            config.unlink() if text is None else config.write_text(text)
            assert codes("attention", "flash_attn.fa3", q_len="many") == {"package_broken"}

    @pytest.mark.parametrize(
        ("part", "facets"),
        [
            ("SOFTCAP", {"softcap": True}),
            ("LOCAL", {"window_left": True}),
            ("LOCAL", {"window_right": True}),
            ("FP16", {"q_dtype": "float16", "kv_dtype": "float16"}),
            ("VARLEN", {"ragged": True}),
            ("HDIM256", {"head_dim_qk": 256, "head_dim_vo": 256}),
            ("HDIMDIFF192", {"head_dim_qk": 192, "head_dim_vo": 128}),
        ],
    )
    def test_a_part_that_was_left_out_is_not_requested(self, changed_site, part, facets) -> None:
        config = changed_site / "flash_attn_config.py"
        config.write_text(config.read_text().replace(f'DISABLE_{part}": False', f'DISABLE_{part}": True'))
        assert codes("attention", "flash_attn.fa3", q_len="many", **facets) == {"not_compiled"}
        assert codes("attention", "flash_attn.fa3", q_len="many") == set()

    def test_pages_need_their_part(self, changed_site) -> None:
        config = changed_site / "flash_attn_config.py"
        config.write_text(config.read_text().replace('DISABLE_PAGEDKV": False', 'DISABLE_PAGEDKV": True'))
        assert codes("paged_attention", "flash_attn.fa3") == {"not_compiled"}
        assert codes("attention", "flash_attn.fa3") == set()

    def test_a_changed_header_is_reported_before_anything_is_imported(self, changed_site) -> None:
        file = changed_site / "flash_attn_interface.py"
        file.write_text(file.read_text().replace("    page_table=None", "    block_table=None"))
        assert codes("paged_attention", "flash_attn.fa3") == {"signature_changed"}
        file = changed_site / "flash_attn" / "__init__.py"
        file.write_text(file.read_text().replace("    softcap=0.0,\n", ""))
        assert codes("attention", "flash_attn.fa2") == {"signature_changed"}

    def test_another_version_is_not_taken(self, changed_site) -> None:
        file = changed_site / "flash_attn-2.8.3.dist-info" / "METADATA"
        file.write_text(file.read_text().replace("2.8.3", "2.6.3"))
        assert codes("attention", "flash_attn.fa2") == {"package_version"}

    def test_unused_rows_of_large_pages_are_a_known_defect_of_fa4(self, stand_ins) -> None:
        for page_size, bad in ((16, False), (48, False), (64, True), (128, True)):
            facets = {"q_len": "many", "causal": True, "page_size": page_size}
            assert ("known_bad" in codes("paged_attention", "flash_attn.fa4", **facets)) == bad


class TestLoading:
    def test_a_library_that_does_not_import_gives_way_with_its_reason(self, changed_site) -> None:
        (changed_site / "flash_attn" / "__init__.py").write_text(
            (SITE / "flash_attn" / "__init__.py").read_text() + "\nraise ImportError('undefined symbol: _ZN3c10')\n"
        )
        name = on_this_cpu("attention", "fa2")
        arguments = attention_inputs(MODEL, q_tokens=20)
        with kernelhub.use(prefer=name):
            out = kernelhub.attention(**arguments)
        assert out.shape == arguments["q"].shape
        decision = next(d for d in kernelhub.attention.explain(**arguments).decisions if d.kernel == name)
        assert "undefined symbol" in decision.reason

    def test_a_foreign_operator_of_that_name_is_left_alone(self, stand_ins, monkeypatch) -> None:
        fa3.operator()
        monkeypatch.delitem(sys.modules, "flash_attn_3._C")
        with pytest.raises(RuntimeError, match="another library"):
            fa3.operator()

    def test_an_operator_with_other_parameters_is_refused(self, stand_ins, monkeypatch) -> None:
        monkeypatch.setattr(fa3, "PARAMETERS", ("q", "v", "k"))
        with pytest.raises(RuntimeError, match=r"takes \(q, k, v"):
            fa3.operator()

    def test_an_operator_that_requires_more_is_refused(self, stand_ins, monkeypatch) -> None:
        monkeypatch.setattr(fa3, "PARAMETERS", ("q",))
        with pytest.raises(RuntimeError, match="also requires k, v"):
            fa3.operator()


class TestCalls:
    @pytest.mark.parametrize("page_size", [64, 80, 128, 256])
    def test_unused_rows_of_large_pages_do_not_matter_to_fa3(self, stand_ins, page_size) -> None:
        name = on_this_cpu("paged_attention", "fa3")
        model = AttentionModel("grouped", 16, 1, 64, 64)
        arguments = paged_attention_inputs(model, seq_lens=(150, 90, 7), q_lens=(60, 1, 7), page_size=page_size)
        for sizes in ({}, {"max_seqlen_q": 60}):
            out = kernelhub.paged_attention(**arguments, **sizes, backend=name)
            want = kernelhub.paged_attention.reference(**arguments)
            assert compare_out(out, want, largest_value(arguments)).ok

    @pytest.mark.parametrize(("variant", "op"), EVERY)
    @pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
    def test_tokens_past_the_last_sequence_are_left_as_they_are(self, stand_ins, variant, op, sinks) -> None:
        name = on_this_cpu(op, variant)
        if op == "attention":
            arguments = attention_inputs(MODEL, q_lens=(17, 3), kv_lens=(17, 30))
        else:
            page_size = 256 if variant == "fa2" else 16
            arguments = paged_attention_inputs(MODEL, seq_lens=(17, 30), q_lens=(17, 3), page_size=page_size)
        arguments["q"] = torch.cat([arguments["q"], torch.randn_like(arguments["q"][:5])])
        if sinks and variant == "fa3":
            pytest.skip("FlashAttention-3's record takes no sinks")
        if sinks:
            arguments["sinks"] = torch.linspace(-1, 4, 6)
        for spread in (1, 2):
            wide = torch.full((25, 6, 64 * spread), 3.0, dtype=torch.bfloat16)
            out = wide[..., ::spread]
            function = getattr(kernelhub, op)
            _, lse = function(**arguments, out=out, return_lse=True, backend=name)
            want, want_lse = function.reference(**arguments, return_lse=True)
            assert compare_out(out[:20], want[:20], largest_value(arguments)).ok
            assert compare_lse(lse[:, :20], want_lse[:, :20]) < 1e-4
            assert (out[20:] == 3.0).all()

    @pytest.mark.parametrize("window", WINDOWS)
    @pytest.mark.parametrize(("variant", "op"), EVERY)
    def test_windows_of_sequences_of_more_queries_than_keys(self, stand_ins, variant, op, window) -> None:
        """FlashAttention-2 reads an open side as the bound on keys, which does not reach that far."""
        name = on_this_cpu(op, variant)
        if op == "attention":
            forms = [{"batch": 2, "q_tokens": 45, "kv_tokens": 7}, {"q_lens": (45, 3), "kv_lens": (7, 30)}]
            cases = [attention_inputs(MODEL, **form) for form in forms]
        else:
            page_size = 256 if variant == "fa2" else 16
            form = {"seq_lens": (7, 11), "q_lens": (page_size + 29, 40), "page_size": page_size}
            cases = [paged_attention_inputs(MODEL, **form)]
            if variant != "fa4":
                batch = torch.randn(2, page_size + 29, 6, 64).to(torch.bfloat16)
                cases.append(cases[0] | {"q": batch, "cu_seqlens_q": None})
        function = getattr(kernelhub, op)
        for arguments in cases:
            windowed = arguments | {"window": window[0] if window[1] == 0 else window, "causal": window[1] == 0}
            out, lse = function(**windowed, return_lse=True, backend=name)
            want, want_lse = function.reference(**windowed, return_lse=True)
            assert compare_out(out, want, largest_value(arguments)).ok
            assert compare_lse(lse, want_lse) < 1e-4

    def test_sinks_may_be_finer_than_the_queries(self, stand_ins) -> None:
        name = on_this_cpu("attention", "fa2")
        arguments = attention_inputs(MODEL, q_tokens=20) | {"sinks": torch.linspace(2.001, 5.003, 6)}
        out, lse = kernelhub.attention(**arguments, return_lse=True, backend=name)
        want, want_lse = kernelhub.attention.reference(**arguments, return_lse=True)
        assert compare_out(out, want, largest_value(arguments)).ok
        assert compare_lse(lse, want_lse) < 1e-5

    @pytest.mark.parametrize(("variant", "page_size"), [("fa2", 256), ("fa3", 16)])
    def test_a_bound_of_one_holds_for_sequences_without_queries(self, stand_ins, variant, page_size) -> None:
        name = on_this_cpu("paged_attention", variant)
        arguments = paged_attention_inputs(MODEL, seq_lens=(17, 30, 9), q_lens=(1, 0, 1), page_size=page_size)
        out = kernelhub.paged_attention(**arguments, max_seqlen_q=1, backend=name)
        want = kernelhub.paged_attention.reference(**arguments)
        assert compare_out(out, want, largest_value(arguments)).ok

    def test_memory_for_parts_is_reported_where_keys_are_split(self, stand_ins) -> None:
        problem = selection("attention", q_len="one", num_q_heads=6, num_kv_heads=2, head_dim_qk=64).problem
        needs = fa3.Dense(problem).workspace_bytes
        one = needs(num_seqs=1, num_tokens=1, max_kv_len=1 << 17)
        assert one >= 2 * 6 * 65 * 4
        assert needs(num_seqs=64, num_tokens=64, max_kv_len=1 << 17) >= one
        assert needs(num_seqs=1, num_tokens=1, max_kv_len=16) == 6 * 4

    @pytest.mark.parametrize("variant", ["fa2", "fa3"])
    def test_a_cache_without_pages_gives_zeros(self, stand_ins, variant) -> None:
        name = on_this_cpu("paged_attention", variant)
        q = torch.randn(2, 6, 64, dtype=torch.bfloat16)
        cache = torch.zeros(0, 256, 2, 64, dtype=torch.bfloat16)
        table, lengths = torch.zeros(2, 0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        out, lse = kernelhub.paged_attention(q, cache, cache, table, lengths, return_lse=True, backend=name)
        assert not out.any()
        assert (lse == -torch.inf).all()
