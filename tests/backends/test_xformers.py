"""xformers' adapters keep the contract, given a library that keeps its word; what is not asked of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.dispatch.constraint import OnDevice
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Band
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.ops.attention.cases import largest_value
from kernelhub.ops.attention.inputs import attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out
from kernelhub.ops.models.shapes import AttentionModel
from tests.contract.attention import DenseContract
from tests.contract.few import check_few_cases
from tests.contract.test_liars import failures
from tests.dispatch.backends import EVERYWHERE, OF_TRUST, register

SITE = Path(__file__).parent / "xformers_site"
MODEL = AttentionModel("grouped", 6, 2, 64, 64)
VARIANTS = ("flash", "cutlass")
BOUNDS = (("MIN", "2.7.1"), ("LAST", "2.8.4"))  # of 0.0.35


@pytest.fixture
def site(monkeypatch, tmp_path):
    """A copy of the stand-in that can be imported, and broken."""
    if importlib.util.find_spec("xformers") is not None:
        pytest.skip("the real xformers is installed here; these cases are for machines without it")
    copy = tmp_path / "site"
    shutil.copytree(SITE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(str(copy))
    yield copy
    for name in list(sys.modules):
        if name.split(".")[0] == "xformers" or name == "kernelhub.backends.xformers.attention":
            del sys.modules[name]


def on_this_cpu(variant: str) -> str:
    """Register the record as it is, but for a CPU; the name under which it runs."""
    _ = HUB.settings
    kernel = next(k for k in HUB.registry.candidates("attention").kernels if k.name == f"xformers.{variant}")
    constraints = tuple(OnDevice("cpu") if isinstance(item, OnDevice) else item for item in kernel.constraints)
    register(
        "stand_in",
        dataclasses.replace(
            kernel, name=f"stand_in.{variant}", constraints=constraints, band=Band.PLUGIN, standings=EVERYWHERE
        ),
    )
    return f"stand_in.{variant}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_feature_is_right(site, variant) -> None:
    check_few_cases(DenseContract, on_this_cpu(variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_adapter_keeps_the_contract(site, variant) -> None:
    name = on_this_cpu(variant)
    subject = type("Subject", (DenseContract,), {"kernel": name, "device": "cpu"})
    assert len(subject.accepted_cases()) >= 25
    assert failures(DenseContract, name, "cpu") == []


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("causal", [False, True])
def test_queries_that_see_no_key_are_left_out_of_the_mask(site, variant, causal) -> None:
    name = on_this_cpu(variant)
    for q_lens, kv_lens in (
        ((17, 5, 0, 3), (9, 5, 4, 30)),
        ((3, 4), (0, 9)),
        ((1, 0, 1), (4, 2, 1)),
        ((2, 3), (0, 0)),
    ):
        arguments = attention_inputs(MODEL, q_lens=q_lens, kv_lens=kv_lens) | {"causal": causal}
        total = sum(q_lens)
        arguments["q"] = torch.cat([arguments["q"], torch.randn_like(arguments["q"][:1])])
        out = torch.full((total + 1, 6, 64), 3.0, dtype=torch.bfloat16)
        got = kernelhub.attention(**arguments, out=out, return_lse=variant == "flash", backend=name)
        want, want_lse = kernelhub.attention.reference(**arguments, return_lse=True)
        assert compare_out(out[:total], want[:total], largest_value(arguments)).ok
        assert (out[total:] == 3.0).all()
        if variant == "flash":
            assert compare_lse(got[1][:, :total], want_lse[:, :total]) < 1e-4


def test_a_step_of_a_plan_makes_one_mask_for_its_layers(site) -> None:
    name = on_this_cpu("flash")
    arguments = attention_inputs(MODEL, q_lens=(17, 3), kv_lens=(17, 30)) | {"causal": True}
    with kernelhub.use(attention=name):
        first = kernelhub.attention(**arguments)
        assert torch.equal(kernelhub.attention(**arguments), first)
        selection = kernelhub.attention.explain(**arguments)
    assert selection.selected == name


def codes(machine: Any = None, variant: str = "flash", device: str = "H200", **facets: Any) -> set[str]:
    more = {} if machine is None else {"machine": machine}
    selection = kernelhub.explain("attention", device=device, **more, **{"q_len": "many", **facets})
    own = next(item for item in selection.decisions if item.kernel == f"xformers.{variant}")
    return {rejection.code for rejection in own.rejections} - OF_TRUST


class TestMachine:
    def test_whole(self, site) -> None:
        assert codes() == codes(variant="cutlass") == set()
        assert not any(name.startswith("xformers") for name in sys.modules)

    def test_a_changed_header_is_reported_before_anything_is_imported(self, site) -> None:
        file = site / "xformers" / "ops" / "fmha" / "__init__.py"
        file.write_text(file.read_text().replace("attn_bias=None, p=0.0, scale=None", "p=0.0, attn_bias=None"))
        assert codes() == {"signature_changed"}

    def test_versions_that_were_not_read_are_refused(self, site) -> None:
        file = site / "xformers-0.0.35.dist-info" / "METADATA"
        file.write_text(file.read_text().replace("0.0.35", "0.0.36"))
        assert codes() == {"package_version"}

    @pytest.mark.parametrize(
        ("module", "version", "ignored", "code"),
        [
            (False, "", "", "package_broken"),  # FlashAttention-4 alone
            (False, "", "1", "package_broken"),
            (True, "2.7.0", "", "package_version"),
            (True, "2.7.1", "", None),
            (True, "2.8.4", "", None),
            (True, "2.8.5", "", "package_version"),
            (True, "2.8.5", "1", None),
            (True, "", "", "package_version"),  # a folder that nobody installed
        ],
    )
    def test_a_flash_attn_beside_it_that_it_cannot_import(
        self, site, monkeypatch, module, version, ignored, code
    ) -> None:
        if importlib.util.find_spec("flash_attn") is not None:
            pytest.skip("a real flash_attn is installed here")
        monkeypatch.setenv("XFORMERS_IGNORE_FLASH_VERSION_CHECK", ignored)
        flash = site / "xformers" / "ops" / "fmha" / "flash.py"
        bounds = (f'    FLASH_VER_{name} = parse_version("{bound}")\n' for name, bound in BOUNDS)
        flash.write_text(f"{flash.read_text()}\nif True:\n{''.join(bounds)}")
        (site / "flash_attn" / "cute").mkdir(parents=True)
        (site / "flash_attn" / "cute" / "__init__.py").touch()
        if module:
            for name in ("__init__.py", "flash_attn_interface.py"):
                (site / "flash_attn" / name).touch()
        if version:
            (site / "flash_attn-0.dist-info").mkdir()
            (site / "flash_attn-0.dist-info" / "METADATA").write_text(f"Name: flash-attn\nVersion: {version}\n")
        importlib.invalidate_caches()
        for variant in VARIANTS:
            assert codes(variant=variant) == ({code} if code else set())

    def test_one_that_does_not_import_gives_way_with_its_reason(self, site) -> None:
        (site / "xformers" / "ops" / "__init__.py").write_text("raise ImportError('Requires Flash-Attention')")
        name = on_this_cpu("flash")
        arguments = attention_inputs(MODEL, q_tokens=20)
        with kernelhub.use(prefer=name):
            kernelhub.attention(**arguments)
        decision = next(d for d in kernelhub.attention.explain(**arguments).decisions if d.kernel == name)
        assert "Requires Flash-Attention" in decision.reason

    @pytest.mark.parametrize(
        ("file", "old", "new", "match"),
        [
            ("_cpp_lib.py", "_built_with_cuda = True", "_built_with_cuda = False", "cannot load its own library"),
            ("ops/fmha/flash.py", "return True", "return False", "xformers has no fa2F"),
        ],
    )
    def test_a_library_that_would_refuse_every_call_is_reported_before_any(self, site, file, old, new, match) -> None:
        path = site / "xformers" / file
        path.write_text(path.read_text().replace(old, new))
        from kernelhub.backends.xformers.attention import Flash

        problem = kernelhub.explain("attention", device="H200", q_len="many").problem
        with pytest.raises(ImportError, match=match):
            Flash(problem)


@pytest.mark.parametrize(
    ("variant", "device", "facets", "code"),
    [
        *((variant, device, {}, None) for variant in VARIANTS for device in ("A100", "L40S", "H200")),
        *((variant, device, {}, "capability") for variant in VARIANTS for device in ("sm_75", "B200")),
        ("flash", "H200", {"ragged": True, "causal": True, "lse": True}, None),
        ("cutlass", "H200", {"lse": True}, "feature"),
        ("flash", "H200", {"window_left": True, "causal": True}, "feature"),
        ("flash", "H200", {"q_dtype": "float32", "kv_dtype": "float32"}, "dtype"),
        ("flash", "H200", {"head_dim_qk": 192, "head_dim_vo": 128}, "mismatch"),
        ("cutlass", "H200", {"head_dim_qk": 192, "head_dim_vo": 128}, None),
        ("cutlass", "H200", {"head_dim_qk": 64, "head_dim_vo": 60}, "divisibility"),
    ],
)
def test_limits(variant: str, device: str, facets: dict[str, Any], code: str | None) -> None:
    machine = SimulatedMachine({"triton": "3.7.1", "xformers": "0.0.35"})
    assert codes(machine, variant, device, **facets) == ({code} if code else set())


def test_what_is_not_installed_is_said_with_what_to_install() -> None:
    assert codes(SimulatedMachine({"triton": "3.7.1"})) == {"package_missing"}
