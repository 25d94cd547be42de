"""Packed weights: what a plan says of them, which kernels take them, and that they come back."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.errors import InvalidArgument, NoKernel, RegistrationError
from kernelhub.ops.gemm.fp4.adapter import Fp4GemmAdapter
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.packed import PackedWeight, PackingAdapter, described
from tests.conftest import DEVICE
from tests.dispatch.backends import EVERYWHERE, record, register


class Mirrored(Fp4GemmAdapter, PackingAdapter):
    """Wants rows of the weight last to first, and multiplies by the reference."""

    def pack(self, *weight):
        codes, scale, global_scale = weight
        return {"codes": codes.flip(0), "scale": scale.view(torch.uint8).flip(0), "global_scale": global_scale}, mirror

    def launch(self, a, b, bias, out):
        scale = b.scale.view(torch.uint8).flip(0).view(torch.float8_e4m3fn)
        out.copy_(kernelhub.fp4_gemm.reference(a.codes, b.codes.flip(0), b_scale=scale, b_global_scale=b.global_scale))


def mirror(packed: PackedWeight) -> tuple[torch.Tensor | None, ...]:
    codes, scale = packed.tensors["codes"].flip(0), packed.tensors["scale"].flip(0)
    return codes, scale.view(packed.facts["scale_dtype"]), packed.tensors["global_scale"]


def fp4_record(name: str = "mirror.k", **more: Any) -> Kernel:
    constraints = (anything("device", "a_format", "b_format", "out_dtype", "n", "k"),)
    return Kernel("fp4_gemm", name, f"{__name__}:Mirrored", "mirrored", Band.PLUGIN, constraints, **more)


@pytest.fixture
def arguments() -> dict[str, Any]:
    return fp4_gemm_inputs(tokens=3, n=8, k=64, device=DEVICE)


def weight(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in ("b", "b_scale", "b_global_scale")}


def test_its_parts_and_its_description_make_it_again() -> None:
    facts = {"format": "nvfp4", "scale": (torch.float8_e4m3fn, (3, 4)), "bias_dtype": None}
    tensors = {"codes": torch.ones(2, 3), "scale": None, "bias": torch.zeros(3)}
    one = PackedWeight("mirror.v1", "fp4_gemm", "torch.dequantized", tensors, (3, 8), torch.uint8, facts)
    other = described(one.parts(), one.description)
    about = [(w.layout, w.op, w.kernel, w.shape, w.dtype, w.facts, list(w.tensors)) for w in (one, other)]
    assert about[0] == about[1]
    assert all(other.tensors[name] is tensor for name, tensor in tensors.items())


class TestAKernelThatPacks:
    def test_its_plan_packs_and_only_it_reads_that(self, arguments) -> None:
        register("mirror", fp4_record(layouts=("checkpoint", "mirror.v1"), packs_to="mirror.v1"))
        plan = kernelhub.fp4_gemm.prepare(**arguments, backend="mirror")
        assert (plan.layout, plan.needs_packing) == ("mirror.v1", False)
        packed = plan.pack(**weight(arguments))
        assert torch.equal(packed.tensors["codes"], arguments["b"].flip(0))
        selection = kernelhub.fp4_gemm.explain(arguments["a"], packed)
        assert selection.selected == "mirror.k"
        assert selection.problem.weight_layout == "mirror.v1"
        others = [decision for decision in selection.decisions if decision.kernel != "mirror.k"]
        assert others
        for decision in others:
            codes = {item.code: item for item in decision.rejections}
            assert "layout" in codes
            assert "these are mirror.v1" in codes["layout"].reason
            assert "run mirror.k" in codes["layout"].remedy
            assert "unpack()" in codes["layout"].remedy
        want = kernelhub.fp4_gemm.reference(**arguments).bfloat16()
        assert torch.equal(kernelhub.fp4_gemm(arguments["a"], packed), want)

    def test_another_kernel_refuses_it_even_when_requested(self, arguments) -> None:
        register("mirror", fp4_record(layouts=("checkpoint", "mirror.v1"), packs_to="mirror.v1"))
        packed = kernelhub.fp4_gemm.prepare(**arguments, backend="mirror").pack(**weight(arguments))
        with pytest.raises(NoKernel, match=r"layout: reads weights as checkpoint; these are mirror\.v1"):
            kernelhub.fp4_gemm(arguments["a"], packed, backend="torch")
        with kernelhub.use(disable="mirror"), pytest.raises(NoKernel, match=r"unpack\(\)"):
            kernelhub.fp4_gemm(arguments["a"], packed)

    def test_the_selection_says_how_weights_are_taken(self, arguments) -> None:
        register("mirror", fp4_record(layouts=("checkpoint", "mirror.v1"), packs_to="mirror.v1"))
        selection = kernelhub.fp4_gemm.explain(**arguments, backend="mirror")
        assert "packing to mirror.v1 is optional" in str(selection)
        assert selection.to_dict()["weights"] == {
            "layout": "checkpoint",
            "reads": ["checkpoint", "mirror.v1"],
            "packs_to": "mirror.v1",
            "needs_packing": False,
        }
        assert "weights" not in kernelhub.explain("concat_mla_k", device="CPU").to_dict()

    def test_a_kernel_that_needs_it_refuses_a_checkpoint_s_weight(self, arguments) -> None:
        register("mirror", fp4_record(layouts=("mirror.v1",), packs_to="mirror.v1"))
        with pytest.raises(NoKernel, match=r"pack them as mirror\.v1"):
            kernelhub.fp4_gemm(**arguments, backend="mirror")
        assert kernelhub.fp4_gemm.explain(**arguments).selected != "mirror.k"
        plan = kernelhub.fp4_gemm.prepare(**arguments, backend="mirror")
        assert (plan.layout, plan.needs_packing) == ("mirror.v1", True)
        packed = plan.pack(**weight(arguments))
        want = kernelhub.fp4_gemm.reference(**arguments).bfloat16()
        assert torch.equal(plan.run(arguments["a"], packed), want)
        assert torch.equal(kernelhub.fp4_gemm(arguments["a"], packed), want)
        with pytest.raises(InvalidArgument, match=r"give what its pack\(\) gives"):
            plan.run(arguments["a"], **weight(arguments))
        assert kernelhub.fp4_gemm.prepare(**arguments).kernel != "mirror.k"
        selection = kernelhub.explain("fp4_gemm", device="CPU", weight_layout="mirror.v1")
        assert selection.selected == "mirror.k"
        assert "is required" in str(selection)
        assert selection.to_dict()["weights"]["needs_packing"]

    def test_of_several_that_need_it_a_plan_is_for_the_one_that_ranks_first(self, arguments) -> None:
        more = {"standings": EVERYWHERE}
        register("other", fp4_record("other.k", layouts=("other.v1",), packs_to="other.v1", **more))
        register("mirror", fp4_record(layouts=("mirror.v1",), packs_to="mirror.v1", **more))
        prepare = kernelhub.fp4_gemm.prepare
        assert prepare(**arguments, backend=("mirror", "other")).kernel == "mirror.k"
        assert prepare(**arguments, backend=("other", "mirror")).kernel == "other.k"
        with kernelhub.use(disable=("torch", "triton", "cpp")):
            assert prepare(**arguments).kernel == "mirror.k"
        with kernelhub.use(disable=("torch", "triton", "cpp"), prefer="other"):
            assert prepare(**arguments).kernel == "other.k"

    def test_unpack_gives_the_checkpoint_s_bits(self, arguments) -> None:
        register("mirror", fp4_record(layouts=("checkpoint", "mirror.v1"), packs_to="mirror.v1"))
        packed = kernelhub.fp4_gemm.prepare(**arguments, backend="mirror").pack(**weight(arguments))
        again = pickle.loads(pickle.dumps(packed))
        for one in (packed, again, packed.to("cpu")):
            for got, want in zip(one.unpack(), weight(arguments).values(), strict=True):
                assert got.dtype is want.dtype
                assert torch.equal(got.cpu().view(torch.uint8), want.cpu().view(torch.uint8))


class TestAKernelThatDoesNot:
    def test_its_plan_gives_the_weight_as_it_is_and_every_kernel_takes_that(self, arguments) -> None:
        plan = kernelhub.fp4_gemm.prepare(**arguments, backend="torch")
        assert (plan.layout, plan.needs_packing) == ("checkpoint", False)
        packed = plan.pack(**weight(arguments))
        assert packed.layout == "checkpoint"
        assert packed.tensors["codes"] is arguments["b"]
        for backend in ("torch", "triton"):
            want = kernelhub.fp4_gemm(**arguments, backend=backend)
            assert torch.equal(kernelhub.fp4_gemm(arguments["a"], packed, backend=backend), want)
        assert "no repacking needed" in str(plan.selection)


class TestThePackedWeight:
    def test_is_printable_typed_and_cannot_be_changed(self, arguments) -> None:
        packed = kernelhub.fp4_gemm.prepare(**arguments, backend="triton").pack(**weight(arguments))
        assert isinstance(packed, kernelhub.PackedWeight)
        text = repr(packed)
        device = arguments["a"].device
        for part in (packed.layout, "triton.fp4_gemm", "uint8 [8, 32]", "format=nvfp4", f"bytes on {device}"):
            assert part in text
        assert packed.num_bytes == sum(t.numel() * t.itemsize for t in packed.tensors.values())
        assert (packed.shape, packed.dtype, packed.get_device()) == (
            (8, 32),
            torch.uint8,
            device.index if device.index is not None else -1,
        )
        with pytest.raises(dataclasses.FrozenInstanceError):
            packed.layout = "other"

    def test_of_another_op_is_refused(self, arguments) -> None:
        packed = kernelhub.fp4_gemm.prepare(**arguments, backend="triton").pack(**weight(arguments))
        stranger = dataclasses.replace(packed, op="fp8_gemm")
        with pytest.raises(InvalidArgument, match="is packed for fp8_gemm"):
            kernelhub.fp4_gemm(arguments["a"], stranger)


class TestRecords:
    def test_a_layout_that_is_packed_to_must_be_read(self) -> None:
        with pytest.raises(RegistrationError, match="not among its layouts"):
            register("mirror", fp4_record(packs_to="mirror.v1"))

    def test_an_op_without_weights_has_no_layouts(self) -> None:
        with pytest.raises(RegistrationError, match="takes no packed weights"):
            register("ones", record("ones.k", "Ones", layouts=("mirror.v1",)))
