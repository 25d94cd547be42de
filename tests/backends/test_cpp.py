"""The C++ kernels keep the contracts of their ops on this CPU, compiled for it and for less able ones."""

from __future__ import annotations

import ctypes
import os
import platform
import runpy
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.cpp import build
from kernelhub.backends.cpp.moe import experts_adapter
from kernelhub.backends.cpp.moe.experts_adapter import Experts
from kernelhub.errors import KernelUnavailable, NoKernel
from kernelhub.ops.attention.inputs import paged_attention_inputs
from kernelhub.ops.formats import E4M3, from_e2m1, from_e8m0
from kernelhub.ops.gemm.fp8.batched.inputs import bmm_fp8_inputs
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.ops.moe.experts.activations import Activations
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.problem import ExpertsProblem
from kernelhub.ops.moe.experts.tolerance import compare
from kernelhub.ops.moe.experts.weights import Matrix
from kernelhub.probes import toolchain
from kernelhub.probes.device import facts
from kernelhub.probes.finding import found
from kernelhub.probes.toolchain import cxx_compiler
from kernelhub.runtime.caches import notices
from tests.contract.bmm_fp8 import BmmFp8Contract
from tests.contract.experts import ExpertsContract
from tests.contract.fp4_gemm import Fp4GemmContract
from tests.contract.fp8_gemm import EveryScaling
from tests.contract.routing import RoutingContract

pytestmark = pytest.mark.skipif(not cxx_compiler().ok, reason="no C++ compiler here: all cases of the cpp backend")

SOURCE = build.SOURCES / "fp8_gemm.cpp"
X86 = platform.machine() in ("x86_64", "AMD64")
# What decides between the source's ways: AVX-512 BF16 (native, where there is one), AVX-512, AVX2 with F16C, nothing.
TARGETS = ["native", *(["x86-64-v4", "x86-64-v3", "x86-64"] if X86 else [])]


def able(target: str) -> bool:
    """Whether this CPU runs what is compiled for `target`."""
    needed = {"x86-64-v4": "avx512bw", "x86-64-v3": "f16c"}.get(target)
    return needed is None or needed in Path("/proc/cpuinfo").read_text()


class TestFp8Gemm(EveryScaling):
    kernel = "cpp.fp8_gemm"
    device = "cpu"


class TestFp4Gemm(Fp4GemmContract):
    kernel = "cpp.fp4_gemm"
    device = "cpu"


class TestBmmFp8(BmmFp8Contract):
    kernel = "cpp.bmm_fp8"
    device = "cpu"


class TestExperts(ExpertsContract):
    kernel = "cpp.experts"
    device = "cpu"
    weights = "fp8_channel"


class TestRouting(RoutingContract):
    kernel = "cpp.routing"
    device = "cpu"


def adapter_of(weights: str, **sizes: Any) -> Experts:
    """Of one expert."""
    given: dict[str, Any] = {
        "num_experts": 1,
        "top_k": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "weights": weights,
    }
    return Experts(ExpertsProblem(device=facts(torch.device("cpu")), **given | sizes))


def quantised(rows: torch.Tensor, known: torch.Tensor | None, grouped: bool) -> torch.Tensor:
    """What a kernel makes of activations, as values."""
    adapter = adapter_of(
        "fp8_block" if grouped else "fp8_channel",
        dtype=str(rows.dtype).removeprefix("torch."),
        activation_dtype="float8_e4m3fn",
    )
    into, scales = adapter._prepared("test", rows, known)
    assert scales is not None
    count, width = rows.shape
    codes = into.view(torch.bfloat16 if adapter._element_bytes == 2 else torch.float32).view(count, -1)
    assert not codes[:, width:].any()
    spread = scales.repeat_interleave(128 if grouped else width, 1)[:, :width]
    return codes[:, :width].float() * spread


def product_of_fp4(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, weights: str) -> torch.Tensor:
    """Tokens by the weights of one expert, before anything else is done to it."""
    adapter = adapter_of(weights)
    matrix = Matrix(codes.unsqueeze(0), scale.unsqueeze(0), None, None)
    into = torch.full((len(x), len(codes)), torch.nan)
    starts = torch.tensor([0, len(x)])
    adapter._product(adapter._prepared("test", x, None), None, starts, matrix, x.shape[1], None, into)
    return into


class TestExpertsInside:
    @pytest.mark.parametrize("weights", ["fp8_block", "fp8_channel", "mxfp4", "nvfp4"])
    @pytest.mark.parametrize("tokens", [1, 5, 6, 7, 13])
    def test_long_rows_and_odd_numbers_of_them(self, tokens: int, weights: str) -> None:
        sizes = {"hidden_size": 2080, "intermediate_size": 128, "num_experts": 2, "top_k": 2}
        arguments = moe_inputs("qwen3-30b-a3b", tokens=tokens, weights=weights, **sizes)
        for dtype in (None, torch.bfloat16):
            given = arguments | {"activation_dtype": dtype}
            agreement = compare(kernelhub.fused_moe(**given, backend="cpp"), given)
            assert agreement.ok, str(agreement)

    @pytest.mark.parametrize("weights", ["fp8_block", "mxfp4"])
    def test_tokens_in_several_rounds_give_the_same(self, weights: str, monkeypatch) -> None:
        sizes = {"hidden_size": 96, "intermediate_size": 128, "num_experts": 3, "top_k": 2}
        arguments = moe_inputs("qwen3-30b-a3b", tokens=11, weights=weights, **sizes)
        arguments["residual"] = torch.randn_like(arguments["x"])
        want = compare(kernelhub.fused_moe(**arguments, backend="cpp"), arguments)
        assert want.ok
        monkeypatch.setattr(experts_adapter, "_MOST_ADDED", 4 * 2 * 256)
        into = arguments["residual"].clone()
        kernelhub.fused_moe(**arguments | {"residual": into}, out=into, backend="cpp")
        assert compare(into, arguments).ok
        monkeypatch.setattr(experts_adapter, "_MOST_ADDED", 1)
        assert compare(kernelhub.fused_moe(**arguments, backend="cpp"), arguments).ok

    def test_more_rows_than_one_panel_takes(self) -> None:
        sizes = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 1, "top_k": 1}
        arguments = moe_inputs("qwen3-30b-a3b", tokens=2100, weights="mxfp4", **sizes)
        assert compare(kernelhub.fused_moe(**arguments, backend="cpp"), arguments).ok


@pytest.mark.parametrize("target", TARGETS)
class TestTargets:
    @pytest.fixture(autouse=True)
    def compiled_for(self, target: str, monkeypatch, tmp_path_factory):
        monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled"))
        if not able(target):
            pytest.skip(f"this CPU runs no {target}: 5 cases")
        flags = tuple(_retarget(build.flags(), target))
        monkeypatch.setattr(build, "flags", lambda: flags)
        build.library.cache_clear()
        yield
        build.library.cache_clear()

    def test_every_code_is_decoded_exactly(self, target: str) -> None:
        compiled = build.library("fp8_gemm.cpp")
        compiled.kernelhub_fp8_gemm_element_bytes.restype = ctypes.c_int64
        dtype = {2: torch.bfloat16, 4: torch.float32}[compiled.kernelhub_fp8_gemm_element_bytes()]
        codes = torch.arange(256).to(torch.uint8)
        for count in (256, 1, 31, 33, 100):
            some = codes.flip(0)[:count].contiguous()
            got = torch.full((-(-count // 32) * 32,), 7.0, dtype=dtype)
            compiled.kernelhub_fp8_decode(
                ctypes.c_void_p(some.data_ptr()), ctypes.c_int64(count), ctypes.c_void_p(got.data_ptr())
            )
            want = some.view(E4M3).to(dtype)
            assert torch.equal(got[:count].nan_to_num(nan=1e9), want.nan_to_num(nan=1e9))
            assert torch.equal(torch.signbit(got[:count])[~want.isnan()], torch.signbit(want)[~want.isnan()])
            assert not got[count:].any()

    def test_keeps_the_contract(self, target: str) -> None:
        subject = TestFp8Gemm()
        for case in subject.accepted_cases():
            subject.test_case(case)
        assert build.library.cache_info().currsize  # compiled for the target, and not one of before
        subject.test_nan_reaches_its_row_or_column_and_no_other()

    def test_experts_keep_theirs(self, target: str) -> None:
        subject = TestExperts()
        for case in subject.accepted_cases():
            subject.test_case(case)
        subject.test_static_scales_of_activations()
        subject.test_every_argument_changes_the_result()
        subject.test_nan_stays_with_its_token()

    def test_activations_are_quantised_to_the_bit(self, target: str) -> None:
        """Every float16 and what lies about half way between codes, by row, by group, and with a scale of their own."""
        every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
        values = every[every.isfinite()].float()
        random = torch.Generator().manual_seed(0)
        values = torch.cat([values, 448 * torch.randn(112, generator=random)]).view(-1, 100)
        for rows in (values, values[:, :64] * 1e-9, values.half(), values.clamp(-1e4, 1e4).bfloat16()):
            for known in (None, torch.tensor(0.75), torch.tensor(1.0)):
                for grouped in (False, True) if known is None else (False,):
                    wide = torch.cat([rows, rows], 1)
                    want = Activations("float8_e4m3fn", grouped).rounded(wide, known, torch.float32)
                    assert torch.equal(quantised(wide, known, grouped), want)

    def test_every_fp4_code_and_scale_is_decoded_exactly(self, target: str) -> None:
        """By tokens of one 1, of few rows and of many: what comes out is a column of the weights."""
        for weights, group, scales in (("mxfp4", 32, range(20, 235)), ("nvfp4", 16, range(1, 127))):
            raw = torch.tensor(list(scales)).to(torch.uint8)
            codes = torch.arange(256).to(torch.uint8).view(-1, group // 2).repeat(len(raw), 1)
            raw = raw.repeat_interleave(512 // group).view(-1, 1)
            exact = from_e2m1(codes) * (from_e8m0(raw) if weights == "mxfp4" else raw.view(E4M3).float())
            for tokens in (1, 3, 6, 7, group):
                x = torch.eye(group)[:tokens].bfloat16()
                assert torch.equal(product_of_fp4(x, codes, raw, weights), exact.t()[:tokens])


def _retarget(usual: tuple[str, ...], target: str) -> list[str]:
    return [f"-march={target}" if flag.startswith("-march") and target != "native" else flag for flag in usual]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        for tokens in (1, 9, 300):
            arguments = fp8_gemm_inputs(tokens=tokens, n=300, k=384)
            torch.set_num_threads(1)
            want = kernelhub.fp8_gemm(**arguments, backend="cpp")
            several = bmm_fp8_inputs(batch=3, tokens=tokens, n=100, k=96, b_scaling="batch")
            want_several = kernelhub.bmm_fp8(**several, backend="cpp")
            routed = {"num_experts": 3, "top_k": 2, "hidden_size": 192, "weights": "fp8_block"}
            experts = moe_inputs(tokens=tokens, intermediate_size=128, **routed)
            want_experts = kernelhub.fused_moe(**experts, backend="cpp")
            torch.set_num_threads(threads)
            assert torch.equal(kernelhub.fp8_gemm(**arguments, backend="cpp"), want)
            assert torch.equal(kernelhub.bmm_fp8(**several, backend="cpp"), want_several)
            assert torch.equal(kernelhub.fused_moe(**experts, backend="cpp"), want_experts)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_rounded_to_nearest_even(dtype) -> None:
    """Every float16, every bfloat16, and what lies half way and a little beside it, out of the epilogue."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    exact = bits.view(dtype).float()
    exact = exact[exact.isfinite()]
    step = torch.nextafter(exact, torch.tensor(torch.inf)) - exact
    wide = exact.view(torch.int32)
    half = 1 << (15 if dtype is torch.bfloat16 else 12)
    values = torch.cat([(wide + delta).view(torch.float32) for delta in (0, half, half - 1, half + 1)])
    assert (step >= 0).all()
    values = values[values.isfinite()]
    n = values.numel()
    scale = values.clone()
    b = torch.ones(n, 1).to(E4M3)
    for rows in (1, 9):
        a = torch.ones(rows, 1).to(E4M3)
        got = kernelhub.fp8_gemm(a, b, torch.ones(()), scale, out_dtype=dtype, backend="cpp")
        # Sums are float32 and go through one multiplication by the scale, which is exact here.
        assert torch.equal(got[-1], values.to(dtype))


class TestBuild:
    def test_is_kept_and_found_again(self, tmp_path: Path, monkeypatch) -> None:
        first = build.built(SOURCE, tmp_path)
        made = first.stat().st_mtime_ns
        monkeypatch.setattr(subprocess, "run", None)  # a second compilation would call it
        assert build.built(SOURCE, tmp_path) == first
        assert first.stat().st_mtime_ns == made
        assert sorted(path.name for path in first.parent.iterdir()) == [first.name, "manifest.json"]
        assert list(first.parent.parent.iterdir()) == [first.parent]

    def test_other_sources_flags_compilers_and_cpus_are_other_files(self, tmp_path: Path, monkeypatch) -> None:
        def made_for(source: Path, command: list[str]) -> str:
            return build.made_for(source, command).digest

        command = [cxx_compiler().value, *build.flags(), "-I."]
        names = {made_for(SOURCE, command), made_for(SOURCE, [*command[:-1], "-O0", command[-1]])}
        changed = tmp_path / SOURCE.name
        changed.write_text(SOURCE.read_text() + "\n")
        names.add(made_for(changed, command))
        names.add(made_for(SOURCE, [str(shutil.which("sh")), *command[1:]]))
        monkeypatch.setattr(build, "_cpu", lambda: "another")
        names.add(made_for(SOURCE, command))
        assert len(names) == 5

    def test_processes_that_compile_at_once_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        code = (
            "import torch, kernelhub\n"
            "from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs\n"
            "x = fp8_gemm_inputs(tokens=2, n=64, k=64)\n"
            "print(kernelhub.fp8_gemm(**x, backend='cpp').float().sum().item())\n"
        )
        environment = os.environ | {"KERNELHUB_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        answers = {process.communicate(timeout=300)[0] for process in running}
        assert len(answers) == 1
        assert "" not in answers
        assert len(list((tmp_path / "cpp").rglob("*.so"))) == 1


class TestFailures:
    """Without a compiler, or with one that fails, another kernel runs and the reason is told."""

    @pytest.fixture(autouse=True)
    def fresh(self, tmp_path: Path, monkeypatch):
        monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path / "cache"))
        build.library.cache_clear()
        kernelhub.reload()
        yield
        build.library.cache_clear()

    @staticmethod
    def call(**more: Any) -> torch.Tensor:
        return kernelhub.fp8_gemm(**fp8_gemm_inputs(tokens=2, n=64, k=64), **more)

    @staticmethod
    def decision() -> Any:
        selection = kernelhub.fp8_gemm.explain(**fp8_gemm_inputs(tokens=2, n=64, k=64))
        return next(item for item in selection.decisions if item.kernel == "cpp.fp8_gemm")

    def test_without_a_compiler_it_is_refused_with_a_remedy(self, monkeypatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        (rejection,) = self.decision().rejections
        assert rejection.code == "compiler_missing"
        assert "CXX=no-such-compiler" in rejection.reason
        assert "g++" in rejection.remedy
        assert self.call().shape == (2, 64)
        with pytest.raises(NoKernel, match="CXX=no-such-compiler is not a command"):
            self.call(backend="cpp")

    def test_without_any_folder_to_write_it_is_refused_with_a_remedy(self, tmp_path: Path, monkeypatch) -> None:
        (tmp_path / "file").write_text("")
        for name in ("KERNELHUB_CACHE_DIR", "XDG_CACHE_HOME", "TMPDIR"):
            monkeypatch.setenv(name, str(tmp_path / "file"))
        (rejection,) = self.decision().rejections
        assert rejection.code == "cache_not_a_folder"
        assert str(tmp_path / "file") in rejection.reason
        assert "KERNELHUB_CACHE_DIR" in rejection.remedy
        assert self.call().shape == (2, 64)

    def test_where_the_named_folder_cannot_be_written_it_is_kept_in_the_next_best(
        self, tmp_path: Path, monkeypatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path / "file"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        notices.forget()
        assert self.decision().accepted
        assert self.call(backend="cpp").shape == (2, 64)
        assert len(list((tmp_path / "xdg" / "kernelhub" / "cpp").rglob("*.so"))) == 1
        (notice,) = notices.cache_notices()
        assert notice.code == "cache_not_a_folder"
        assert str(tmp_path / "file") in notice.sentence

    @pytest.mark.parametrize(
        ("script", "code"),
        [
            ("echo 'x.cpp: error: no such thing' >&2; exit 1", "load_failed"),
            ("exit 0", "load_failed"),
            ("kill -9 $$", "load_killed"),
        ],
    )
    def test_a_compiler_that_fails_is_passed_over_and_reported(
        self, tmp_path: Path, script: str, code: str, monkeypatch
    ) -> None:
        broken = tmp_path / "g++"
        broken.write_text(f"#!/bin/sh\n{script}\n")
        broken.chmod(broken.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("CXX", str(broken))
        assert self.call().shape == (2, 64)
        (fallback,) = kernelhub.report().fallbacks
        assert (fallback.kernel, fallback.code) == ("cpp.fp8_gemm", code)
        assert "cannot compile fp8_gemm.cpp" in fallback.reason
        assert self.decision().rejections[0].code == code
        assert [path for path in (tmp_path / "cache" / "cpp").rglob("*") if path.suffix == ".so"] == []
        kernelhub.reload()
        with kernelhub.strict(), pytest.raises(KernelUnavailable, match="cannot compile"):
            self.call()

    def test_a_compiler_without_amx_is_reported(self, tmp_path: Path, monkeypatch) -> None:
        old = tmp_path / "g++"
        old.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -DKERNELHUB_NO_AMX -O0\n')
        old.chmod(old.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("CXX", str(old))
        inputs = paged_attention_inputs("gpt-oss-120b", seq_lens=(40, 9))
        amx = kernelhub.explain(kernelhub.paged_attention, **inputs).selected == "cpp.amx"
        assert kernelhub.paged_attention(**inputs).isfinite().all()
        assert amx == (facts(torch.device("cpu")).arch == "amx")
        lost = [(fallback.kernel, "no products by AMX" in fallback.reason) for fallback in kernelhub.report().fallbacks]
        assert lost == [("cpp.amx", True)] * amx

    @pytest.mark.skipif(facts(torch.device("cpu")).arch != "avx512_bf16", reason="no AVX-512 BF16, or AMX: one case")
    def test_a_compiler_without_avx512_bf16_is_reported(self, tmp_path: Path, monkeypatch) -> None:
        old = tmp_path / "g++"
        old.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -mno-avx512bf16 -O0\n')
        old.chmod(old.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("CXX", str(old))
        inputs = paged_attention_inputs(AttentionModel("groups of 16", 16, 1, 64, 64), seq_lens=(40, 9))
        assert kernelhub.explain(kernelhub.paged_attention, **inputs).selected == "cpp.avx512_bf16"
        assert kernelhub.paged_attention(**inputs).isfinite().all()
        (lost,) = kernelhub.report().fallbacks
        assert lost.kernel == "cpp.avx512_bf16"
        assert "no products by AVX-512 BF16" in lost.reason

    def test_explaining_compiles_nothing(self, tmp_path: Path) -> None:
        assert self.decision().accepted
        assert not (tmp_path / "cache").exists()
        assert self.call().shape == (2, 64)
        assert len(list((tmp_path / "cache" / "cpp").rglob("*.so"))) == 1


class TestShipped:
    """Of a wheel: libraries beside the sources, one for each level of instructions."""

    @pytest.fixture
    def base(self, tmp_path: Path, monkeypatch):
        """The library that every CPU runs, in a folder of its own."""
        base = tmp_path / "libkernelhub_base.so"
        linked = runpy.run_path(str(Path(kernelhub.__file__).parents[1] / "setup.py"), run_name="setup")["_linked"]()
        command = [str(cxx_compiler().value), "-shared", "-fPIC", str(build.SOURCES / "cpu.cpp"), *linked]
        subprocess.run([*command, "-o", str(base)], check=True)
        monkeypatch.setattr(toolchain, "cpu_kernels", lambda: found("CPU kernels", str(base), "here"))
        build.library.cache_clear()
        yield base
        build.library.cache_clear()

    def test_the_library_for_this_cpu_is_loaded_and_nothing_is_compiled(self, base: Path, monkeypatch) -> None:
        asked = ctypes.CDLL(str(base))
        level = build.LEVELS[asked.kernelhub_cpu_level()]
        if X86:
            assert (level == "base") == (not able("x86-64-v3"))
        shutil.copy(base, base.with_name(f"libkernelhub_{level}.so"))
        monkeypatch.setattr(subprocess, "run", None)
        assert level in Path(build.library("attention.cpp")._name).stem
        assert build.library("experts.cpp") is build.library("attention.cpp")

    def test_no_compiler_and_no_folder_are_needed(self, base: Path, monkeypatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        kernelhub.reload()
        selection = kernelhub.fp8_gemm.explain(**fp8_gemm_inputs(tokens=2, n=64, k=64))
        assert selection.selected == "cpp.fp8_gemm"

    def test_levels_are_those_of_the_wheel_s_build(self) -> None:
        text = (Path(kernelhub.__file__).parents[1] / "setup.py").read_text()
        assert [name for name in build.LEVELS if f'"{name}":' not in text] == []


def test_sources_travel_in_the_wheel(tmp_path: Path) -> None:
    """`csrc` lies beside the package in a checkout, and inside it in a wheel."""
    root = Path(kernelhub.__file__).parents[1]
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    shipped = {path.relative_to(tmp_path / "kernelhub") for path in (tmp_path / "kernelhub" / "csrc").rglob("*.*")}
    assert shipped >= {path.relative_to(root) for path in build.SOURCES.rglob("*") if path.suffix in (".cpp", ".h")}
