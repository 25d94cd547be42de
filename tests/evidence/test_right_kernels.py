"""No false alarms: every kernel of ours that runs here is right in every check, and stays choosable."""

from __future__ import annotations

import os

import pytest

import kernelhub
from kernelhub.cli.facets import ops
from kernelhub.dispatch.hub import HUB
from tests.conftest import HAS_GPU

FEWEST_CHECKS = 2800
INTERPRETED = ("merge_attention_states", "write_mla_cache", "paged_mqa_logits", "quantize_mxfp4", "quantize_nvfp4")


@pytest.mark.sweep
def test_all_kernels_that_run_on_a_cpu_pass_all_checks_there() -> None:
    """As their contracts in tests/backends do, in one call."""
    found = kernelhub.verify(backend=["torch", "cpp", "moe_pairs"], device="cpu", budget_s=600)
    wrong = [(result.op, result.kernel, result.reason) for result in found.results if result.failures]
    assert wrong == []
    asked = {result.op for result in found.results if result.checks}
    assert asked == set(HUB.registry.contracts), "an op has no kernel that was asked"
    assert sum(len(result.checks) for result in found.results) >= FEWEST_CHECKS
    assert not any(result.left_out for result in found.results)
    for op in asked:
        selection = kernelhub.explain(op, device="cpu")
        assert "quarantined" not in {decision.code for decision in selection.decisions}


@pytest.mark.parametrize("op", ops())
def test_the_kernel_that_a_cpu_gets_passes_quick_checks(op) -> None:
    selected = kernelhub.explain(op, device="cpu").selected
    assert selected is not None
    found = kernelhub.verify(op, backend=selected, device="cpu", quick=True, budget_s=600)
    (result,) = found.results
    assert result.checks
    assert (result.failures, result.left_out) == ([], 0), result.reason
    assert kernelhub.explain(op, device="cpu").selected == selected


@pytest.mark.skipif(HAS_GPU, reason="Triton compiles here: its interpreter is not used, 5 cases")
@pytest.mark.parametrize("op", INTERPRETED)
def test_kernels_of_triton_pass_quick_checks_under_its_interpreter(op) -> None:
    pytest.importorskip("triton", reason="triton is not installed: 5 cases")
    assert os.environ["TRITON_INTERPRET"] == "1"
    found = kernelhub.verify(op, backend="triton", device="cpu", quick=True)
    assert found.ok, str(found)
    assert all(result.checks for result in found.results)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ops())
def test_all_kernels_pass_quick_checks_on_a_gpu(op) -> None:
    found = kernelhub.verify(op, device="cuda", quick=True)
    assert found.ok, str(found)
    assert any(result.checks for result in found.results)


def test_progress_is_reported_for_each_kernel() -> None:
    told = []
    found = kernelhub.verify(
        "fp8_gemm", backend=["torch", "cpp"], device="cpu", budget_s=1e-9, progress=lambda *a: told.append(a)
    )
    names = [f"fp8_gemm {result.kernel}" for result in found.results]
    assert told == [(name, place, len(names)) for place, name in enumerate(names)]
    assert all(result.left_out for result in found.results), "each ran one case and left the rest for lack of time"
    assert found.ok


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "atention"}, "'atention' is not an op"),
        ({"backend": "tritn"}, r"'tritn' is not a backend or kernel \(did you mean triton\?\)"),
        ({"device": "cuda:99"}, "there is no cuda:99 here"),
        ({"device": "meta"}, "neither a GPU nor the CPU"),
        ({"device": "H200"}, "device: "),
    ],
)
def test_wrong_questions_are_errors(arguments, message) -> None:
    with pytest.raises(kernelhub.errors.ConfigurationError, match=message):
        kernelhub.verify(**arguments)
