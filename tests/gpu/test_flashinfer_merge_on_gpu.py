"""FlashInfer's merging of states and its quantisers on the device. Only what is built ahead runs; see
`tests.gpu.test_flashinfer_on_gpu`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.ops.merge.inputs import merge_inputs
from kernelhub.ops.merge.tolerance import largest_error_allowed, lse_error_allowed
from kernelhub.ops.quant.inputs import activations
from kernelhub.ops.quant.tolerance import round_trip_error_allowed
from tests.contract.merge import MergeOfHalves
from tests.contract.quant import same
from tests.gpu.test_attention_on_gpu import captured
from tests.gpu.test_flashinfer_on_gpu import nothing_is_compiled, reasons

pytestmark = pytest.mark.gpu
_ = nothing_is_compiled  # a fixture
MERGE = "flashinfer.merge"


def skip_unless_able(arguments: dict[str, Any]) -> None:
    selection = kernelhub.merge_attention_states.explain(**arguments, backend=MERGE)
    if selection.selected != MERGE:
        pytest.skip(f"{MERGE} cannot run here, which leaves it unchecked: {reasons(selection)}")


class TestMerge(MergeOfHalves):
    kernel = MERGE

    @pytest.fixture(autouse=True)
    def runs_here(self):
        skip_unless_able(self.inputs())

    @pytest.mark.parametrize("parts", [2, 5])
    @pytest.mark.parametrize("heads", [128, 96, 7])
    def test_at_real_sizes(self, heads, parts) -> None:
        arguments = self.inputs(tokens=2000, num_heads=heads, head_dim=128, parts=parts)
        self.check(self.run(arguments, return_lse=True), arguments)

    @pytest.mark.parametrize("parts", [2, 4])
    def test_stands_in_a_graph_and_waits_for_nothing(self, parts) -> None:
        arguments = self.inputs(tokens=300, num_heads=32, head_dim=128, parts=parts)
        out, lse = torch.empty_like(arguments["outs"][0]), torch.empty_like(arguments["lses"][0])
        graph = captured(lambda: self.run(arguments, out=out, out_lse=lse))
        for seed in (1, 2):
            others = self.inputs(tokens=300, num_heads=32, head_dim=128, parts=parts, seed=seed)
            for name in ("outs", "lses"):
                for part, other in zip(arguments[name], others[name], strict=True):
                    part.copy_(other)
            graph.replay()
            self.check((out, lse), others)
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.run(arguments, return_lse=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("parts", [2, 3])
def test_beyond_two_to_the_32_elements_of_states(parts) -> None:
    """What a launch counts by 32 bits is several."""
    if torch.cuda.mem_get_info()[0] < 70 << 30:
        pytest.skip("70 GB of memory are not free: 1 case")
    counted = 1 if parts == 2 else parts  # states that a launch counts together
    rows = (1 << 32) // counted // (128 * 128) + 40
    small = merge_inputs(parts=parts, tokens=40, device="cuda")
    skip_unless_able(small)
    outs = [part.new_zeros(rows, 128, 128) for part in small["outs"]]
    lses = [part.new_zeros(128, rows) for part in small["lses"]]
    for name, places in (("outs", outs), ("lses", [lse.t() for lse in lses])):
        for place, part in zip(places, small[name], strict=True):
            place[-40:] = part if name == "outs" else part.t()
    out, lse = kernelhub.merge_attention_states(outs, lses, return_lse=True, backend=MERGE)
    want, want_lse = kernelhub.merge_attention_states.reference(**small, return_lse=True, dtype=torch.float64)
    largest = max(float(part.double().nan_to_num().abs().max()) for part in small["outs"])
    assert float((out[-40:].double() - want).abs().max()) <= largest_error_allowed(out.dtype, largest)
    keys = want_lse != -torch.inf
    assert ((lse[:, -40:].double() - want_lse).abs() <= lse_error_allowed(want_lse))[keys].all()
    assert not out[:-40].any()


def forced(kernel: str, x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """By FlashInfer's kernel, against which nothing speaks but that its bits are its own."""
    function, name = getattr(kernelhub, kernel.removesuffix("_kv")), f"flashinfer.{kernel}"
    selection = function.explain(x, **options, backend=name)
    decision = next(item for item in selection.decisions if item.kernel == name)
    others = [item.reason for item in decision.rejections if item.code != "known_bad"]
    if others:
        pytest.skip(f"{name} cannot run here: {others[0]}")
    with kernelhub.use(unsafe=True):
        result: tuple[torch.Tensor, ...] = function(x, **options, backend=name)
    return result


class TestQuantisers:
    """Ordinary numbers; what is known to differ stands with the records."""

    @pytest.mark.parametrize("shape", [(5, 320), (2048, 7168), (1, 32)])
    @pytest.mark.parametrize("op", ["quantize_mxfp4", "quantize_mxfp8"])
    def test_powers_of_two_of_finite_float16_are_those_of_the_op(self, op, shape) -> None:
        x = activations(*shape, dtype=torch.float16, device="cuda")
        got = forced(op, x, scale_rounding="up")
        want = getattr(kernelhub, op).reference(x.cpu(), "up")
        assert all(same(one.cpu(), other) for one, other in zip(got, want, strict=True))

    @pytest.mark.parametrize("shape", [(5, 320), (2048, 7168), (1, 32)])
    @pytest.mark.parametrize("kernel", ["quantize_nvfp4", "quantize_nvfp4_kv"])
    def test_nvfp4_comes_back_within_half_a_step(self, kernel, shape) -> None:
        x = activations(*shape, device="cuda")
        got = forced(kernel, x)
        back = kernelhub.dequantize_nvfp4(*got, out_dtype=torch.float32)
        factor = kernelhub.dequantize_nvfp4(torch.full_like(got[0], 0x22), *got[1:], out_dtype=torch.float32)
        allowed = round_trip_error_allowed(x, factor, True, x.dtype)
        assert ((back.double() - x.double()).abs() <= 1.0001 * allowed).all()

    @pytest.mark.parametrize("layout", ["row", "column"])
    def test_groups_come_back_within_half_a_step(self, layout) -> None:
        x = activations(300, 7168, device="cuda")
        codes, scale = forced("quantize_fp8", x, granularity="group", scale_layout=layout)
        assert same(scale.cpu(), kernelhub.quantize_fp8.reference(x.cpu(), "group")[1])
        back = kernelhub.dequantize_fp8(codes, scale, out_dtype=torch.float32)
        factor = scale.repeat_interleave(128, 1)
        assert (
            (back.double() - x.double()).abs() <= 1.0001 * round_trip_error_allowed(x, factor, False, x.dtype)
        ).all()
