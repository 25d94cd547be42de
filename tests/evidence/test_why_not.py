"""A kernel that verification cannot ask says what speaks against it, not only that something does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import kernelhub
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Backend, Band, Kernel
from kernelhub.dispatch.standing import verified
from kernelhub.errors import NoKernel
from kernelhub.evidence.call import why
from kernelhub.evidence.results import NOT_RUN
from kernelhub.ops.attention.adapter import AttentionAdapter


def test_the_kernel_s_own_reason_is_given() -> None:
    q = torch.randn(1, 4, 2, 64)
    with pytest.raises(NoKernel) as caught:
        kernelhub.attention(q, q, q, backend="cudnn.sdpa")
    decision = next(item for item in caught.value.selection.decisions if item.kernel == "cudnn.sdpa")
    assert why(caught.value, "cudnn.sdpa") == f"{decision.rejections[0].code}: {decision.rejections[0].reason}"


def test_other_errors_give_their_first_line() -> None:
    assert why(RuntimeError("first\nsecond"), "cudnn.sdpa") == "first"


class Lacking(AttentionAdapter):
    """An adapter whose launch needs a module that is not installed."""

    def launch(self, *arguments) -> None:
        raise ModuleNotFoundError("No module named 'lacking_extension'")


def test_a_kernel_that_cannot_launch_here_is_not_run_and_not_selected(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path))
    schema = kernelhub.attention.op.contract.schema
    record = Kernel(
        op="attention",
        name="lacking.kernel",
        target=f"{__name__}:Lacking",
        summary="needs an extension",
        band=Band.PLUGIN,
        standings=(verified("*", evidence="a test's own"),),
        constraints=(anything(*schema.facets),),
        features=schema.features,
    )
    kernelhub.register_backend(SimpleNamespace(BACKEND=Backend("lacking", "lacks"), KERNELS=(record,)))
    found = kernelhub.verify("attention", backend="lacking", quick=True, device="cpu", apart=False)
    (result,) = found.results
    assert (result.status, result.code, found.ok) == (NOT_RUN, "cannot_launch", True)
    assert "No module named 'lacking_extension'" in result.reason
    assert kernelhub.explain("attention", device="cpu").selected != "lacking.kernel"
