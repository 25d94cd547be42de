"""kernelhub behind the names of ``vllm.utils.flashinfer``: what is answered, and that asking harms nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kernelhub
from kernelhub.compat.vllm import flashinfer as fi
from kernelhub.compat.vllm.flashinfer import parts, presence, trtllm
from kernelhub.errors import KernelUnavailable
from kernelhub.probes.source import defines
from tests.providers.wheels import wheel

FILES = {
    "__init__.py": (
        "COUNT = []\nfrom .quantization import fp4_quantize as fp4_quantize, block_scale_interleave as "
        "nvfp4_block_scale_interleave\nfrom .products import mm_fp4, bmm_fp8, mm_mxfp8, SfLayout, nvfp4_quantize\n"
    ),
    "quantization.py": "def fp4_quantize(x): return ('fp4', x)\ndef block_scale_interleave(x): return x\n",
    "fp4_quantization.py": "from .quantization import block_scale_interleave\n",
    "products.py": """
import torch
class SfLayout:
    layout_8x4 = "8x4"
def mm_fp4(a, b, a_scale, b_scale, alpha, dtype, *, block_size, use_8x4_sf_layout, use_nvfp4, backend):
    mm_fp4.seen = (b.shape, a_scale.dtype, b_scale.shape, block_size, use_8x4_sf_layout, use_nvfp4, backend)
    return torch.full((a.shape[0], b.shape[1]), float(alpha), dtype=dtype)
def bmm_fp8(a, b, a_scale, b_scale, dtype, out, backend):
    bmm_fp8.seen = (out, backend)
    return (a.float() @ b.float() * a_scale * b_scale).to(dtype)
def mm_mxfp8(a, b, a_scale, b_scale, *, out, out_dtype, backend, use_8x4_sf_layout):
    return torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype)
def nvfp4_quantize(a, scale, *, sfLayout, do_shuffle):
    return (sfLayout, do_shuffle), scale
""",
    "fused_moe/__init__.py": "from .core import cutlass_fused_moe, trtllm_fp4_block_scale_moe\n",
    "fused_moe/core.py": ("def cutlass_fused_moe(x):\n    return x + 1\n\ndef trtllm_fp4_block_scale_moe(): ...\n"),
    "comm/__init__.py": "from .mapping import Mapping\n",
    "comm/mapping.py": "class Mapping:\n    pass\n",
    "comm/mnnvl.py": "class MnnvlMemory: ...\n",
    "comm/trtllm_alltoall.py": "class MnnvlMoe: ...\nclass MoEAlltoallInfo: ...\n",
    "moe_ep/__init__.py": (
        "class BootstrapConfig: ...\nclass NVLinkOneSidedAlltoAll: ...\nclass NVLinkOneSidedConfig: ...\n"
        "def create_communication(): ...\nclass MoEEpCommParams:\n    hidden: int = 0\n    dispatch_format: str = ''\n"
    ),
    "gemm/__init__.py": "def fp8_blockscale_gemm_sm90(): ...\n",
    "cute_dsl/__init__.py": "",
    "mla/__init__.py": "class BatchMLAPagedAttentionWrapper:\n    def run(self, q, *, ckv_scale_arr=None): ...\n",
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """FlashInfer as `FILES`, with its cubins; `installed(init=...)` makes its import do something else."""

    def install(init: str = "", cubins: bool = True, version: str = "0.6.12", cubin_version: str = "") -> Path:
        for name, text in FILES.items():
            path = tmp_path / "flashinfer" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(init + text if name == "__init__.py" else text)
        packages = {"flashinfer-python": version}
        if cubins:
            (tmp_path / "flashinfer_cubin").mkdir(exist_ok=True)
            (tmp_path / "flashinfer_cubin" / "__init__.py").write_text("")
            packages["flashinfer-cubin"] = cubin_version or version
        for name, number in packages.items():
            info = tmp_path / f"{name.replace('-', '_')}-{number}.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        kernelhub.reload()
        return tmp_path

    yield install
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        del sys.modules[name]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch):
    """The current device has this capability, or is none."""

    def be(sm: tuple[int, int] | None) -> None:
        for module in ("here", "flashinfer.parts", "flashinfer.presence", "flashinfer.trtllm"):
            monkeypatch.setattr(f"kernelhub.compat.vllm.{module}.capability", lambda: sm)

    return be


@pytest.fixture(autouse=True)
def nothing_reached(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(presence, "_reached", {})
    monkeypatch.setattr(presence, "_warned", set())
    monkeypatch.setattr(trtllm, "_warned", set())
    kernelhub.reload()


class TestPresence:
    def test_what_is_not_installed_is_absent_with_the_command_that_installs_it(self) -> None:
        assert not fi.has_flashinfer()
        finding = fi.has_flashinfer.why()
        assert (finding.code, finding.remedy) == ("package_missing", 'pip install "kernelhub[flashinfer]"')

    def test_every_question_is_no_and_says_why_where_nothing_is_installed(self) -> None:
        asked = [name for name in fi.__all__ if name.startswith(("has_", "is_")) and "jit_cache" not in name]
        assert len(asked) > 25
        for name in asked:
            question = getattr(fi, name)
            arguments = {"has_flashinfer_sparse_mla_sm120_config": (128, 2048)}.get(name, ())
            arguments = ("cutlass",) if name == "is_flashinfer_bf16_gemm_supported" else arguments
            assert question(*arguments) is False, name
            assert question.why(*arguments).reason, name

    def test_it_is_here_with_cubins(self, installed) -> None:
        installed()
        assert fi.has_flashinfer()
        assert fi.has_flashinfer_cubin()
        assert fi.has_nvidia_artifactory()

    def test_cubins_of_another_version_make_its_import_fail_so_it_is_not_here(self, installed) -> None:
        installed(cubin_version="0.6.1")
        finding = fi.has_flashinfer.why()
        assert (finding.ok, finding.code) == (False, "package_version")
        assert "0.6.1 does not match flashinfer-python 0.6.12" in finding.reason

    def test_a_local_version_is_the_same_version(self, installed) -> None:
        installed(cubin_version="0.6.12+cu130")
        assert fi.has_flashinfer()

    def test_without_cubins_it_needs_nvcc_and_ninja(self, installed, tmp_path, monkeypatch) -> None:
        installed(cubins=False)
        tools = tmp_path / "cuda" / "bin"
        tools.mkdir(parents=True)
        monkeypatch.setenv("PATH", str(tools))
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
        kernelhub.reload()
        assert "no" in fi.has_flashinfer.why().reason
        for tool in ("nvcc", "ninja"):
            assert not fi.has_flashinfer()
            (tools / tool).write_text("#!/bin/sh\n")
            (tools / tool).chmod(0o755)
            kernelhub.reload()
        assert fi.has_flashinfer()
        assert not fi.has_flashinfer_cubin()

    def test_a_variable_may_say_that_cubins_are_here(self, installed, monkeypatch) -> None:
        installed(cubins=False)
        monkeypatch.setenv("PATH", "")
        monkeypatch.setenv("CUDA_HOME", "/nowhere")
        monkeypatch.setenv("VLLM_HAS_FLASHINFER_CUBIN", "1")
        kernelhub.reload()
        assert fi.has_flashinfer()
        monkeypatch.setenv("KERNELHUB_IGNORE_VLLM_ENV", "1")
        kernelhub.reload()
        assert not fi.has_flashinfer()

    def test_no_answer_outlives_a_reload(self, installed) -> None:
        assert not fi.has_flashinfer_moe()
        installed()
        assert fi.has_flashinfer_moe()

    def test_an_answer_can_be_asked_again_as_vllm_s_tests_do(self, installed) -> None:
        path = installed()
        assert fi.has_flashinfer_moe()
        (path / "flashinfer" / "fused_moe" / "__init__.py").unlink()
        assert fi.has_flashinfer_moe()
        fi.has_flashinfer_moe.cache_clear()
        assert not fi.has_flashinfer_moe()

    def test_missing_kernels_are_warned_of_once_on_a_device_that_wants_them(self, installed, device, caplog) -> None:
        installed(cubins=True, cubin_version="0.6.12")
        device((9, 0))
        fi.warn_if_flashinfer_kernels_missing()
        assert not caplog.records or fi.has_flashinfer_jit_cache_wheels()
        os.environ["FLASHINFER_DISABLE_VERSION_CHECK"] = "1"
        try:
            installed(version="0.6.13", cubin_version="0.6.12")
            fi.warn_if_flashinfer_kernels_missing()
            fi.warn_if_flashinfer_kernels_missing()
        finally:
            del os.environ["FLASHINFER_DISABLE_VERSION_CHECK"]
        assert caplog.text.count("will download or compile kernels") <= 1


class TestAsking:
    """Questions import nothing of FlashInfer, open no socket and start no process."""

    def test_no_question_imports_or_connects(self, installed) -> None:
        folder = installed(init="raise SystemExit('imported')\n")
        code = """
import json, socket, subprocess, sys
events = []
def refuse(what):
    def made(*args, **kwargs):
        events.append(what)
        raise RuntimeError(what)
    return made
import torch
socket.socket.__init__ = refuse("socket")
subprocess.Popen.__init__ = refuse("process")
import kernelhub.compat.vllm.flashinfer as fi, kernelhub.compat.vllm.deep_gemm as dg
answers = {}
for module in (fi, dg):
    for name in module.__all__:
        if name.startswith(("has_", "is_", "supports_")):
            arguments = {"has_flashinfer_sparse_mla_sm120_config": (1, 1),
                         "is_flashinfer_bf16_gemm_supported": ("cutlass",)}.get(name, ())
            answers[name] = getattr(module, name)(*arguments)
fi.use_trtllm_attention(8, 1, 4, 128, 1, "auto", torch.bfloat16, False)
loaded = [name for name in sys.modules if name.split(".")[0] in ("flashinfer", "deep_gemm", "vllm", "triton")]
print(json.dumps([events, loaded, answers]))
"""
        environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120
        )
        assert done.returncode == 0, done.stderr[-2000:]
        events, loaded, answers = json.loads(done.stdout.splitlines()[-1])
        assert (events, loaded) == ([], [])
        assert answers["has_flashinfer_moe"] is True
        assert answers["has_flashinfer_trtllm_fused_moe"] is False

    def test_the_network_is_asked_only_where_somebody_says_so(self, installed, monkeypatch) -> None:
        asked = []

        def opened(request, timeout):
            asked.append(request.full_url)
            raise OSError("no network in tests")

        monkeypatch.setattr(presence.urllib.request, "urlopen", opened)
        assert not fi.has_nvidia_artifactory()
        assert asked == []
        assert not fi.check_nvidia_artifactory(0.1)
        assert asked == [fi.FLASHINFER_CUBINS_REPOSITORY]

    def test_a_download_that_works_is_remembered(self, monkeypatch) -> None:
        class Response(SimpleNamespace):
            def __enter__(self):
                return self

            def __exit__(self, *error):
                return None

        monkeypatch.setattr(presence.urllib.request, "urlopen", lambda request, timeout: Response(status=200))
        assert fi.check_nvidia_artifactory()
        assert fi.has_nvidia_artifactory()

    def test_a_folder_of_cubins_is_as_good(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(tmp_path))
        kernelhub.reload()
        assert not fi.has_nvidia_artifactory()
        (tmp_path / "a.cubin").write_bytes(b"")
        assert fi.has_nvidia_artifactory()


class TestParts:
    def test_each_is_reported_by_what_is_defined(self, installed) -> None:
        installed()
        assert fi.has_flashinfer_comm()
        assert fi.has_flashinfer_nvlink_two_sided()
        assert fi.has_flashinfer_all2all()
        assert fi.has_flashinfer_nvlink_one_sided()
        assert fi.has_flashinfer_cutlass_fused_moe()
        assert fi.has_flashinfer_sm90_nope_mla()
        finding = fi.has_flashinfer_trtllm_fused_moe.why()
        assert (finding.ok, finding.code) == (False, "symbol_missing")
        assert "trtllm_fp8_block_scale_moe" in finding.reason

    @pytest.mark.parametrize(
        ("file", "old", "new", "question"),
        [
            ("comm/mnnvl.py", "MnnvlMemory", "Other", "has_flashinfer_nvlink_two_sided"),
            ("moe_ep/__init__.py", "dispatch_format", "format", "has_flashinfer_nvlink_one_sided"),
            ("fused_moe/core.py", "cutlass_fused_moe", "other", "has_flashinfer_cutlass_fused_moe"),
            ("fused_moe/core.py", "trtllm_fp4_block_scale_moe", "other", "has_flashinfer_cutlass_fused_moe"),
            ("mla/__init__.py", "ckv_scale_arr", "scale", "has_flashinfer_sm90_nope_mla"),
        ],
    )
    def test_one_name_less_is_a_no(self, installed, file, old, new, question) -> None:
        path = installed() / "flashinfer" / file
        path.write_text(path.read_text().replace(old, new))
        kernelhub.reload()
        assert not getattr(fi, question)()

    def test_cute_dsl_needs_its_package(self, installed) -> None:
        folder = installed()
        (folder / "flashinfer" / "cute_dsl" / "utils.py").write_text("def convert_sf_to_mma_layout(): ...\n")
        core = folder / "flashinfer" / "fused_moe" / "core.py"
        core.write_text(core.read_text() + "def b12x_fused_moe(): ...\n")
        init = folder / "flashinfer" / "fused_moe" / "__init__.py"
        init.write_text("from .core import (\n    cutlass_fused_moe,\n    b12x_fused_moe,\n)\n")
        kernelhub.reload()
        assert "cutlass is not installed" in fi.has_flashinfer_b12x_moe.why().reason
        (folder / "cutlass").mkdir()
        (folder / "cutlass" / "__init__.py").write_text("")
        kernelhub.reload()
        assert fi.has_flashinfer_b12x_moe()

    @pytest.mark.parametrize(("sm", "here"), [((9, 0), True), ((10, 0), False), ((8, 0), False), (None, False)])
    def test_block_scaled_products_are_for_hopper(self, installed, device, sm, here) -> None:
        installed()
        device(sm)
        assert fi.has_flashinfer_fp8_blockscale_gemm() is here
        assert fi.is_flashinfer_fp8_blockscale_gemm_supported() is here

    def test_one_switch_keeps_them_from_running(self, installed, device, monkeypatch) -> None:
        installed()
        device((9, 0))
        monkeypatch.setenv("VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER", "0")
        kernelhub.reload()
        assert fi.has_flashinfer_fp8_blockscale_gemm()
        assert not fi.is_flashinfer_fp8_blockscale_gemm_supported()

    @pytest.mark.parametrize(
        ("change", "takes"),
        [
            ({}, True),
            ({"is_flashinfer_supported": False}, False),
            ({"output_dtype": torch.float16}, False),
            ({"input_dtype": torch.float8_e4m3fn}, False),
            ({"weight_dtype": torch.bfloat16}, False),
            ({"weight_shape": (96, 256)}, False),
            ({"weight_shape": (64, 192)}, False),
        ],
        ids=str,
    )
    def test_which_products_they_take(self, change, takes) -> None:
        plain = {
            "is_flashinfer_supported": True,
            "output_dtype": torch.bfloat16,
            "input_dtype": torch.bfloat16,
            "weight_dtype": torch.float8_e4m3fn,
            "weight_shape": (64, 128),
        }
        assert fi.should_use_flashinfer_for_blockscale_fp8_gemm(**plain | change) is takes


class TestCalls:
    def test_a_missing_library_is_a_runtime_error_that_says_what_to_do(self) -> None:
        with pytest.raises(RuntimeError, match=r"flashinfer is not installed; pip install"):
            fi.flashinfer_cutlass_fused_moe(1)
        with fi.autotune(True):
            pass

    def test_a_function_is_imported_at_its_first_call(self, installed) -> None:
        installed()
        fresh = type(fi.flashinfer_cutlass_fused_moe)("flashinfer.fused_moe:cutlass_fused_moe", fi.has_flashinfer.why)
        assert "flashinfer" not in sys.modules
        assert fresh(1) == 2
        assert fresh.function() is sys.modules["flashinfer.fused_moe"].cutlass_fused_moe

    def test_the_reason_of_a_failed_import_is_reported_and_not_remembered(self, installed) -> None:
        folder = installed(init="raise OSError('libcudart.so.13: cannot open')\n")
        lazy = type(fi.flashinfer_cutlass_fused_moe)("flashinfer.fused_moe:cutlass_fused_moe", fi.has_flashinfer.why)
        with pytest.raises(KernelUnavailable, match=r"libcudart\.so\.13: cannot open"):
            lazy(1)
        (folder / "flashinfer" / "__init__.py").write_text(FILES["__init__.py"])
        assert lazy(1) == 2

    def test_fp4_products_get_what_flashinfer_documents(self, installed, monkeypatch) -> None:
        installed()
        monkeypatch.setattr(fi.operators.calls.mm_fp4, "_function", None)
        a, b = torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(6, 8, dtype=torch.uint8)
        scales = torch.zeros(4, 4).to(torch.float8_e4m3fn), torch.zeros(6, 4).to(torch.float8_e4m3fn)
        out = fi.flashinfer_scaled_fp4_mm(a, b, *scales, torch.tensor([3.0]), torch.bfloat16, "cutlass")
        seen = sys.modules["flashinfer"].mm_fp4.seen
        assert out.tolist() == [[3.0] * 6] * 4
        assert seen == ((8, 6), torch.uint8, (4, 6), 16, False, True, "cutlass")
        fi.flashinfer_scaled_fp4_mm(a, b, *scales, None, torch.bfloat16, "trtllm")
        assert sys.modules["flashinfer"].mm_fp4.seen[1:] == (torch.float8_e4m3fn, (4, 6), 16, True, True, "trtllm")
        fi.flashinfer_scaled_fp4_mm(a.repeat(9, 1), b, *scales, None, torch.bfloat16, "trtllm")
        assert sys.modules["flashinfer"].mm_fp4.seen[4] is False
        with pytest.raises(ValueError, match=r"must be \[M, K/2\]"):
            fi.flashinfer_scaled_fp4_mm(a[:, :4], b, *scales, None, torch.bfloat16, "cutlass")

    def test_fp8_products_are_right(self, installed, monkeypatch) -> None:
        installed()
        monkeypatch.setattr(fi.operators.calls.bmm_fp8, "_function", None)
        a = torch.randn(3, 16).to(torch.float8_e4m3fn)
        b = torch.randn(5, 16).to(torch.float8_e4m3fn).t()
        one, two = torch.tensor([2.0]), torch.tensor(0.5)
        bias = torch.randn(5)
        out = fi.flashinfer_scaled_fp8_mm(a, b, one, two, torch.float32, bias)
        torch.testing.assert_close(out, a.float() @ b.float() + bias)
        assert sys.modules["flashinfer"].bmm_fp8.seen == (None, "auto")
        for wrong in ((a.float(), b, one, two), (a, b.t(), one, two), (a, b, one.double(), two)):
            with pytest.raises(ValueError, match="must be"):
                fi.flashinfer_scaled_fp8_mm(*wrong, torch.float32)

    def test_scales_in_tiles_of_8_x_4_are_requested(self, installed, monkeypatch) -> None:
        installed()
        monkeypatch.setattr(fi.operators.calls.nvfp4_quantize, "_function", None)
        codes, _ = fi.flashinfer_quant_nvfp4_8x4_sf_layout(torch.zeros(2, 32), torch.ones(1))
        assert codes == ("8x4", False)

    @pytest.mark.parametrize("rows", [1, 7, 128, 129])
    def test_shapes_that_a_graph_sees(self, rows) -> None:
        a = torch.empty(rows, 160, device="meta")
        codes, scales = fi.flashinfer_mxfp4_quantize_fake(a, "cuda")
        assert (codes.shape, scales.shape) == ((rows, 80), (-(-rows // 128) * 128, 8))
        codes, scales = fi.flashinfer_nvfp4_quantize_fake(a, a)
        assert (codes.shape, scales.shape) == ((rows, 80), (-(-rows // 8) * 8, 12))
        values, scales = fi.flashinfer_mxfp8_quantize_8x4_fake(a)
        assert (values.dtype, scales.shape) == (torch.float8_e4m3fn, (-(-rows // 8) * 8 * 8,))

    def test_a_compiled_graph_holds_an_operator(self, installed, monkeypatch) -> None:
        installed()
        monkeypatch.setattr(fi.operators.calls.mm_mxfp8, "_function", None)
        seen = []

        def backend(graph, inputs):
            seen.extend(str(node.target) for node in graph.graph.nodes)
            return graph.forward

        a, scale = torch.zeros(3, 32), torch.zeros(4)

        @torch.compile(backend=backend, fullgraph=True)
        def product(a, b):
            return fi.mm_mxfp8(a, b, scale, scale, torch.bfloat16) + 1

        assert product(a, torch.zeros(32, 5)).tolist() == [[1.0] * 5] * 3
        assert any("kernelhub_vllm" in name and "mm_mxfp8" in name for name in seen)

    def test_concatenation_is_kernelhub_s_own_and_in_place(self) -> None:
        k = torch.full((5, 4, 24), float("nan"))
        nope, rope = torch.randn(5, 4, 16), torch.randn(5, 1, 8)
        assert fi.flashinfer_concat_mla_k(k, nope, rope) is None
        torch.testing.assert_close(k, torch.cat([nope, rope.expand(5, 4, 8)], -1), rtol=0, atol=0)
        (row,) = kernelhub.report().rows
        assert row.op == "concat_mla_k"


REAL = {
    "0.6.1": {"has_flashinfer_comm", "has_flashinfer_moe", "has_flashinfer_nvlink_two_sided"},
    "0.7.2.post1": {
        *("has_flashinfer_comm", "has_flashinfer_moe", "has_flashinfer_nvlink_two_sided", "has_flashinfer_bf16_gemm"),
        *("has_flashinfer_nvlink_one_sided", "has_flashinfer_autotune_v2", "has_flashinfer_sm90_nope_mla"),
        *("has_flashinfer_trtllm_fused_moe", "has_flashinfer_cutlass_fused_moe", "has_flashinfer_sparse_mla_sm120"),
        *("has_flashinfer_b12x_moe", "has_flashinfer_b12x_gemm", "has_flashinfer_bf16_fp4"),
        *("has_flashinfer_cutedsl_moe_nvfp4", "has_flashinfer_cutedsl_grouped_gemm_nt_masked"),
        *("has_flashinfer_recurrent_kda", "has_flashinfer_fused_kda_decode", "has_flashinfer_packed_fused_kda_decode"),
    },
}


@pytest.mark.parametrize("version", REAL)
def test_real_releases_are_read_right(version, monkeypatch, tmp_path) -> None:
    """The symbols of released wheels, found in their source; NVIDIA's CuTe DSL is taken as installed."""
    folder = wheel("flashinfer-python", version)
    for package in ("cutlass", "flashinfer_cubin"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.syspath_prepend(str(tmp_path))
    kernelhub.reload()
    asked = [name for name in parts.__dict__ if name.startswith("has_flashinfer_") and not name.endswith("_config")]
    asked.remove("has_flashinfer_fp8_blockscale_gemm")  # depends on the device too
    yes = {name for name in asked if getattr(fi, name)()}
    assert REAL[version] <= yes, {name: getattr(fi, name).why().reason for name in REAL[version] - yes}
    assert "flashinfer" not in sys.modules
    if version == "0.6.1":
        assert "has_flashinfer_autotune_v2" not in yes
        assert not defines("flashinfer.gemm:mm_bf16_fp4").ok
