"""Experts' weights in a kernel's own layout: packed by a plan with all they have, given back whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import kernelhub
from kernelhub.backends.torch.moe import KERNELS as OF_TORCH
from kernelhub.backends.torch.moe.experts import Experts
from kernelhub.dispatch.constraint import OnDevice, anything
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.errors import InvalidArgument, NoKernel
from kernelhub.ops.moe.experts.adapter import PackingExperts, Values
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.weights import Matrix
from kernelhub.ops.packed import PackedWeight, Tensors
from tests.dispatch.backends import EVERYWHERE, register

TAG = "experts.mirror.v1"
SIZES = {"tokens": 5, "num_experts": 6, "top_k": 2, "hidden_size": 64, "intermediate_size": 32}
LAYER = tuple(side + part for part in ("", "_scale", "_global_scale", "_bias") for side in ("w13", "w2"))
FORMS = {
    "plain": {},
    "biased": {"bias": True, "activation": "swiglu_oai"},
    "fp8_channel": {"weights": "fp8_channel"},
    "nvfp4": {"weights": "nvfp4", "bias": True},
    "mxint4": {"weights": "mxint4", "bias": True},
}


class Mirrored(Experts, PackingExperts):
    """Rows of weights, of their scales and of biases from the last to the first."""

    def pack(
        self, side: str, weight: Tensor, scale: Tensor | None, global_scale: Tensor | None, bias: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Any]:
        parts = {"weight": weight, "scale": scale, "global_scale": global_scale, "bias": bias}
        return {name: mirrored(part) if name != "global_scale" else part for name, part in parts.items()}, unmirrored

    def launch(
        self, x: Tensor, w13: Matrix, w2: Matrix, topk_weights: Tensor, topk_ids: Tensor, values: Values, out: Tensor
    ) -> None:
        def back(matrix: Matrix) -> Matrix:
            channel = matrix.channel_scale
            if channel is not None and channel.stride(1):
                channel = mirrored(channel)
            return Matrix(mirrored(matrix.weight), mirrored(matrix.scale), channel, mirrored(matrix.bias))

        super().launch(x, back(w13), back(w2), topk_weights, topk_ids, values, out)


def mirrored(part: Tensor | None) -> Any:
    if part is None:
        return None
    raw = part.view(torch.uint8) if part.itemsize == 1 else part
    return raw.flip(1).view(part.dtype)


def unmirrored(packed: PackedWeight) -> Tensors:
    assert packed.facts["side"] in ("w13", "w2")
    return tuple(mirrored(part) if name != "global_scale" else part for name, part in packed.tensors.items())


def record(name: str = "mirror.k", tag: str = TAG, target: str = "Mirrored") -> Kernel:
    (of_torch,) = (kernel for kernel in OF_TORCH if kernel.op == "fused_moe")
    fields = {field for constraint in of_torch.constraints for field in constraint.fields}
    return Kernel(
        op="fused_moe",
        name=name,
        target=f"{__name__}:{target}",
        summary="a test's",
        band=Band.PLUGIN,
        standings=EVERYWHERE,
        constraints=(OnDevice("cpu"), anything(*sorted(fields))),
        features=of_torch.features,
        layouts=(tag,),
        packs_to=tag,
    )


def layer(arguments: dict[str, Any]) -> dict[str, Tensor]:
    return {name: arguments[name] for name in LAYER if arguments.get(name) is not None}


def packed(arguments: dict[str, Any], backend: str = "mirror.k") -> dict[str, Any]:
    plan = kernelhub.fused_moe.prepare(**arguments, backend=backend)
    w13, w2 = plan.pack(**layer(arguments))
    return {name: item for name, item in arguments.items() if name not in LAYER} | {"w13": w13, "w2": w2}


@pytest.fixture(autouse=True)
def mirror(clean_hub):
    register("mirror", record())


@pytest.mark.parametrize("form", FORMS)
class TestPacking:
    def test_packed_weights_give_the_same_bits(self, form) -> None:
        arguments = moe_inputs(**SIZES, **FORMS[form])
        want = kernelhub.fused_moe(**arguments, backend="torch")
        mine = packed(arguments)
        assert torch.equal(kernelhub.fused_moe(**mine), want)
        assert kernelhub.fused_moe.explain(**mine).selected == "mirror.k"
        step = (arguments["x"], arguments["topk_weights"], arguments["topk_ids"])
        assert torch.equal(kernelhub.fused_moe.prepare(**mine).run(*step), want)
        assert torch.equal(kernelhub.fused_moe.prepare(**arguments, backend="mirror").run(*step), want)

    def test_they_come_back_bit_for_bit(self, form) -> None:
        arguments = moe_inputs(**SIZES, **FORMS[form])
        mine = packed(arguments)
        for side in ("w13", "w2"):
            names = (side, f"{side}_scale", f"{side}_global_scale", f"{side}_bias")
            for name, got in zip(names, mine[side].unpack(), strict=True):
                want = arguments.get(name)
                assert (got is None) == (want is None)
                if want is not None:
                    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))

    def test_a_kernel_without_a_layout_takes_what_its_plan_packs(self, form) -> None:
        arguments = moe_inputs(**SIZES, **FORMS[form])
        mine = packed(arguments, "torch")
        assert mine["w13"].layout == mine["w2"].layout == "checkpoint"
        assert torch.equal(kernelhub.fused_moe(**mine), kernelhub.fused_moe(**arguments))

    def test_they_go_through_torch_compile(self, form) -> None:
        torch._dynamo.reset()
        mine = packed(moe_inputs(**SIZES, **FORMS[form]))
        want = kernelhub.fused_moe(**mine) * 2
        counter = CompileCounterWithBackend("aot_eager")
        rest = {name: item for name, item in mine.items() if name != "x"}
        run = torch.compile(lambda x: kernelhub.fused_moe(x, **rest) * 2, fullgraph=True, backend=counter)
        assert torch.equal(run(mine["x"]), want)
        plan = kernelhub.fused_moe.prepare(**mine)
        step = (mine["x"], mine["topk_weights"], mine["topk_ids"])
        run = torch.compile(lambda *step: plan.run(*step) * 2, fullgraph=True, backend=counter)
        assert torch.equal(run(*step), want)
        assert counter.frame_count == 2


class TestRefusals:
    def test_no_other_kernel_reads_them(self) -> None:
        mine = packed(moe_inputs(**SIZES))
        with pytest.raises(NoKernel, match=TAG):
            kernelhub.fused_moe(**mine, backend="torch")
        with pytest.raises(NoKernel, match=TAG):
            kernelhub.fused_moe(**moe_inputs(**SIZES), backend="mirror")

    def test_both_are_packed_together(self) -> None:
        register("other", record("other.k", "experts.other.v1"))
        arguments = moe_inputs(**SIZES)
        mine, others = packed(arguments), packed(arguments, "other.k")
        biased = packed(moe_inputs(**SIZES, weights="fp8_channel"))
        for change, match in (
            ({"w2": arguments["w2"]}, "w2 is not packed"),
            ({"w13": arguments["w13"]}, "w13 is not packed"),
            ({"w2": mine["w13"]}, "w2 is packed for w13"),
            ({"w2": others["w2"]}, "w2 is experts.other.v1; w13 is experts.mirror.v1"),
            ({"w2": biased["w2"]}, "w2 is fp8_channel; w13 is plain"),
            ({"w2_bias": torch.zeros(6, 64)}, "w2_bias is given beside a packed weight"),
        ):
            with pytest.raises(InvalidArgument, match=match):
                kernelhub.fused_moe(**mine | change)
            kernelhub.fused_moe(**mine)
            with pytest.raises(InvalidArgument, match=match):
                kernelhub.fused_moe(**mine | change)

    def test_tokens_that_do_not_fit_them_are_reported(self) -> None:
        mine = packed(moe_inputs(**SIZES))
        for change, parameter in (({"x": torch.zeros(5, 32)}, "w13"), ({"x": mine["x"].half()}, "w13")):
            with pytest.raises(InvalidArgument) as caught:
                kernelhub.fused_moe(**mine | change)
            assert caught.value.parameter == parameter

    def test_a_plan_packs_its_own_form_only(self) -> None:
        plan = kernelhub.fused_moe.prepare(**moe_inputs(**SIZES), backend="mirror")
        for change, match in (
            ({"hidden_size": 32}, "w13 has shape"),
            ({"intermediate_size": 64}, "makes intermediate_size 64; the plan is for intermediate_size 32"),
            ({"weights": "fp8_channel"}, "makes weights fp8_channel|activation_dtype"),
            ({"bias": True}, "w13_bias makes w13_bias True; the plan is for w13_bias False"),
        ):
            with pytest.raises(InvalidArgument, match=match):
                plan.pack(**layer(moe_inputs(**SIZES | change)))
        with pytest.raises(InvalidArgument, match="w13 is"):
            plan.pack(**layer(packed(moe_inputs(**SIZES))))
