"""What is missing, broken or of another version is told before anything is loaded; what fails to load is passed by."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.cutlass import libraries
from kernelhub.backends.cutlass.libraries import SCHEMAS, SGL, VLLM
from kernelhub.backends.shared import operators
from kernelhub.dispatch.constraint import Compiled
from kernelhub.dispatch.machine import Machine, SimulatedMachine
from kernelhub.errors import NoKernel
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.probes.package import find_library as find
from tests.backends import cutlass_fakes as fakes

HOPPER = (9, 0)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on sys.path, whose packages raise if they are imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    assert not {"vllm", "sgl_kernel"} & set(sys.modules)


def write(site: Path, package: str, *files: str, version: str = "0.33.0", distribution: str = "") -> Path:
    folder = site / package
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    metadata = site / f"{(distribution or package).replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution or package}\nVersion: {version}\n")
    importlib.invalidate_caches()
    return folder


def codes(kernel: str, op: str = "fp8_gemm", device: str = "H200", machine: Any = None, **facets: Any) -> set[str]:
    selection = kernelhub.explain(op, device=device, machine=machine or Machine(), backend=kernel, **facets)
    own = next(item for item in selection.decisions if item.kernel == kernel)
    return {rejection.code for rejection in own.rejections}


def reason(kernel: str, op: str = "fp8_gemm", device: str = "H200", machine: Any = None, **facets: Any) -> str:
    selection = kernelhub.explain(op, device=device, machine=machine or Machine(), backend=kernel, **facets)
    own = next(item for item in selection.decisions if item.kernel == kernel)
    return "; ".join(f"{rejection.reason} -> {rejection.remedy}" for rejection in own.rejections)


ROW = {"scaling": "row", "n": 1024, "k": 1024}
BLOCK = {"scaling": "block", "n": 1024, "k": 1024}
FP4 = {"a_format": "nvfp4", "b_format": "nvfp4", "n": 1024, "k": 1024}
ALL = SimulatedMachine({"triton": "3.7.1", "vllm": "0.33.0", "sgl_kernel": "0.3.21"})


def test_what_is_not_installed_is_said_with_what_to_install(site) -> None:
    assert 'pip install "vllm>=0.33"' in reason("cutlass.vllm_scaled_mm", **ROW)
    assert "pip install sglang-kernel" in reason("cutlass.sgl_fp8_scaled_mm", **ROW)
    assert 'pip install "sgl-kernel==0.3.21"' in reason("cutlass.sgl_fp8_blockwise", **BLOCK)


def test_a_package_without_its_library_is_broken(site) -> None:
    folder = write(site, "vllm")
    assert codes("cutlass.vllm_scaled_mm", **ROW) == {"package_broken"}
    assert f"no _C_stable_libtorch*.so or _C.abi3.so in {folder}" in reason("cutlass.vllm_scaled_mm", **ROW)


def test_a_whole_package_is_taken_without_being_imported(site) -> None:
    write(site, "vllm", "_C.abi3.so", "_C_stable_libtorch.abi3.so")
    write(site, "sgl_kernel", "sm90/common_ops.abi3.so", "sm100/common_ops.abi3.so", version="0.3.21",
          distribution="sgl-kernel")  # fmt: skip
    for kernel, facets in (("vllm_scaled_mm", ROW), ("vllm_blockwise", BLOCK), ("sgl_fp8_scaled_mm", ROW),
                           ("sgl_fp8_blockwise", BLOCK)):  # fmt: skip
        assert codes(f"cutlass.{kernel}", **facets) == set()
    assert codes("cutlass.vllm_fp4", "fp4_gemm", "B200", **FP4) == set()
    assert str(find(VLLM, HOPPER).value).endswith("_C_stable_libtorch.abi3.so")
    assert str(find(SGL, HOPPER).value).endswith("sm90/common_ops.abi3.so")
    assert str(find(SGL, (8, 9)).value).endswith("sm100/common_ops.abi3.so")


def test_versions_whose_scales_lie_otherwise_are_refused(site) -> None:
    write(site, "vllm", "_C.abi3.so", version="0.20.0")
    assert codes("cutlass.vllm_scaled_mm", **ROW) == set()
    assert codes("cutlass.vllm_scaled_mm", device="RTX5090", **ROW) == {"package_version"}
    assert codes("cutlass.vllm_blockwise", **BLOCK) == {"package_version"}
    assert codes("cutlass.vllm_fp4", "fp4_gemm", "B200", **FP4) == {"package_version"}


def test_the_renamed_distribution_has_no_product_in_blocks(site) -> None:
    write(site, "sgl_kernel", "sm90/common_ops.abi3.so", version="0.4.10", distribution="sglang-kernel")
    assert codes("cutlass.sgl_fp8_scaled_mm", **ROW) == set()
    assert codes("cutlass.sgl_fp8_blockwise", **BLOCK) == {"package_version"}


@pytest.mark.parametrize(
    ("kernel", "device", "facets", "code"),
    [
        ("vllm_scaled_mm", "A100", ROW, "capability"),
        ("vllm_scaled_mm", "B300", ROW, "capability"),
        ("vllm_scaled_mm", "H200", ROW | {"k": 2064}, "accuracy"),
        ("vllm_scaled_mm", "L40S", ROW | {"k": 2064}, "accuracy"),
        ("vllm_scaled_mm", "H200", ROW | {"out_dtype": "float16"}, "accuracy"),
        ("sgl_fp8_scaled_mm", "H200", ROW | {"k": 8192}, "accuracy"),
        ("vllm_scaled_mm", "B200", ROW | {"k": 8192, "out_dtype": "float16"}, None),
        ("vllm_scaled_mm", "RTX5090", ROW | {"k": 8192}, None),
        ("vllm_scaled_mm", "H200", ROW | {"k": 2048, "bias": True}, None),
        ("vllm_scaled_mm", "H200", ROW | {"n": 1000}, "divisibility"),
        ("vllm_scaled_mm", "B200", ROW | {"out_dtype": "float32"}, "dtype"),
        ("vllm_scaled_mm", "H200", BLOCK, "value"),
        ("sgl_fp8_scaled_mm", "RTX5090", ROW, "capability"),
        ("vllm_blockwise", "H200", BLOCK | {"k": 18432}, None),
        ("vllm_blockwise", "RTX5090", BLOCK, None),
        ("vllm_blockwise", "RTX5090", BLOCK | {"n": 576}, "divisibility"),
        ("vllm_blockwise", "L40S", BLOCK, "capability"),
        ("vllm_blockwise", "H200", BLOCK | {"bias": True}, "feature"),
        ("sgl_fp8_blockwise", "B200", BLOCK, "capability"),
    ],
)
def test_limits_of_fp8_gemm(kernel: str, device: str, facets: dict[str, Any], code: str | None) -> None:
    assert codes(f"cutlass.{kernel}", "fp8_gemm", device, ALL, **facets) == ({code} if code else set())


@pytest.mark.parametrize(
    ("device", "changes", "code"),
    [
        ("B200", {}, None),
        ("RTX5090", {}, None),
        ("H200", {}, "capability"),
        ("B200", {"a_format": "bfloat16"}, "value"),
        ("B200", {"k": 2080}, "divisibility"),
        ("B200", {"n": 1000}, "divisibility"),
        ("B200", {"out_dtype": "float32"}, "dtype"),
        ("B200", {"bias": True}, "feature"),
        ("B200", {"weight_layout": "nvfp4.scales128x4.v1"}, None),
    ],
)
def test_limits_of_fp4_gemm(device: str, changes: dict[str, Any], code: str | None) -> None:
    assert codes("cutlass.vllm_fp4", "fp4_gemm", device, ALL, **(FP4 | changes)) == ({code} if code else set())


def loads(monkeypatch, schemas: dict[str, str], **other: Any) -> list[str]:
    """torch loads a library of these operators from whatever file; the files that were."""
    made: list[Any] = []
    files: list[str] = []

    def load(file: str) -> None:
        files.append(file)
        made.append(fakes.register("_C", schemas, **other))

    monkeypatch.setattr(torch.ops, "load_library", load)
    monkeypatch.setattr(operators, "_files", {})
    files.clear()
    loads.made = made  # type: ignore[attr-defined]
    return files


@pytest.fixture
def clean_namespace():
    loads.made = []  # type: ignore[attr-defined]
    yield
    for library in loads.made:  # type: ignore[attr-defined]
        library._destroy()


def test_the_library_is_loaded_once(site, monkeypatch, clean_namespace) -> None:
    folder = write(site, "vllm", "_C_stable_libtorch.abi3.so")
    files = loads(monkeypatch, fakes.VLLM)
    for _ in range(2):
        libraries.supports(VLLM, "cutlass_scaled_mm_supports_fp8", HOPPER)
        assert callable(libraries.operator(VLLM, "cutlass_scaled_mm", HOPPER))
    assert files == [str(folder / "_C_stable_libtorch.abi3.so")]


def test_a_changed_schema_is_reported(site, monkeypatch, clean_namespace) -> None:
    write(site, "vllm", "_C_stable_libtorch.abi3.so")
    swapped = "(Tensor! out, Tensor a, Tensor b, Tensor b_scales, Tensor a_scales, Tensor? bias) -> ()"
    loads(monkeypatch, fakes.VLLM | {"cutlass_scaled_mm": swapped})
    with pytest.raises(ImportError, match=r"_C::cutlass_scaled_mm takes \(.*Tensor b_scales, Tensor a_scales"):
        libraries.operator(VLLM, "cutlass_scaled_mm", HOPPER)


def test_a_library_without_the_operator_or_the_device_is_reported(site, monkeypatch, clean_namespace) -> None:
    write(site, "vllm", "_C_stable_libtorch.abi3.so")
    some = {name: schema for name, schema in fakes.VLLM.items() if "fp4" not in name}
    loads(monkeypatch, some, cutlass_scaled_mm_supports_fp8=lambda sm: sm < 120)
    for _ in range(2):
        with pytest.raises(ImportError, match="does not register _C::cutlass_scaled_fp4_mm"):
            libraries.operator(VLLM, "cutlass_scaled_fp4_mm", (10, 0))
    libraries.supports(VLLM, "cutlass_scaled_mm_supports_fp8", HOPPER)
    with pytest.raises(ImportError, match="compiled without sm_120"):
        libraries.supports(VLLM, "cutlass_scaled_mm_supports_fp8", (12, 0))


def test_a_namespace_that_is_taken_is_left_alone(site, monkeypatch) -> None:
    write(site, "sgl_kernel", "sm90/common_ops.abi3.so")
    monkeypatch.setattr(torch.ops, "load_library", lambda file: pytest.fail(f"{file} was loaded"))
    with (
        fakes.registered("sgl_kernel", {"other": "(Tensor a) -> Tensor"}, other=lambda a: a),
        pytest.raises(ImportError, match="another library of this process has registered sgl_kernel::other"),
    ):
        libraries.operator(SGL, "fp8_scaled_mm", HOPPER)


def test_a_process_has_one_of_two_builds(site, monkeypatch, clean_namespace) -> None:
    write(site, "sgl_kernel", "sm90/common_ops.abi3.so", "sm100/common_ops.abi3.so")
    monkeypatch.setattr(operators, "_files", {})
    monkeypatch.setattr(
        torch.ops,
        "load_library",
        lambda _: loads.made.append(fakes.register("sgl_kernel", fakes.SGL_0_3)),  # type: ignore[attr-defined]
    )
    assert callable(libraries.operator(SGL, "fp8_scaled_mm", HOPPER))
    with pytest.raises(ImportError, match="a process can have but one of them"):
        libraries.operator(SGL, "fp8_scaled_mm", (10, 0))


def test_a_library_for_another_torch_is_reported_with_its_file(site, monkeypatch) -> None:
    folder = write(site, "vllm", "_C.abi3.so")
    (folder / "_C.abi3.so").write_bytes(b"no library")
    with pytest.raises(ImportError, match=r"_C\.abi3\.so cannot be loaded with torch .*install a build of vllm for it"):
        libraries.operator(VLLM, "cutlass_scaled_mm", HOPPER)


def test_a_library_that_fails_to_load_leaves_the_call_to_the_next_kernel(site, monkeypatch, clean_hub) -> None:
    folder = write(site, "vllm", "_C.abi3.so")
    (folder / "_C.abi3.so").write_bytes(b"no library")
    arguments = fp8_gemm_inputs(tokens=3, n=64, k=64, scaling="row")
    with fakes.on_the_cpu(with_library=False):
        with kernelhub.use(prefer="fake"):
            made = kernelhub.fp8_gemm(**arguments)
            selection = kernelhub.fp8_gemm.explain(**arguments)
        assert torch.equal(made, kernelhub.fp8_gemm(**arguments, backend="torch"))
        assert selection.selected != "fake.vllm_scaled_mm"
        assert "cannot be loaded with torch" in str(selection)
        with pytest.raises(NoKernel, match="cannot be loaded with torch"):
            kernelhub.fp8_gemm(**arguments, backend="fake.vllm_scaled_mm")


@pytest.mark.parametrize("schemas", [fakes.VLLM, fakes.SGL_0_3, fakes.SGL_0_4], ids=["vllm", "sgl 0.3", "sgl 0.4"])
def test_calls_fit_the_schemas_of_released_versions(schemas: dict[str, str]) -> None:
    for name, schema in schemas.items():
        assert operators.mismatch(torch._C.parse_schema(name + schema), name, SCHEMAS[name]) is None
    later = torch._C.parse_schema("fp8_scaled_mm" + fakes.SGL_0_4["fp8_scaled_mm"].replace(")", ", bool x=False)", 1))
    assert operators.mismatch(later, "fp8_scaled_mm", SCHEMAS["fp8_scaled_mm"]) is None
    more = torch._C.parse_schema("fp8_scaled_mm" + fakes.SGL_0_4["fp8_scaled_mm"].replace(")", ", bool x)", 1))
    assert operators.mismatch(more, "fp8_scaled_mm", SCHEMAS["fp8_scaled_mm"]) == "also requires x"


def test_the_probe_looks_once_for_each_file(site) -> None:
    write(site, "vllm", "_C.abi3.so")
    machine = Machine()
    problem = kernelhub.explain("fp8_gemm", device="H200", **ROW).problem
    assert Compiled(VLLM).reject(problem, machine) is None
    (site / "vllm" / "_C.abi3.so").unlink()
    assert Compiled(VLLM).reject(problem, machine) is None
    machine.forget()
    assert Compiled(VLLM).reject(problem, machine) is not None
