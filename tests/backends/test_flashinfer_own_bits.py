"""FlashInfer's quantisers, which give its own bits: what they keep of the contracts, what not, and who gets them."""

from __future__ import annotations

import dataclasses
import importlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.backends.flashinfer import kernels as records
from kernelhub.backends.flashinfer.quant.forced import check_device
from kernelhub.backends.flashinfer.quant.requirements import tile_compiler
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.errors import InvalidArgument, KernelhubError
from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.quant.inputs import activations
from kernelhub.ops.quant.problem import QuantizeFp8Problem, QuantizeMxProblem, QuantizeNvfp4Problem
from kernelhub.ops.quant.tolerance import round_trip_error_allowed
from kernelhub.probes.device import simulated
from tests.backends import flashinfer_quantisers_fake as fake
from tests.backends.test_flashinfer import OnFake, _on_cpu
from tests.contract.quant import Case, bits, poison, same

UP = {"scale_rounding": "up"}
LEAST = torch.finfo(torch.float32).smallest_normal  # 2^-126


def group(label: str, shape: tuple[int, ...] = (5, 384), **options: Any) -> Case:
    return Case(label, "fp8", {"granularity": "group", **options}, shape)


CASES = [
    *(Case(f"{name} {shape}", name, UP, shape) for name in ("mxfp4", "mxfp8") for shape in ((5, 320), (1, 32), (96,))),
    *(Case(f"mxfp8 {shape}", "mxfp8", UP, shape) for shape in ((1, 1), (3, 31), (2, 3, 65))),
    *(Case(f"nvfp4 {shape}", "nvfp4", {}, shape) for shape in ((5, 320), (1, 16), (2, 3, 48), (32,))),
    *(Case(f"{name} float16", name, how, (5, 320), torch.float16) for name, how in (("nvfp4", {}), ("mxfp4", UP))),
    *(Case(f"kv {shape}", "nvfp4", {}, shape) for shape in ((5, 320), (1, 16), (2, 3, 48), (32,))),
    Case("kv float16", "nvfp4", {}, (5, 320), torch.float16),
    group("row by row"),
    group("column by column", (7, 384), scale_layout="column"),
    group("powers of two", ue8m0=True),
    group("powers of two, column by column", ue8m0=True, scale_layout="column"),
    group("as e8m0", scale_dtype=E8M0),
    group("of 24", (3, 96), group_size=24),
    group("a last one that is shorter", (2, 3, 200)),
    group("one dimension", (130,), scale_layout="column"),
    dataclasses.replace(group("float32"), dtype=torch.float32),
]


def kernel_of(case: Case) -> str:
    return "flashinfer.quantize_nvfp4_kv" if case.label.startswith("kv") else f"flashinfer.quantize_{case.format}"


def given(case: Case, **more: Any) -> Any:
    return activations(*case.shape, dtype=case.dtype, **more)


def of_the_library(case: Case, x: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of codes and scales, by the library's function, of what is filled up with zeros to whole groups."""
    rows = x.reshape(-1, x.shape[-1])
    size = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32, "fp8": case.options.get("group_size", 128)}[case.format]
    wide = torch.nn.functional.pad(rows, (0, -x.shape[-1] % size))
    if case.label.startswith("kv"):
        codes, scale = (torch.empty(len(rows), x.shape[-1] // part, dtype=torch.uint8) for part in (2, 16))
        fake.nvfp4_kv_quant(rows, kernelhub.quantize_nvfp4.reference(x)[2], codes, scale)
    elif case.format == "nvfp4":
        factor = kernelhub.quantize_nvfp4.reference(x)[2]
        codes, scale = fake.fp4_quantize(wide, factor, 16, False, False, is_global_scale_inversed=True)
    elif case.format == "mxfp4":
        codes, scale = fake.fp4_quantize(wide, None, 32, True, False)
    elif case.format == "mxfp8":
        codes, scale = fake.mxfp8_quantize(wide, False)
    else:
        up = case.options.get("ue8m0", False) or "scale_dtype" in case.options
        by_columns = up or case.options.get("scale_layout") == "column"
        least = 448.0 * LEAST
        codes, scale = fake.per_token_group_quant_8bit(wide, size, least, E4M3, by_columns, False, up)
        scale = scale.to(case.options.get("scale_dtype", torch.float32))
    return codes.view(torch.uint8)[:, : (x.shape[-1] + 1) // 2 if case.format.endswith("fp4") else x.shape[-1]], scale


class TestOwnBits(OnFake):
    @classmethod
    def accepted_cases(cls) -> list[Case]:
        return CASES

    def test_results_are_the_library_s_in_the_shapes_of_the_op(self, case: Case) -> None:
        x = given(case)
        got = case.quantize(x, **case.options, backend=kernel_of(case))
        shapes = [tensor.shape for tensor in case.quantize.reference(x, **case.options)]
        assert [tensor.shape for tensor in got] == shapes
        codes, scale = of_the_library(case, x)
        assert torch.equal(bits(got[0]), bits(codes))
        assert torch.equal(bits(got[1]), bits(scale))
        assert got[0].is_contiguous()
        if case.options.get("scale_layout") == "column" and x.ndim > 1:
            assert got[1].stride(-2) == 1
            assert got[1].stride(-1) * got[1].itemsize % 16 == 0
        else:
            assert got[1].is_contiguous()
        if case.format == "nvfp4":
            assert same(got[2], case.quantize.reference(x)[2])

    def test_destinations_and_operands_may_have_any_strides(self, case: Case) -> None:
        x = given(case)
        want = case.quantize(x, **case.options, backend=kernel_of(case))
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
        moved = wide[..., ::2]
        moved.copy_(x)
        outs = [poison(tensor) for tensor in want[:2]]
        spread = poison(torch.stack([want[0]] * 2, -1).flatten(-2))
        got = case.quantize(moved, **case.options, out=outs[0], out_scale=outs[1], backend=kernel_of(case))
        assert got[0] is outs[0]
        assert got[1] is outs[1]
        assert all(same(one, other) for one, other in zip(got, want, strict=True))
        gaps = spread[..., ::2]
        assert case.quantize(x, **case.options, out=gaps, backend=kernel_of(case))[0] is gaps
        assert same(gaps.contiguous(), want[0])
        assert (spread[..., 1::2].view(torch.uint8) == 0x5A).all()

    def test_ordinary_numbers_come_back_within_half_a_step(self, case: Case) -> None:
        """And a little more, by which reciprocals move the middle between two codes."""
        x = given(case)
        got = case.quantize(x, **case.options, backend=kernel_of(case))
        back = case.dequantize(*got, **case.back_options(), out_dtype=torch.float32, backend="torch")
        ones = torch.full_like(got[0].view(torch.uint8), 0x22 if case.format.endswith("fp4") else 0x38)
        factor = case.dequantize.reference(
            ones.view(got[0].dtype), *got[1:], **case.back_options(), out_dtype=torch.float32
        )
        allowed = round_trip_error_allowed(x, factor, case.format.endswith("fp4"), x.dtype)
        assert ((back.double() - x.double()).abs() <= 1.0001 * allowed).all()

    def test_no_rows_give_empty_results(self, case: Case) -> None:
        x = given(case)[..., None, :][..., :0, :]
        got = case.quantize(x, **case.options, backend=kernel_of(case))
        assert got[0].numel() == 0
        assert [tensor.shape for tensor in got] == [
            tensor.shape for tensor in case.quantize.reference(x, **case.options)
        ]


NVFP4 = ("flashinfer.quantize_nvfp4", "flashinfer.quantize_nvfp4_kv")


@pytest.mark.parametrize("kernel", NVFP4)
class TestGlobalScale(OnFake):
    def test_one_that_is_given_is_used_and_returned(self, kernel) -> None:
        x = activations(5, 64)
        factor = torch.tensor(0.02)
        codes, scale, same_factor = kernelhub.quantize_nvfp4(x, factor, backend=kernel)
        want = fake.fp4_quantize(x, factor.view(1), 16, False, False, is_global_scale_inversed=True)
        assert same_factor is factor
        assert torch.equal(codes, want[0])
        assert torch.equal(scale.view(torch.uint8), want[1])

    def test_one_that_is_made_is_written_where_it_is_wanted(self, kernel) -> None:
        x, place = activations(5, 64), torch.full((1,), torch.nan)
        got = kernelhub.quantize_nvfp4(x, out_global_scale=place, backend=kernel)
        assert got[2] is place
        assert same(place, kernelhub.quantize_nvfp4.reference(x)[2])


class TestPieces(OnFake):
    def test_what_a_launch_cannot_count_is_several(self, monkeypatch) -> None:
        from kernelhub.backends.flashinfer.quant import fp8

        x = activations(21, 256)
        for options in ({}, {"scale_layout": "column"}):
            want = kernelhub.quantize_fp8(x, "group", **options, backend="flashinfer")
            with monkeypatch.context() as patch:
                patch.setattr(fp8, "_MOST_ELEMENTS", 5 * 256)
                patch.setattr(fake, "LARGEST_LAUNCH", 5 * 256 + 256 + 1)
                got = kernelhub.quantize_fp8(x, "group", **options, backend="flashinfer")
            assert all(same(one, other) for one, other in zip(got, want, strict=True))

    def test_rows_for_caches_too(self, monkeypatch) -> None:
        from kernelhub.backends.flashinfer.quant import nvfp4_kv

        x = activations(21, 64)
        want = kernelhub.quantize_nvfp4(x, backend=NVFP4[1])
        monkeypatch.setattr(nvfp4_kv, "_MOST", 5 * 64)
        monkeypatch.setattr(fake, "LARGEST_LAUNCH", 5 * 64)
        fake.LAUNCHES.clear()
        got = kernelhub.quantize_nvfp4(x, backend=NVFP4[1])
        assert all(same(one, other) for one, other in zip(got, want, strict=True))
        assert fake.LAUNCHES == [(5, 64)] * 4 + [(1, 64)]


class TestWhatDiffers(OnFake):
    """What the entries of `KNOWN_BAD` say, against the bits of the ops."""

    def both(self, name: str, x: Tensor, *more: Any, **options: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        function = getattr(kernelhub, f"quantize_{name}".removesuffix("_kv"))
        got = function(x, *more, **options, backend=f"flashinfer.quantize_{name}")
        return got, function.reference(x, *more, **options)

    @pytest.mark.parametrize("name", ["nvfp4", "nvfp4_kv"])
    def test_nvfp4_has_another_byte_of_codes_in_some_hundreds(self, name) -> None:
        x = torch.randn(512, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
        got, want = self.both(name, x, torch.tensor([0.01]))
        differing = (got[0] != want[0]).float().mean()
        assert 1 / 1600 < differing < 1 / 400
        assert (got[1].view(torch.uint8) != want[1].view(torch.uint8)).float().mean() < 1 / 400

    @pytest.mark.parametrize("name", ["nvfp4", "nvfp4_kv"])
    def test_nvfp4_has_no_nan_and_gives_zeros_the_scale_0(self, name) -> None:
        x = torch.ones(3, 16).bfloat16()
        x[0, 3] = torch.nan
        x[1] = 0
        got, want = self.both(name, x, torch.tensor([0.01]))
        assert want[1].view(torch.uint8)[0] == 0x7F
        assert got[1].float()[0].isfinite().all()
        assert got[0][0, 1] >> 4 == 7
        assert got[1].float()[1] == 0
        assert want[1].float()[1] == 2.0**-9

    def test_of_bfloat16_for_caches_nan_hides_what_came_before(self) -> None:
        x = torch.ones(2, 16)
        x[:, 0], x[1, 2] = 100.0, torch.nan
        got, _ = self.both("nvfp4_kv", x.bfloat16(), torch.tensor([0.05]))
        assert got[1].float()[1] < got[1].float()[0] / 50
        assert (got[0][1, 7] & 15) == 7  # an ordinary 1, which now is the largest
        assert self.both("nvfp4_kv", x.half(), torch.tensor([0.05]))[0][1].float()[1] == got[1].float()[0]

    @pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
    def test_powers_of_two_of_finite_float16_are_those_of_the_op(self, name) -> None:
        each = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
        x = torch.where(each.isfinite(), each, 0.0).view(-1, 32)
        for rows in (x, x.view(32, -1).t().contiguous()):
            got, want = self.both(name, rows, **UP)
            assert all(same(one, other) for one, other in zip(got, want, strict=True))

    @pytest.mark.parametrize(("name", "largest"), [("mxfp4", 6.0), ("mxfp8", 448.0)])
    def test_small_groups_of_bfloat16_become_zeros(self, name, largest) -> None:
        sizes = torch.tensor([0.25, 0.75, 0.99, 1.0, 1.5]) * largest * LEAST
        x = sizes[:, None].repeat(1, 32).bfloat16()
        got, want = self.both(name, x, **UP)
        assert (got[0].view(torch.uint8)[:3] == 0).all()
        assert (want[0].view(torch.uint8)[:3] != 0).all()
        assert torch.equal(bits(got[0][3:]), bits(want[0][3:]))
        assert torch.equal(bits(got[1][3:]), bits(want[1][3:]))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("sign", [1, -1])
    def test_mx_gives_groups_with_infinity_the_largest_scale(self, dtype, sign) -> None:
        x = torch.ones(1, 32, dtype=dtype)
        x[0, 4] = sign * torch.inf
        for name, of_infinity in (("mxfp4", 7), ("mxfp8", 0x7E)):
            got, want = self.both(name, x, **UP)
            assert got[1].view(torch.uint8) == 254
            assert want[1].view(torch.uint8) < 254
            codes = got[0].view(torch.uint8)[0]
            place = codes[2] & 15 if name == "mxfp4" else codes[4]
            assert place == of_infinity
            codes[2 if name == "mxfp4" else 4] = 0
            assert (codes == 0).all()

    def test_mx_has_no_nan(self) -> None:
        x = torch.ones(2, 32).half()
        x[0, 4] = torch.nan
        x[1] = torch.nan
        got, want = self.both("mxfp4", x, **UP)
        assert want[1].view(torch.uint8)[0] == 255
        assert got[1].view(torch.uint8)[0] < 255
        assert got[0][0, 2] & 15 == 7
        got, want = self.both("mxfp8", x, **UP)
        assert want[0].view(torch.uint8)[0, 4] == 0x7F
        assert got[0].float()[0, 4] == 448
        assert got[1].view(torch.uint8)[1] == 255
        assert want[1].view(torch.uint8)[1] == 0

    def test_groups_column_by_column_are_those_of_the_op_where_numbers_are_finite(self) -> None:
        x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
        x = (x * torch.logspace(-44, 37, 64)[:, None]).bfloat16()
        x[3] = 0
        got, want = self.both("fp8", x, "group", scale_layout="column")
        assert all(same(one, other) for one, other in zip(got, want, strict=True))

    def test_groups_row_by_row_are_multiplied_by_reciprocals(self) -> None:
        x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
        got, want = self.both("fp8", x, "group")
        assert same(got[1], want[1])
        differing = (got[0].view(torch.uint8) != want[0].view(torch.uint8)).float().mean()
        assert 0 < differing < 1e-4

    def test_powers_of_two_of_groups_end_at_2_to_minus_33(self) -> None:
        got, want = self.both("fp8", torch.full((1, 128), 1e-20), "group", ue8m0=True)
        assert got[1] == 2.0**-33
        assert want[1] < 2.0**-70

    @pytest.mark.parametrize("layout", ["row", "column"])
    def test_groups_know_neither_infinity_nor_nan(self, layout) -> None:
        x = torch.ones(2, 128)
        x[0, 5], x[1, 5] = torch.inf, torch.nan
        got, want = self.both("fp8", x, "group", scale_layout=layout)
        assert got[1][0] == torch.inf
        assert want[1][0] < torch.inf
        assert got[0].float()[0].count_nonzero() == 1
        assert (got[0].float()[:, 5] == -448).all()
        assert want[0].float()[0, 5] == 448
        assert want[0].float()[1, 5].isnan()


@pytest.fixture
def known_bad_here(clean_hub) -> Iterator[None]:
    """The backend's records for a CPU with what is known of them, their adapters bound to the fake."""
    from tests.backends.flashinfer_fake import installed

    _ = HUB.settings
    HUB.remove_backend("flashinfer")
    module = types.SimpleNamespace(
        __name__="flashinfer on a CPU",
        BACKEND=records.BACKEND,
        KERNELS=tuple(map(_on_cpu, records.KERNELS)),
        KNOWN_BAD=records.KNOWN_BAD,
    )
    handle = kernelhub.register_backend(module)
    try:
        with installed():
            yield
    finally:
        handle.remove()
        HUB.restore()


PROBLEMS: dict[str, Any] = {
    "quantize_nvfp4": QuantizeNvfp4Problem,
    "quantize_mxfp4": QuantizeMxProblem,
    "quantize_mxfp8": QuantizeMxProblem,
    "quantize_fp8": QuantizeFp8Problem,
}
CALLS: dict[str, dict[str, Any]] = {
    "quantize_nvfp4": {},
    "quantize_mxfp4": UP,
    "quantize_mxfp8": UP,
    "quantize_fp8": {"granularity": "group"},
}


@pytest.mark.usefixtures("known_bad_here")
@pytest.mark.parametrize("op", CALLS)
class TestWhoGetsThem:
    def test_nobody_by_himself_or_by_name(self, op) -> None:
        function, x = getattr(kernelhub, op), activations(4, 128)
        assert not function.prepare(x, **CALLS[op]).kernel.startswith("flashinfer")
        with kernelhub.use(prefer="flashinfer"):
            assert not function.prepare(x, **CALLS[op]).kernel.startswith("flashinfer")
        with pytest.raises(KernelhubError, match=r"github\.com/flashinfer-ai/flashinfer"):
            function(x, **CALLS[op], backend="flashinfer")

    def test_who_says_that_it_is_unsafe(self, op) -> None:
        function, x = getattr(kernelhub, op), activations(4, 128)
        with kernelhub.use(**{op: "flashinfer"}, unsafe=True):
            plan = function.prepare(x, **CALLS[op])
            assert plan.kernel == f"flashinfer.{op}"
            assert all(same(one, other) for one, other in zip(plan.run(x), function(x, **CALLS[op]), strict=True))

    def test_even_then_a_call_gets_what_it_requested_or_an_error(self, op) -> None:
        """`unsafe` lets past every limit of a record, so the adapters know those that would be passed silently."""
        function, x = getattr(kernelhub, op), activations(4, 128)
        others = {"quantize_mxfp4": [{}], "quantize_mxfp8": [{}]}
        others["quantize_fp8"] = [{}, {"granularity": "block"}, {"granularity": "tensor"}]
        others["quantize_fp8"].append({"granularity": "token", "scale": torch.ones(4, 1)})
        with kernelhub.use(**{op: "flashinfer"}, unsafe=True):
            for options in others.get(op, []):
                with pytest.raises(InvalidArgument, match=r"give 'up'|give 'group'"):
                    function(x, **options)
            assert function(x, **CALLS[op])[0].shape[0] == 4


@pytest.mark.parametrize("device", ["H200", "A100"])
@pytest.mark.parametrize("op", ["quantize_nvfp4", "quantize_mxfp4", "quantize_mxfp8"])
def test_memory_that_nobody_wrote_is_no_result(op, device) -> None:
    """What `unsafe` would let past on a device for which kernels have no body."""
    with pytest.raises(InvalidArgument, match=rf"{op}: x is on NVIDIA {device}.*without a body"):
        check_device(op, PROBLEMS[op](device=simulated(device)))
    for newer in ("B200", "RTX5090"):
        check_device(op, PROBLEMS[op](device=simulated(newer)))


@pytest.mark.parametrize(
    ("op", "device", "facets", "codes"),
    [
        ("quantize_nvfp4", "B200", {"static": True}, set()),
        ("quantize_nvfp4", "H200", {}, {"capability"}),
        ("quantize_nvfp4", "RTX5090", {"dtype": "float16"}, set()),
        ("quantize_nvfp4", "B200", {"dtype": "float32"}, {"dtype"}),
        ("quantize_mxfp4", "B300", {"round_up": True}, set()),
        ("quantize_mxfp4", "B300", {}, {"value"}),
        ("quantize_mxfp8", "sm_121", {"round_up": True}, set()),
        ("quantize_mxfp8", "H200", {"round_up": True, "dtype": "float32"}, {"capability", "dtype"}),
        ("quantize_fp8", "B200", {"granularity": "group", "column": True, "ue8m0": True}, {"not_built"}),
        ("quantize_fp8", "B200", {"granularity": "group", "group_size": 2048}, {"not_built", "range"}),
        ("quantize_fp8", "H200", {"granularity": "token"}, {"not_built", "value", "capability"}),
    ],
)
def test_limits_are_reported(op, device, facets, codes) -> None:
    kernel = next(kernel for kernel in records.KERNELS if kernel.name == f"flashinfer.{op}")
    problem = PROBLEMS[op](device=simulated(device), **facets)
    machine = SimulatedMachine({"flashinfer": "0.6.18.post1"})
    found = (constraint.reject(problem, machine) for constraint in kernel.constraints)
    assert {rejection.code for rejection in found if rejection} == codes


@pytest.mark.parametrize(("value", "told"), [("1", True), ("0", False), ("", False)])
def test_scales_of_a_fourth_are_refused(value, told) -> None:
    machine = SimulatedMachine({"flashinfer": "0.6.18.post1"}, variables={"FLASHINFER_NVFP4_4OVER6": value})
    selection = kernelhub.explain("quantize_nvfp4", device="B200", machine=machine)
    decision = next(item for item in selection.decisions if item.kernel == "flashinfer.quantize_nvfp4")
    assert any("FLASHINFER_NVFP4_4OVER6=1" in item.reason for item in decision.rejections) is told


def test_modules_are_named_by_device() -> None:
    from kernelhub.backends.flashinfer.quant.requirements import fp4_modules

    problem = QuantizeMxProblem
    names = {device: fp4_modules(problem(device=simulated(device))) for device in ("B200", "B300", "RTX5090", "sm_121")}
    assert names == {
        "B200": ("fp4_quantization_100",),
        "B300": ("fp4_quantization_103",),
        "RTX5090": ("fp4_quantization_120f", "fp4_quantization_120"),
        "sm_121": ("fp4_quantization_120f", "fp4_quantization_121"),
    }


class TestTileCompiler:
    @pytest.fixture
    def site(self, tmp_path: Path, monkeypatch) -> Path:
        """A folder of packages, and no compiler anywhere."""
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda-13"))
        requirements = importlib.import_module(tile_compiler.__module__)  # the package has a function of that name
        monkeypatch.setattr(requirements, "folders", self.only(tmp_path))
        return tmp_path

    def only(self, site: Path) -> Any:
        """Folders of packages as they would be found were nothing else installed."""
        return lambda name: [site / name] if (site / name).is_dir() else []

    def compiler_in(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        path = folder / "tileiras"
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return path

    def test_what_lacks_is_reported_step_by_step(self, site: Path) -> None:
        assert tile_compiler().code == "package_missing"
        (site / "cuda" / "bindings").mkdir(parents=True)  # another that lives in the same namespace
        assert tile_compiler().code == "package_missing"
        (site / "cuda" / "tile").mkdir()
        assert tile_compiler().code == "package_version"
        (site / "cuda" / "tile" / "tune").mkdir()
        finding = tile_compiler()
        assert finding.code == "toolkit_missing"
        assert finding.remedy == 'pip install "cuda-tile[tileiras]>=1.4.0"'

    @pytest.mark.parametrize("place", ["nvidia/cu13/bin", "bin", "cuda-13/bin"])
    def test_the_compiler_is_found_where_cutile_looks(self, site: Path, place) -> None:
        (site / "cuda" / "tile" / "tune").mkdir(parents=True)
        path = self.compiler_in(site / place)
        finding = tile_compiler()
        assert finding.ok
        assert finding.value == str(path)
