"""FlashMLA's adapters keep the contract against a FlashMLA in torch; without the library its kernels are refused."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.backends.flash_mla import kernels
from kernelhub.backends.flash_mla.requirements import generation
from kernelhub.dispatch.constraint import OnDevice, anything
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Backend, Band
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.errors import NoKernel
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.testing import KernelCase
from tests.backends.fake.flash_mla import write
from tests.conftest import HAS_GPU
from tests.contract.mla_attention import MlaContract
from tests.dispatch.backends import EVERYWHERE

pytestmark = pytest.mark.skipif(HAS_GPU, reason="a FlashMLA in torch stands in for the real one on a CPU only")

# The same records for a CPU: a third party's, so of its band.
ANYWHERE = types.SimpleNamespace(
    __name__="tests.fake",
    BACKEND=Backend("fake", "FlashMLA's records on a CPU"),
    KERNELS=tuple(
        dataclasses.replace(
            record,
            name=record.name.replace("flash_mla", "fake"),
            band=Band.PLUGIN,
            standings=EVERYWHERE,
            constraints=(anything("device"), *(c for c in record.constraints if not isinstance(c, OnDevice))),
        )
        for record in kernels.KERNELS
    ),
)


@contextlib.contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """A folder from which packages are imported for the time being, and forgotten then."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    HUB.machine.forget()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == "flash_mla"]:
            del sys.modules[name]
        HUB.machine.forget()


@contextlib.contextmanager
def installed(how: str) -> Iterator[None]:
    """A FlashMLA of a generation, whose kernels take CPU tensors."""
    with tempfile.TemporaryDirectory() as folder, on_path(write(Path(folder), how)):
        HUB.add_backend(ANYWHERE)
        try:
            yield
        finally:
            HUB.remove_backend("fake")


class OnCpu(MlaContract):
    device = "cpu"
    most_elements = None
    generation: ClassVar[str] = "stateful"
    widths = (512, 64)

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        with contextlib.nullcontext() if "fake" in HUB.registry.backends else installed(cls.generation):
            return super().accepted_cases()

    @pytest.fixture(autouse=True)
    def fake(self) -> Iterator[None]:
        with installed(self.generation):
            yield


class TestDense(OnCpu):
    kernel = "fake.dense"
    page_size = 64
    fewest_cases = 30


class TestSparsePadded(OnCpu):
    kernel = "fake.sparse_padded"
    lists_all = True
    fewest_cases = 30


def decode(**changes: Any) -> dict[str, Any]:
    return mla_attention_inputs(**{"num_heads": 4, "seq_lens": (70, 5)} | changes)


@pytest.mark.parametrize("how", ["stateful", "legacy", "tensors", "tensors 2025-09"])
@pytest.mark.parametrize("q_lens", [None, 3])
def test_every_generation_decodes(how, q_lens) -> None:
    arguments = decode(q_lens=q_lens)
    with installed(how):
        out, lse = kernelhub.mla_attention(**arguments, return_lse=True, backend="fake.dense")
    want, want_lse = kernelhub.mla_attention.reference(**arguments, return_lse=True)
    assert (out - want).abs().max() < 0.05
    assert (lse - want_lse).abs().max() < 1e-3


@pytest.mark.parametrize("how", ["stateful", "legacy"])
@pytest.mark.parametrize(("heads", "kernel"), [(4, "sparse_padded"), (64, "sparse"), (100, "sparse_padded")])
def test_every_generation_that_can_attends_to_listed_tokens(how, heads, kernel) -> None:
    arguments = decode(topk=64, num_heads=heads, q_lens=2)
    with installed(how):
        out, lse = kernelhub.mla_attention(**arguments, return_lse=True, backend=f"fake.{kernel}")
    want, want_lse = kernelhub.mla_attention.reference(**arguments, return_lse=True)
    assert (out - want).abs().max() < 0.05
    assert (lse - want_lse).abs().max() < 1e-3


def test_listed_tokens_past_the_block_table_mean_no_token() -> None:
    """On a GPU lengths are not looked at: no entry is read that a row of the table does not have."""
    arguments = decode(topk=64, seq_lens=(200, 130))
    within = arguments | {"block_table": arguments["block_table"][:, :1], "seq_lens": torch.tensor([64, 64]).int()}
    want = kernelhub.mla_attention.reference(**within)
    table = arguments["block_table"].clone()
    table[:, 1:] = table[:, :1]  # what is read there would be found
    with installed("stateful"):
        plan = kernelhub.mla_attention.prepare(**within, backend="fake.sparse_padded")
        step, values = PagedStep(table[:, :1], arguments["seq_lens"]), MlaValues(arguments["scale"])
        out = torch.empty_like(want, dtype=arguments["q"].dtype)
        plan.adapter.launch(arguments["q"], arguments["kv_cache"], arguments["topk_indices"], step, values, out, None)
    assert (out - want).abs().max() < 0.05


@pytest.mark.parametrize(
    ("how", "refused", "code"),
    [
        ("tensors", ("sparse", "sparse_padded"), "signature_changed"),
        ("dropped", ("dense", "sparse", "sparse_padded"), "package_version"),
    ],
)
def test_a_generation_without_a_kernel_refuses_it(how, refused, code) -> None:
    with installed(how):
        for kernel in refused:
            arguments = decode(topk=64, num_heads=64) if kernel == "sparse" else decode()
            selection = kernelhub.mla_attention.explain(**arguments, backend=f"fake.{kernel}")
            decision = next(item for item in selection.decisions if item.kernel == f"fake.{kernel}")
            assert code in {rejection.code for rejection in decision.rejections}
            assert any("kernelhub[flash-mla]" in rejection.remedy for rejection in decision.rejections)


def test_the_layers_of_a_step_share_a_schedule_and_steps_do_not() -> None:
    arguments = decode()
    operands = [arguments[name] for name in ("q", "kv_cache", "block_table", "seq_lens")]
    with installed("stateful"):
        plan = kernelhub.mla_attention.prepare(**arguments, backend="fake.dense")
        called = sys.modules["flash_mla.flash_mla_interface"].CALLED
        step = plan.begin(*operands[2:])
        for _ in range(3):
            step.run(*operands[:2])
        assert called == ["first", "again", "again"]
        arguments["seq_lens"].sub_(3)  # the library would hold the next call against the old lengths
        step = plan.begin(*operands[2:])
        step.run(*operands[:2])
        assert called[3:] == ["first"]
        kernelhub.mla_attention(**arguments, backend="fake.dense")
        assert called[4:] == ["first"]


def explained(**facets: Any) -> Any:
    machine = SimulatedMachine({"triton": "3.7.1", "flash_mla": "1.0.0"})
    return kernelhub.explain("mla_attention", device="H200", machine=machine, **facets)


@pytest.mark.parametrize(
    ("facets", "kernel", "reason"),
    [
        ({"kv_dtype": "float8_e4m3fn", "kv_scale": "value"}, "flash_mla.dense", "656 bytes per token"),
        ({"q_dtype": "float32", "kv_dtype": "float32"}, "flash_mla.dense", "q_dtype is float32"),
        ({"page_size": 32}, "flash_mla.dense", "page_size is 32, not one of 64"),
        ({"head_dim": 512, "value_dim": 512}, "flash_mla.dense", "head_dim is 512, not one of 576"),
        ({"ragged": True, "q_len": "any"}, "flash_mla.dense", "ragged"),
        ({"sparse": True}, "flash_mla.dense", "sparse"),
        ({}, "flash_mla.sparse", "sparse is False, not one of True (needs topk_indices)"),
        ({"sparse": True, "num_heads": 16}, "flash_mla.sparse", "num_heads is 16, not one of 64, 128"),
        ({"sparse": True, "num_heads": 256}, "flash_mla.sparse_padded", "outside 1 to 127"),
        ({"sparse": True, "q_dtype": "float16", "kv_dtype": "float16"}, "flash_mla.sparse", "q_dtype is float16"),
    ],
)
def test_what_a_kernel_cannot_is_refused_with_the_reason(facets, kernel, reason) -> None:
    decision = next(item for item in explained(**facets).decisions if item.kernel == kernel)
    assert not decision.accepted
    assert any(reason in rejection.reason for rejection in decision.rejections), decision.rejections


@pytest.mark.parametrize(
    ("facets", "kernel"),
    [
        ({}, "flash_mla.dense"),
        ({"num_heads": 16, "q_len": "few", "causal": True}, "flash_mla.dense"),
        ({"sparse": True}, "flash_mla.sparse"),
        ({"sparse": True, "num_heads": 16}, "gluon.decode_listed"),
        ({"sparse": True, "num_heads": 16, "q_len": "any", "ragged": True}, "flash_mla.sparse_padded"),
        ({"page_size": 16}, "triton.split_kv"),
    ],
)
def test_what_it_is_faster_at_goes_to_it(facets, kernel) -> None:
    assert explained(**facets).selected == kernel


def test_on_other_gpus_it_is_not_asked() -> None:
    """Of B200s only about lists: its decode of all tokens is for sm_90."""
    machine = SimulatedMachine({"triton": "3.7.1", "flash_mla": "1.0.0"})
    for device in ("A100", "B200", "RTX5090"):
        for sparse in (False, True):
            selection = kernelhub.explain("mla_attention", device=device, machine=machine, sparse=sparse)
            codes = {item.kernel: item.code for item in selection.decisions}
            assert codes["flash_mla.dense"] == "capability"
            assert device == "B200" or codes["flash_mla.sparse"] == codes["flash_mla.sparse_padded"] == "capability"
            if device != "B200":
                assert selection.selected == "triton.split_kv"


def test_not_installed_is_refused_with_a_remedy() -> None:
    machine = SimulatedMachine({"triton": "3.7.1"})
    selection = kernelhub.explain("mla_attention", device="H200", machine=machine)
    decision = next(item for item in selection.decisions if item.kernel == "flash_mla.dense")
    assert (decision.code, decision.remedy) == ("package_missing", 'pip install "kernelhub[flash-mla]"')


def test_a_copy_that_cannot_be_imported_gives_way_with_its_reason(tmp_path) -> None:
    with on_path(write(tmp_path, "stateful", init="raise ImportError('undefined symbol: _ZN3c10')\n")):
        HUB.add_backend(ANYWHERE)
        selection = kernelhub.mla_attention.explain(**decode(), backend=("fake.dense", "torch.gathered"))
        assert selection.selected == "fake.dense"
        out = kernelhub.mla_attention(**decode(), backend=("fake.dense", "torch.gathered"))
        assert (out - kernelhub.mla_attention.reference(**decode())).abs().max() < 0.05
        with pytest.raises(NoKernel, match="undefined symbol: _ZN3c10"):
            kernelhub.mla_attention(**decode(), backend="fake.dense")
        HUB.remove_backend("fake")


def test_a_second_copy_of_its_operators_is_not_loaded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch._C, "_dispatch_get_all_op_names", lambda: ["aten::add", "flash_mla::sparse_decode_fwd"])
    with on_path(write(tmp_path, "stateful")):
        HUB.add_backend(ANYWHERE)
        with pytest.raises(NoKernel, match="a second one would terminate the process"):
            kernelhub.mla_attention(**decode(), backend="fake.dense")
        assert "flash_mla" not in sys.modules
        HUB.remove_backend("fake")


def test_a_build_without_legacy_kernels_is_not_used(tmp_path) -> None:
    with on_path(write(tmp_path, "legacy", init="def has_legacy():\n    return False\n")):
        HUB.add_backend(ANYWHERE)
        with pytest.raises(NoKernel, match="without its legacy kernels"):
            kernelhub.mla_attention(**decode(), backend="fake.dense")
        HUB.remove_backend("fake")


def test_a_copy_of_unknown_functions_is_refused(tmp_path) -> None:
    (tmp_path / "flash_mla").mkdir()
    (tmp_path / "flash_mla" / "__init__.py").write_text("")
    assert generation("dense", tmp_path / "flash_mla").code == "symbol_unknown"
    (tmp_path / "flash_mla" / "flash_mla_interface.py").write_text("def flash_mla_with_kvcache(q, cache): ...\n")
    assert generation("dense", tmp_path / "flash_mla").code == "signature_changed"
    assert generation("sparse", tmp_path / "flash_mla").code == "symbol_missing"
