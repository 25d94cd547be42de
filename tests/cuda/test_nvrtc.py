"""From a source of csrc/cuda to a binary in the cache, and what is said where that fails."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kernelhub
from kernelhub.backends.cuda import kernels, library, mapped, nvrtc
from kernelhub.backends.cuda.attention.decode import Decode
from kernelhub.backends.cuda.gemm import fp4, fp8
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.dispatch.work import JOURNAL
from kernelhub.ops.attention.problem import E5M2, FEW, FP8, ONE, PagedAttentionProblem
from kernelhub.ops.gemm.fp4.problem import Fp4GemmProblem
from kernelhub.probes.device import DeviceFacts, simulated
from tests.gpu.products_sanitized import forms

PAGED_FEATURES = ("causal", "window_left", "softcap", "sinks", "lse")
CONSTANTS: dict[str, dict[str, str | int]] = {
    "all_reduce.cu": {"ELEMENT": "bf16", "SIZE": 2, "WORLD": 2, "THREADS": 128, "LOOKS": 2},
    "concat_mla_k.cu": {"ELEMENT": "u16", "SIZE": 2, "HEADS": 128, "NOPE": 128, "ROPE": 64, "COPIES": 1},
    "turn_scales.cu": {},
    "write_kv_cache.cu": {
        "ELEMENT": "bf16",
        "SIZE": 2,
        "FORMAT": 1,
        "SCALE": 3,
        "PAGE": 16,
        "HEADS": 8,
        "K_WIDTH": 192,
        "V_WIDTH": 128,
        "ROPE": 1,
        "ROTARY": 64,
    },
    "merge_attention_states.cu": {
        "ELEMENT": "f16",
        "SIZE": 2,
        "WIDTH": 128,
        "HEADS": 32,
        "LANES": 16,
        "HAS_LSE": 1,
        "SCALE": 2,
    },
    "quantize_fp8.cu": {"ELEMENT": "bf16", "SIZE": 2, "UE8M0": 0, "E8M0": 0},
    "topk_indices.cu": {"K": 2048},
    "route_experts.cu": {
        "ELEMENT": "float",
        "SIZE": 4,
        "EXPERTS": 256,
        "TOP_K": 8,
        "GROUPS": 8,
        "TOPK_GROUPS": 4,
        "LANES": 4,
        "EACH": 8,
        "SCORING": 1,
        "HAS_BIAS": 1,
        "RENORMALIZE": 1,
    },
    "fused_quant.cu": {
        "OPERATION": 0,
        "ELEMENT": "float",
        "SIZE": 4,
        "WEIGHT": "float",
        "WIDTH": 4096,
        "FORMAT": 5,
        "RESIDUAL": 1,
        "UNIT_OFFSET": 1,
        "UE8M0": 0,
        "E8M0": 0,
        "EACH": 4,
        "LANES": 256,
        "ROWS": 1,
        "CHUNKS": 1,
        "FEW_LANES": 256,
        "FEW_CHUNKS": 1,
        "WIDE": 0,
    },
}


class FakeNvrtc:
    """As the module of cuda-bindings; programs are their source and options."""

    nvrtcResult = SimpleNamespace(NVRTC_SUCCESS=0)

    def __init__(self, error: str = "") -> None:
        self.error, self.compiled = error, []

    def nvrtcCreateProgram(self, source: bytes, name: bytes, count: int, headers: Any, names: Any) -> Any:
        assert count == len(headers) == len(names) > 0
        assert all(f'#include "{one.decode()}"'.encode() not in source or one in names for one in names)
        return 0, {"name": name, "source": source}

    def nvrtcCompileProgram(self, program: dict[str, Any], count: int, options: list[bytes]) -> Any:
        program["made"] = b" ".join([program["name"], *options])
        self.compiled.append(program["made"])
        return (6,) if self.error else (0,)

    def nvrtcGetProgramLogSize(self, program: Any) -> Any:
        return 0, len(self.error)

    def nvrtcGetProgramLog(self, program: Any, room: bytes) -> Any:
        return self._fill(self.error.encode(), room)

    def nvrtcGetCUBINSize(self, program: dict[str, Any]) -> Any:
        return 0, len(program["made"])

    def nvrtcGetCUBIN(self, program: dict[str, Any], room: bytes) -> Any:
        return self._fill(program["made"], room)

    nvrtcGetPTXSize, nvrtcGetPTX = nvrtcGetCUBINSize, nvrtcGetCUBIN

    def nvrtcDestroyProgram(self, program: Any) -> Any:
        return (0,)

    def _fill(self, content: bytes, room: bytes) -> Any:
        import ctypes

        ctypes.memmove(room, content, len(content))
        return (0,)


def use(monkeypatch: pytest.MonkeyPatch, fake: FakeNvrtc) -> None:
    made = nvrtc.Compiler(fake, "13.0", (80, 86, 89, 90, 100, 120))
    monkeypatch.setattr(nvrtc, "compiler", lambda: made)


def test_a_form_is_compiled_once_and_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvrtc()
    use(monkeypatch, fake)
    before = JOURNAL.count
    for _ in range(2):
        made = nvrtc.compiled("quantize_fp8.cu", CONSTANTS["quantize_fp8.cu"], (9, 0), tmp_path)
        assert made.startswith(b"quantize_fp8.cu -arch=sm_90 -std=c++17")
        assert b"-DELEMENT=bf16" in made
    assert len(fake.compiled) == 1
    assert [(work.kind, work.what, work.by) for work in JOURNAL.work[-(JOURNAL.count - before) :]] == [
        ("compile", "quantize_fp8.cu", "cuda")
    ]
    nvrtc.compiled("quantize_fp8.cu", CONSTANTS["quantize_fp8.cu"] | {"UE8M0": 1}, (9, 0), tmp_path)
    nvrtc.compiled("quantize_fp8.cu", CONSTANTS["quantize_fp8.cu"], (8, 0), tmp_path)
    assert len(fake.compiled) == 3


def test_a_newer_device_gets_ptx_and_an_older_one_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeNvrtc())
    made = nvrtc.compiled("quantize_fp8.cu", CONSTANTS["quantize_fp8.cu"], (13, 7), tmp_path)
    assert b"-arch=compute_120" in made
    with pytest.raises(nvrtc.CompileError, match="sm_80 and later, not for sm_75"):
        nvrtc.compiled("quantize_fp8.cu", CONSTANTS["quantize_fp8.cu"], (7, 5), tmp_path)


def test_an_error_has_the_compiler_s_first_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, FakeNvrtc("a.cu(3): warning: x\na.cu(7): error: no such thing\n1 error"))
    with pytest.raises(nvrtc.CompileError, match=r"quantize_fp8.cu .*: a.cu\(7\): error: no such thing$"):
        nvrtc.compiled("quantize_fp8.cu", CONSTANTS["quantize_fp8.cu"], (9, 0), tmp_path)
    assert not list(tmp_path.rglob("*.bin"))


def test_without_cuda_bindings_or_on_an_old_gpu_the_record_says_what_is_missing() -> None:
    for packages, device, words in (
        ({"triton": "3.7.1"}, "H200", "cuda is not installed"),
        ({"triton": "3.7.1", "cuda": "12.6.2"}, "H200", "12.6.2"),
        ({"cuda": "13.0.3"}, "sm_75", "sm_80"),
    ):
        found = kernelhub.explain(
            "quantize_fp8", device=device, machine=SimulatedMachine(packages), backend="cuda.quantize"
        )
        (decision,) = (one for one in found.decisions if one.kernel == "cuda.quantize")
        assert not decision.accepted
        assert words in decision.reason
    assert (
        "cuda-bindings"
        in next(
            one
            for one in kernelhub.explain("quantize_fp8", device="H200", machine=SimulatedMachine({})).decisions
            if one.kernel == "cuda.quantize"
        ).remedy
    )


def test_every_source_is_that_of_a_kernel() -> None:
    assert {path.name for path in nvrtc.SOURCES.glob("*.cu")} == set(CONSTANTS)
    assert {path.name for path in nvrtc.SOURCES.glob("*/*.cu")} == {
        "fp4_gemm.cu",
        "fp8_gemm.cu",
        "mla_decode.cu",
        "paged_decode.cu",
    }
    assert {kernel.backend for kernel in kernels.KERNELS} == {"cuda"}


@pytest.mark.parametrize("source", CONSTANTS)
def test_nvrtc_compiles_it_for_every_generation(source: str, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings", reason='without NVRTC nothing is compiled: pip install "cuda-bindings[all]"')
    for device in ("A100", "L40S", "H200", "B200", "RTX5090"):
        assert nvrtc.compiled(source, CONSTANTS[source], simulated(device).capability, tmp_path).startswith(b"\x7fELF")


@pytest.mark.parametrize("features", [{}, {"CAUSAL": 1, "HAS_LSE": 1, "HAS_SINKS": 1}], ids=["plain", "features"])
@pytest.mark.parametrize("heads", [16, 128])
def test_nvrtc_compiles_latent_decode_for_hopper(heads: int, features: dict[str, int], tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings", reason='without NVRTC nothing is compiled: pip install "cuda-bindings[all]"')
    form = {"HEADS": heads, "CAUSAL": 0, "HAS_LSE": 0, "HAS_SINKS": 0, "PREFETCH": int(heads >= 128)} | features
    made = nvrtc.compiled("sm_90/mla_decode.cu", form, (9, 0), tmp_path, specific=True)
    assert made.startswith(b"\x7fELF")
    assert b"mla_decode" in made
    assert b"mla_merge" in made


@pytest.mark.parametrize("b_format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("form", fp4.FORMS)
def test_nvrtc_compiles_float4_products_for_hopper(form: int, b_format: str, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings", reason='without NVRTC nothing is compiled: pip install "cuda-bindings[all]"')
    problem = Fp4GemmProblem(simulated("H200"), b_format=b_format, n=4096, k=4096)
    made = nvrtc.compiled("sm_90/fp4_gemm.cu", fp4.constants_of(form, problem), (9, 0), tmp_path, specific=True)
    assert made.startswith(b"\x7fELF")
    assert b"fp4_gemm" in made
    assert b"fp4_sum" in made


@pytest.mark.parametrize("features", [{}, dict.fromkeys(PAGED_FEATURES, 1)], ids=["plain", "features"])
@pytest.mark.parametrize(("head_dim", "kv_dtype"), [(64, "bfloat16"), (128, FP8), (256, E5M2)])
def test_nvrtc_compiles_paged_decode_for_hopper(
    head_dim: int, kv_dtype: str, features: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings", reason='without NVRTC nothing is compiled: pip install "cuda-bindings[all]"')
    made: list[bytes] = []

    def compiled(source: str, constants: nvrtc.Constants, device: DeviceFacts, specific: bool) -> Any:
        made.append(nvrtc.compiled(source, constants, device.capability, tmp_path, specific=specific))
        return SimpleNamespace(kernel=lambda *_, **__: None)

    monkeypatch.setattr(library, "library", compiled)
    scale = None if kv_dtype == "bfloat16" else "head"
    of = {"head_dim_qk": head_dim, "head_dim_vo": head_dim, "kv_dtype": kv_dtype, "kv_scale": scale}
    named = {name: bool(value) for name, value in features.items()}
    Decode(PagedAttentionProblem(device=simulated("H200"), q_len=FEW if features else ONE, **of | named))  # type: ignore[arg-type]
    assert made
    for one in made:
        assert one.startswith(b"\x7fELF")
        assert all(name in one for name in (b"paged_decode", b"paged_merge", b"paged_decode_merging"))


@pytest.mark.parametrize("bias", [0, 1])
@pytest.mark.parametrize("form", forms(), ids=str)
def test_nvrtc_compiles_products_for_hopper_without_spills(form: fp8.Form, bias: int) -> None:
    pytest.importorskip("cuda.bindings", reason='without NVRTC nothing is compiled: pip install "cuda-bindings[all]"')
    made_by = nvrtc.compiler().nvrtc
    constants = fp8.constants_of(form, bool(bias)) | {"OVERLAPS": 1}
    options = (*nvrtc.options_for(constants, "sm_90a"), "--ptxas-options=-v")
    path, headers = nvrtc.SOURCES / "sm_90/fp8_gemm.cu", sorted(nvrtc.SOURCES.glob("*.h"))
    contents, names = [header.read_bytes() for header in headers], [header.name.encode() for header in headers]
    _, program = made_by.nvrtcCreateProgram(path.read_bytes(), b"fp8_gemm.cu", len(headers), contents, names)
    (status,) = made_by.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    said = bytes(made_by.nvrtcGetProgramLogSize(program)[1])
    made_by.nvrtcGetProgramLog(program, said)
    made_by.nvrtcDestroyProgram(program)
    assert status == 0, said.decode()
    assert b" 0 bytes spill stores, 0 bytes spill loads" in said
    assert b"C75" not in said, "products are serialised"


def test_a_launch_packs_its_values_and_tries_again_where_a_thread_has_no_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ctypes

    import torch

    seen, statuses, devices = [], [201, 0, 0], []

    def launch(*given: Any) -> Any:
        at = ctypes.cast(given[9], ctypes.POINTER(ctypes.c_void_p))[0]
        seen.append((*given[:9], ctypes.string_at(at, 20)))
        return (statuses.pop(0),)

    driver = SimpleNamespace(
        cuLaunchKernel=launch, CUresult=SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_INVALID_CONTEXT=201)
    )
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(library, "enter", devices.append)
    of = SimpleNamespace(driver=driver, function=lambda name, device: f"{name} on {device}")
    kernel = library.Kernel(of, "rows", "Qqf")  # type: ignore[arg-type]
    kernel(0, 3, 64, 1 << 40, -2, 0.5)
    assert devices == [0]
    assert [one[:9] for one in seen] == [("rows on 0", 3, 1, 1, 64, 1, 1, 0, 77)] * 2
    assert seen[1][9] == (1 << 40).to_bytes(8, "little") + (-2).to_bytes(8, "little", signed=True) + b"\0\0\0?"
    statuses[:] = [1]
    with pytest.raises(library.LaunchError, match="rows: cuLaunchKernel gave 1 for 3 blocks of 64 threads"):
        kernel(0, 3, 64, 0, 0, 0.0)


def test_a_launch_with_descriptors_tries_again_where_a_thread_has_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    driver = pytest.importorskip("cuda.bindings.driver", reason="the driver's structs are those of cuda-bindings")
    none, done = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT, driver.CUresult.CUDA_SUCCESS
    encodings, launches = [none, done], [none, done]
    devices: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(mapped.launch, "in_use", lambda: False)
    monkeypatch.setattr(library, "enter", devices.append)
    made = library.Library("rows", b"")
    made.function = lambda name, device: driver.CUfunction(1)  # type: ignore[method-assign]
    made.allow_shared = lambda function, shared_bytes: None  # type: ignore[method-assign]
    made.driver = SimpleNamespace(
        **{name: getattr(driver, name) for name in dir(driver) if name.startswith("CU")},
        cuuint64_t=driver.cuuint64_t,
        cuuint32_t=driver.cuuint32_t,
        cuTensorMapEncodeTiled=lambda *given: (encodings.pop(0), driver.CUtensorMap()),
        cuLaunchKernelEx=lambda *given: (launches.pop(0),),
    )
    kernel = mapped.MappedKernel(made, "rows", "Ti", 64, 0, (mapped.bytes_box(16, 128),))
    given = mapped.rows_of(torch.zeros(16, 128, dtype=torch.uint8))
    kernel(3, given, 7)
    assert (encodings, launches, devices) == ([], [], [0, 0])
    launches[:] = [none, none]
    encodings[:] = [done]
    with pytest.raises(library.LaunchError, match=r"rows: cuLaunchKernelEx gave .*INVALID_CONTEXT"):
        kernel(3, given, 7)


def test_clusters_are_launched_with_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    driver = pytest.importorskip("cuda.bindings.driver", reason="the driver's structs are those of cuda-bindings")
    seen = []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    made = library.Library("rows", b"")
    made.function = lambda name, device: driver.CUfunction(1)  # type: ignore[method-assign]
    made.driver = SimpleNamespace(
        **{name: getattr(driver, name) for name in dir(driver) if name.startswith("CU")},
        cuLaunchKernel=None,
        cuLaunchKernelEx=lambda *given: seen.append(given) or (driver.CUresult.CUDA_SUCCESS,),
    )
    made.kernel("rows", "q", cluster=4)(0, 3, 64, 7)
    config = seen[0][0]
    assert (config.gridDimX, config.blockDimX, int(config.hStream)) == (12, 64, 77)
    assert [(one.id, one.value.clusterDim.x) for one in config.attrs] == [
        (driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, 4)
    ]


def test_launches_that_overlap_have_the_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    driver = pytest.importorskip("cuda.bindings.driver", reason="the driver's structs are those of cuda-bindings")
    seen = []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    made = library.Library("rows", b"", overlaps=True)
    made.function = lambda name, device: driver.CUfunction(1)  # type: ignore[method-assign]
    made.driver = SimpleNamespace(
        **{name: getattr(driver, name) for name in dir(driver) if name.startswith("CU")},
        cuLaunchKernel=None,
        cuLaunchKernelEx=lambda *given: seen.append(given) or (driver.CUresult.CUDA_SUCCESS,),
    )
    for captured in (False, True):  # outside of graphs such a launch takes the host longer
        monkeypatch.setattr(library, "captures", lambda captured=captured: captured)
        made.kernel("rows", "q", 2)(0, 3, 64, 7)
    made.kernel("rows", "q")(0, 3, 64, 7)
    assert [len(config.attrs) for config, *_ in seen] == [1, 2, 1]
    follows = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    for config, *_ in seen[1:]:
        assert config.attrs[-1].id == follows
        assert config.attrs[-1].value.programmaticStreamSerializationAllowed == 1


@pytest.mark.parametrize(
    ("capability", "version", "overlaps"),
    [((9, 0), 12030, 1), ((10, 0), 13000, 1), ((8, 9), 13000, 0), ((9, 0), 12020, 0)],
)
def test_launches_overlap_where_the_device_lets_them_and_the_driver_captures_them(
    capability: tuple[int, int], version: int, overlaps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str | int]] = []
    monkeypatch.setattr(library, "_driver_version", lambda: version)
    monkeypatch.setattr(library, "_library", lambda source, constants, of, specific: seen.append(dict(constants)))
    device = dataclasses.replace(simulated("H200"), capability=capability)
    library.library("topk_indices.cu", {"K": 8}, device)
    library.library("topk_indices.cu", {"K": 8, "OVERLAPS": 0}, device)
    assert seen == [{"K": 8, "OVERLAPS": overlaps}, {"K": 8, "OVERLAPS": 0}]


@pytest.mark.parametrize("source", [*CONSTANTS, "sm_90/fp4_gemm.cu", "sm_90/fp8_gemm.cu", "sm_90/mla_decode.cu"])
def test_every_kernel_first_waits_for_the_launches_before_it(source: str) -> None:
    """A launch may begin while what it reads is still being written, and what it writes still being read."""
    text = (nvrtc.SOURCES / source).read_text()
    firsts = re.findall(r"__global__ void [^{]*\{[\s\\]*(\w+)", text)
    assert firsts
    for first in set(firsts) - {"follow_launches"}:
        assert re.search(rf"INLINE void {first}\([^)]*\) {{\n  follow_launches\(\);\n", text), first


def test_decode_over_pages_waits_before_its_merge_may_begin() -> None:
    """The merge reads the lengths before it waits, which the launches before the decode may have written."""
    text = (nvrtc.SOURCES / "sm_90/paged_decode.cu").read_text()
    assert re.search(r"INLINE void decode\([^)]*\) {\n  wait_for_launches\(\);[^\n]*\n  begin_next_launch\(\);\n", text)


def test_all_kernels_of_a_source_are_loaded_at_once_so_that_no_size_loads_after_seal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    calls: list[Any] = []
    bindings = ModuleType("cuda.bindings")
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice"):
        monkeypatch.setattr(torch._C, name, None, raising=False)
    bindings.driver = SimpleNamespace(  # type: ignore[attr-defined]
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        cuLaunchKernel=None,
        cuLibraryLoadData=lambda *given: calls.append(given[0]) or (0, "library"),
        cuLibraryGetKernel=lambda loaded, name: (0, name.decode()),
        cuKernelGetFunction=lambda name: calls.append(name) or (0, f"function {name}"),
    )
    made = library.Library("rows", b"binary")
    for name in ("few", "many", "many"):
        made.kernel(name, "q")
    before = JOURNAL.count
    assert made.function("few", 0) == "function few"
    assert made.function("many", 0) == "function many"
    assert calls == [b"binary", "few", "many"]
    assert JOURNAL.count == before + 1
    made.function("many", 1)
    assert calls == [b"binary", "few", "many", "few", "many"]
