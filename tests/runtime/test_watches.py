"""What libraries compile, load, download and tune is told, for whom, and refused after `seal` where it is for a call.

FlashInfer's part is that of its released wheels in tests/providers/flashinfer/test_watch.py; DeepGEMM is here a library
that runs nvcc as it does, out of a shell, with a script for nvcc.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import kernelhub
from kernelhub.backends.cpp import build
from kernelhub.backends.deep_gemm import watch as deep_gemm
from kernelhub.backends.deep_gemm.nvcc import VARIABLE
from kernelhub.backends.flashinfer import watch as flashinfer
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Backend, Watch
from kernelhub.dispatch.work import JOURNAL
from kernelhub.errors import NotWarmed
from kernelhub.ops.attention.adapter import AttentionAdapter
from tests.dispatch.backends import qkv, record, register
from tests.runtime.caches import ROOT


class Works(AttentionAdapter[Any, Any]):
    """A kernel that does work before it launches: whatever a test gives it."""

    work: Any = staticmethod(lambda: None)
    launches = 0

    def launch(self, q: Any, k: Any, v: Any, step: Any, values: Any, out: Any, lse: Any) -> None:
        type(self).work()
        Works.launches += 1
        out.zero_()


@pytest.fixture
def call():
    """A call whose kernel does some work; ready before the test."""
    register("works", record("works.k", "tests.runtime.test_watches:Works"))
    Works.work = staticmethod(lambda: None)
    kernelhub.attention(*qkv(), backend="works")

    def run(work: Any) -> None:
        Works.work = staticmethod(work)
        kernelhub.attention(*qkv(), backend="works")

    return run


def told() -> list[tuple[Any, ...]]:
    return [(item.kind, item.what, item.by, item.op, item.kernel) for item in kernelhub.report().work]


class TestJournal:
    def test_says_what_for_whom_and_from_where(self, call) -> None:
        def work() -> None:
            with JOURNAL.doing("compile", "thing", "somebody"):
                pass

        call(work)
        assert told() == [("compile", "thing", "somebody", "attention", "works.k")]
        assert kernelhub.report().work[0].site.startswith(__file__)

    def test_work_of_nobody_is_allowed_after_seal(self) -> None:
        with kernelhub.seal():
            with JOURNAL.doing("compile", "thing", "somebody"):
                pass
            assert [item.op for item in kernelhub.report().after_seal] == [None]

    def test_a_refusal_that_foreign_code_loses_is_found_again(self, call) -> None:
        """As a callback of compiled code does, which prints what it raises and goes on with nothing."""

        def work() -> None:
            try:
                with JOURNAL.doing("download", "a.cubin", "somebody", swallows=True):
                    raise AssertionError("downloaded")
            except NotWarmed:
                pass
            raise RuntimeError("cannot load an empty binary")

        with kernelhub.seal(), pytest.raises(NotWarmed, match=r"download a\.cubin") as refused:
            call(work)
        assert "empty binary" in str(refused.value.__cause__)
        with pytest.raises(RuntimeError, match="another"):
            call(lambda: (_ for _ in ()).throw(RuntimeError("another")))

    def test_a_failure_is_reported_too(self, call) -> None:
        def work() -> None:
            with JOURNAL.doing("compile", "thing", "somebody"):
                raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            call(work)
        assert [kind for kind, *_ in told()] == ["compile"]


class TestCpp:
    @pytest.mark.fault("compile_after_seal")
    def test_compiles_once_and_never_after_seal(self, call, tmp_path: Path) -> None:
        source = tmp_path / "one.cpp"
        source.write_text('extern "C" int one() { return 1; }\n')
        call(lambda: build.built(source, tmp_path))
        assert told() == [("compile", "one.cpp", "cpp", "attention", "works.k")]
        assert kernelhub.report().work[0].seconds > 0
        other = tmp_path / "two.cpp"
        other.write_text('extern "C" int two() { return 2; }\n')
        launches = Works.launches
        with kernelhub.seal():
            call(lambda: build.built(source, tmp_path))  # compiled, so only found
            with pytest.raises(NotWarmed, match=r"compile two\.cpp"):
                call(lambda: build.built(other, tmp_path))
        assert Works.launches == launches + 1
        assert not list((tmp_path / "cpp").glob("two*"))


SPEC = """
class JitSpec:
    def __init__(self, name, compiled=False, aot=False):
        self.name, self.is_compiled, self.is_aot = name, compiled, aot
    def build(self, verbose=False):
        LOG.append(("build", self.name)); self.is_compiled = True
    def load(self):
        LOG.append(("load", self.name))
    def build_and_load(self):
        if not self.is_aot:
            self.build()
        return self.load()
LOG = []
"""
LOADER = """
LOG = []
def download_file(source, destination, session=None):
    LOG.append(source); return True
def get_cubin(name):
    download_file("https://example.org/" + name, name)
"""
TUNER = """
class AutoTuner:
    def _profile_single_kernel(self, runner, inputs, tactic):
        return 0.5
"""


@pytest.fixture
def library(monkeypatch):
    """Modules named as FlashInfer's, with what is hooked of them."""
    made = {}
    for name, source in (("fi", ""), ("fi.jit.core", SPEC), ("fi.jit.cubin_loader", LOADER), ("fi.autotuner", TUNER)):
        module = made[name] = types.ModuleType(name)
        exec(source, module.__dict__)
        monkeypatch.setitem(sys.modules, name, module)
    flashinfer.watch("fi.jit.core", JOURNAL)
    flashinfer.watch_downloads("fi.jit.cubin_loader", JOURNAL)
    flashinfer.watch_tuner("fi.autotuner", JOURNAL)
    return made


class TestFlashInfer:
    def test_distinguishes_compiling_from_loading(self, library, call) -> None:
        spec = library["fi.jit.core"].JitSpec
        call(lambda: spec("new").build_and_load())
        call(lambda: spec("here", compiled=True).build_and_load())
        call(lambda: spec("ahead", aot=True).build_and_load())
        call(lambda: spec("alone").build())
        assert [row[:3] for row in told()] == [
            ("compile", "new", "flashinfer"),
            ("load", "here", "flashinfer"),
            ("load", "ahead", "flashinfer"),
            ("compile", "alone", "flashinfer"),
        ]
        assert {row[3:] for row in told()} == {("attention", "works.k")}

    @pytest.mark.parametrize(
        ("kind", "state"), [("compile", {}), ("load", {"compiled": True}), ("load", {"aot": True})]
    )
    @pytest.mark.fault("load_after_seal", "compile_after_seal")
    def test_neither_after_seal(self, library, call, kind: str, state: dict[str, bool]) -> None:
        core = library["fi.jit.core"]
        with kernelhub.seal(), pytest.raises(NotWarmed, match=f"{kind} new"):
            call(lambda: core.JitSpec("new", **state).build_and_load())
        assert core.LOG == []

    @pytest.mark.fault("download_after_seal")
    def test_downloads(self, library, call) -> None:
        loader = library["fi.jit.cubin_loader"]
        call(lambda: loader.get_cubin("a.cubin"))
        with kernelhub.seal(), pytest.raises(NotWarmed, match=r"download https://example\.org/b\.cubin"):
            call(lambda: loader.get_cubin("b.cubin"))
        assert loader.LOG == ["https://example.org/a.cubin"]
        assert [row[:2] for row in told()] == [("download", "https://example.org/a.cubin")]

    @pytest.mark.fault("tune_after_seal")
    def test_tuning(self, library, call) -> None:
        tuner = library["fi.autotuner"].AutoTuner()
        call(lambda: tuner._profile_single_kernel(self, [], 0) if (self := object()) else None)
        assert [row[:2] for row in told()] == [("tune", "object")]
        with kernelhub.seal(), pytest.raises(NotWarmed, match="tune object"):
            call(lambda: tuner._profile_single_kernel(object(), [], 0))


NVCC = """#!/bin/sh
case "$1" in --version) echo "release 13.0"; exit 0;; esac
for word in "$@"; do last=$word; done
touch "$last"
"""
# As DeepGEMM's C++ does: the compiler is read at the first call, and run by a shell.
DEEP_GEMM = """
import os, subprocess
from pathlib import Path
NVCC = None
LAUNCHED = []
def find_cuda_home():
    return HOME
def gemm(name):
    global NVCC
    NVCC = NVCC or os.environ.get("DG_JIT_NVCC_COMPILER") or HOME + "/bin/nvcc"
    cubin = Path(HOME, name + ".cubin")
    if not cubin.exists():
        answer = subprocess.run(f"cd {HOME} && {NVCC} {HOME}/kernel.{name}/kernel.cu -cubin -o {cubin}", shell=True)
        if answer.returncode:
            raise RuntimeError("NVCC compilation failed")
    LAUNCHED.append(name)
"""


PYTHON_JITS = {
    "functions": """
import subprocess
def build(name):
    subprocess.check_call(["true", f"k.{name}/kernel.cu"])
""",
    "classes": """
class NVCCCompiler:
    @classmethod
    def compile(cls, name, code, target):
        pass
def build(name):
    NVCCCompiler.compile(name, "", "")
""",
}


@pytest.fixture
def deep(tmp_path: Path, monkeypatch):
    """A library that compiles by nvcc from below Python, and a script for nvcc."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(NVCC)
    nvcc.chmod(0o700)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(deep_gemm, "_stand_ins", {})
    module = types.ModuleType("dg")
    module.HOME = str(tmp_path)  # type: ignore[attr-defined]
    exec(DEEP_GEMM, module.__dict__)
    monkeypatch.setitem(sys.modules, "dg", module)
    changed = list(kernelhub.dispatch.gate.GATE.changed)
    deep_gemm.watch("dg", JOURNAL)
    yield module
    kernelhub.dispatch.gate.GATE.changed[:] = changed
    os.environ.pop(VARIABLE, None)


class TestDeepGemm:
    def test_what_nvcc_compiles_is_reported_with_its_op(self, deep, call) -> None:
        gemm = deep_gemm.watched("dg", deep.gemm)
        call(lambda: gemm("a"))
        call(lambda: gemm("a"))
        assert told() == [("compile", "kernel.a/kernel.cu", "deep_gemm", "attention", "works.k")]
        assert 0 < kernelhub.report().work[0].seconds < 60
        assert deep.LAUNCHED == ["a", "a"]

    @pytest.mark.fault("compile_after_seal")
    def test_nothing_is_compiled_for_a_call_after_seal(self, deep, call, tmp_path: Path, capfd) -> None:
        gemm = deep_gemm.watched("dg", deep.gemm)
        call(lambda: gemm("a"))
        with kernelhub.seal():
            call(lambda: gemm("a"))
            with pytest.raises(NotWarmed, match=r"compile kernel\.b/kernel\.cu") as refused:
                call(lambda: gemm("b"))
        assert "NVCC compilation failed" in str(refused.value.__cause__ or refused.value.__context__)
        assert deep.LAUNCHED == ["a", "a"]
        assert not (tmp_path / "b.cubin").exists()
        call(lambda: gemm("b"))
        assert deep.LAUNCHED == ["a", "a", "b"]

    def test_an_engine_that_uses_the_library_itself_goes_on(self, deep, call) -> None:
        call(lambda: deep_gemm.watched("dg", deep.gemm)("a"))
        with kernelhub.seal():
            deep.gemm("theirs")
        assert deep.LAUNCHED == ["a", "theirs"]

    def test_nvcc_says_its_version_as_before(self, deep) -> None:
        answer = os.popen(f"{os.environ[VARIABLE]} --version").read()
        assert answer == "release 13.0\n"

    def test_two_names_of_a_copy_have_one_stand_in(self, deep, monkeypatch) -> None:
        path = os.environ[VARIABLE]
        monkeypatch.setitem(sys.modules, "vllm.dg", deep)
        deep_gemm.watch("vllm.dg", JOURNAL)
        assert os.environ[VARIABLE] == path

    @pytest.mark.parametrize("form", PYTHON_JITS)
    def test_the_jit_in_python_up_to_1_0(self, form: str, call, monkeypatch) -> None:
        source = PYTHON_JITS[form]
        compiler = types.ModuleType("dg1.jit.compiler")
        exec(source, compiler.__dict__)
        monkeypatch.setitem(sys.modules, "dg1.jit.compiler", compiler)
        deep_gemm.watch("dg1", JOURNAL)
        call(lambda: compiler.build("a"))
        assert [(kind, by) for kind, _, by, *_ in told()] == [("compile", "deep_gemm")]
        with kernelhub.seal(), pytest.raises(NotWarmed):
            call(lambda: compiler.build("b"))


class TestWatching:
    @pytest.mark.parametrize("target", [f"{__name__}:stumbles", f"{__name__}:no_such_function", "no_such_module:watch"])
    def test_one_that_fails_is_said_once_and_takes_no_call_down(self, target: str, monkeypatch, caplog) -> None:
        backend = Backend("odd", "odd", watches=(Watch("an_odd_library", target),))
        monkeypatch.setattr(HUB, "_watched", set(HUB._watched))
        monkeypatch.setitem(sys.modules, "an_odd_library", types.ModuleType("an_odd_library"))
        kernelhub.register_backend(
            types.SimpleNamespace(__name__="odd", BACKEND=backend, KERNELS=(record("odd.k", "Ones"),))
        )
        for more in ({}, {"causal": True}):
            assert float(kernelhub.attention(*qkv(), **more).mean()) == 1.0
        assert [item.kernel for item in kernelhub.report().rows] == ["odd.k", "odd.k"]
        said = [item.message for item in caplog.records if item.name == "kernelhub.watch"]
        assert len(said) == 1
        assert "cannot hook an_odd_library: its compiles are neither counted nor refused" in said[0]

    def test_imports_no_library(self) -> None:
        for watch in HUB.registry.watches:
            here = watch.module in sys.modules
            HUB.watch()
            assert (watch.module in sys.modules) == here

    def test_a_library_of_a_plugin_is_watched_once_it_is_imported(self, monkeypatch) -> None:
        monkeypatch.setattr(sys.modules[__name__], "SEEN", [])
        backend = Backend("late", "late", watches=(Watch("a_late_library", f"{__name__}:saw"),))
        kernelhub.register_backend(
            types.SimpleNamespace(__name__="late", BACKEND=backend, KERNELS=(record("late.k", "Ones"),))
        )
        kernelhub.attention(*qkv())
        assert SEEN == []
        monkeypatch.setitem(sys.modules, "a_late_library", types.ModuleType("a_late_library"))
        kernelhub.attention(*qkv(), causal=True)
        kernelhub.attention(*qkv(), window=2)
        assert SEEN == ["a_late_library"]


SEEN: list[str] = []


def stumbles(module: str, journal: Any) -> None:
    raise AttributeError("the library has changed")


def saw(module: str, journal: Any) -> None:
    SEEN.append(module)


class TestTriton:
    def test_what_is_in_its_cache_is_loaded_and_not_compiled(self, tmp_path) -> None:
        """With the real compiler, for a GPU that is not here. Another's listener is heard, too."""
        pytest.importorskip("triton")
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "PYTHONPATH": str(ROOT)}
        (tmp_path / "compiles.py").write_text(_COMPILES)

        def kinds(width: int) -> list[str]:
            command = [sys.executable, str(tmp_path / "compiles.py"), str(width)]
            answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
            assert answer.returncode == 0, answer.stderr[-2000:]
            found: list[str] = json.loads(answer.stdout.splitlines()[-1])
            return found

        assert [kinds(16), kinds(16), kinds(32)] == [
            ["compile", "other: False"],
            ["load", "other: True"],
            ["compile", "other: False"],
        ]


_COMPILES = """
import json, sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

heard = []
triton.knobs.compilation.listener = lambda **told: heard.append(f"other: {told['cache_hit']}")

from kernelhub.backends.triton.watch import watch
from kernelhub.dispatch.work import JOURNAL

@triton.jit
def copy_kernel(source, target, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    tl.store(target + at, tl.load(source + at))

watch("triton", JOURNAL)
kinds = {"source": "*fp32", "target": "*fp32", "WIDTH": "constexpr"}
source = ASTSource(copy_kernel, kinds, {"WIDTH": int(sys.argv[1])})
triton.compiler.compile(source, target=GPUTarget("cuda", 90, 32))
print(json.dumps([work.kind for work in JOURNAL.work] + heard))
"""
