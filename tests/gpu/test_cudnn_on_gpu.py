"""cuDNN on a GPU: the contract of attention, real sizes, what lies around a sequence. Skipped where it cannot run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.ops.attention.inputs import AttentionModel, attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from tests.contract.attention import DenseContract, largest_value, split

pytestmark = pytest.mark.gpu

KERNEL = "cudnn.sdpa"
GROUPED = AttentionModel("grouped", 8, 2, 128, 128)


def needs(arguments: dict[str, Any]) -> None:
    """Skip where the kernel cannot run, with the reason."""
    args, kwargs = split(arguments)
    verdict = kernelhub.attention.explain(*args, backend=KERNEL, **kwargs)
    if verdict.selected != KERNEL:
        decision = next(item for item in verdict.decisions if item.kernel == KERNEL)
        pytest.skip(f"{KERNEL}: {decision.reason}")


def agrees(arguments: dict[str, Any]) -> torch.Tensor:
    args, kwargs = split(arguments)
    out, lse = kernelhub.attention(*args, backend=KERNEL, return_lse=True, **kwargs)
    want, want_lse = kernelhub.attention.reference(*args, return_lse=True, **kwargs)
    agreement = compare_out(out, want, largest_value(arguments))
    assert agreement.ok, str(agreement)
    assert compare_lse(lse, want_lse) <= lse_tolerance(out.dtype)
    return out


class TestSdpa(DenseContract):
    kernel = KERNEL
    fewest_cases = 25

    @pytest.fixture(autouse=True)
    def present(self) -> None:
        needs(self.inputs(self.plain))


class TestNumbers:
    @pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128), (256, 256)])
    @pytest.mark.parametrize(
        "lens",
        [
            ((3000, 100, 1, 900), (3000, 100, 1, 900)),
            ((500, 100, 0, 7, 60), (3000, 100, 40, 0, 20)),
            ((1, 1, 1), (700, 3, 2000)),
        ],
        ids=["prefill", "chunked", "one query"],
    )
    def test_ragged(self, lens, widths) -> None:
        model = AttentionModel("wide", 8, 2, *widths)
        arguments = attention_inputs(model, q_lens=lens[0], kv_lens=lens[1], device="cuda") | {"causal": True}
        needs(arguments)
        agrees(arguments)
        agrees(arguments | {"window": (100, 0)})
        agrees(arguments | {"causal": False})

    def test_what_lies_around_a_sequence_does_not_reach_it(self) -> None:
        arguments = attention_inputs(GROUPED, q_lens=(100, 77, 30), kv_lens=(300, 77, 130), device="cuda")
        arguments |= {"causal": True}
        needs(arguments)
        want = agrees(arguments)
        for name in ("q", "k", "v"):
            around = torch.full((len(arguments[name]) + 600, *arguments[name].shape[1:]), torch.nan, device="cuda")
            around = around.to(arguments[name].dtype)
            around[300:-300] = arguments[name]
            arguments[name] = around[300:-300]
        assert torch.equal(agrees(arguments), want)
        arguments["k"][300:377] = torch.nan
        arguments["v"][300:377] = torch.nan
        args, kwargs = split(arguments)
        out = kernelhub.attention(*args, backend=KERNEL, **kwargs)
        for mine in (slice(0, 100), slice(177, None)):
            assert torch.equal(out[mine], want[mine]), "a neighbour's values reach a sequence"

    def test_tokens_past_the_last_offset_are_left_alone(self) -> None:
        arguments = attention_inputs(GROUPED, q_lens=(100, 77), kv_lens=(300, 77), device="cuda") | {"causal": True}
        needs(arguments)
        want = agrees(arguments)
        longer = arguments | {"q": torch.cat([arguments["q"], arguments["q"][:50]])}
        args, kwargs = split(longer)
        out = torch.full_like(longer["q"], -777.0)
        kernelhub.attention(*args, backend=KERNEL, out=out, **kwargs)
        assert (out[-50:] == -777.0).all()
        assert torch.equal(out[:-50], want)

    def test_no_call_waits_for_the_gpu(self) -> None:
        arguments = attention_inputs(GROUPED, q_lens=(100, 77), kv_lens=(300, 77), device="cuda") | {"causal": True}
        needs(arguments)
        args, kwargs = split(arguments)
        try:
            for _ in range(3):
                kernelhub.attention(*args, backend=KERNEL, **kwargs)
                torch.cuda.set_sync_debug_mode("error")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        agrees(arguments)
