"""The JIT of released FlashInfers, their own code, tells what it does; ninja and tvm-ffi alone are fakes."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import kernelhub
from kernelhub.backends.flashinfer import watch
from kernelhub.dispatch.work import JOURNAL
from kernelhub.errors import NotWarmed
from tests.providers.flashinfer.test_calls import VERSIONS
from tests.providers.wheels import wheel
from tests.runtime.test_watches import call, told

_ = call  # a fixture


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(attributes, __path__=[])
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture(params=VERSIONS)
def jit(request, monkeypatch, tmp_path: Path):
    """`flashinfer.jit.core` of a release, under the name ``fi``, with what ninja built and tvm-ffi loaded."""
    folder = wheel("flashinfer-python", request.param) / "flashinfer" / "jit"
    ran: list[str] = []

    def run_ninja(workdir: Path, *_more: Any, **_named: Any) -> None:
        ran.append(f"ninja {workdir.name}")
        (workdir / f"{workdir.name}.so").touch()

    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    monkeypatch.delenv("FLASHINFER_NO_DOWNLOAD", raising=False)
    monkeypatch.setenv("FLASHINFER_CUBINS_REPOSITORY", "https://example.org/")
    stub(monkeypatch, "tvm_ffi", load_module=lambda path: ran.append(f"load {Path(path).stem}") or object())
    stub(monkeypatch, "fi")
    stub(monkeypatch, "fi.jit")
    stub(monkeypatch, "fi.compilation_context", CompilationContext=lambda: None)
    aot = tmp_path / "aot"
    env = stub(
        monkeypatch,
        "fi.jit.env",
        FLASHINFER_WORKSPACE_DIR=tmp_path / "work",
        FLASHINFER_CSRC_DIR=tmp_path / "csrc",
        FLASHINFER_JIT_DIR=tmp_path / "jit",
        FLASHINFER_AOT_DIR=aot,
        FLASHINFER_CUBIN_DIR=tmp_path / "cubins",
        FLASHINFER_CUBINS_REPOSITORY="https://example.org/",
        AOTArtifact=object,
        get_aot_path=lambda name: aot / name / f"{name}.so",
        get_aot_artifacts=lambda name: (),
    )
    sys.modules["fi.jit"].env = env  # type: ignore[attr-defined]
    written = {"generate_ninja_build_for_op": lambda **_: "", "get_nvcc_parallelism_flags": lambda *_: []}
    stub(monkeypatch, "fi.jit.cpp_ext", run_ninja=run_ninja, **written)
    stub(monkeypatch, "fi.jit.utils", write_if_different=lambda path, text: Path(path).write_text(text))
    for name in ("core", "cubin_loader"):
        monkeypatch.setitem(sys.modules, f"fi.jit.{name}", real(f"fi.jit.{name}", folder / f"{name}.py", monkeypatch))
    core: Any = sys.modules["fi.jit.core"]
    monkeypatch.setattr(core, "get_tmpdir", lambda: tmp_path, raising=False)
    watch.watch("fi.jit.core", JOURNAL)
    watch.watch_downloads("fi.jit.cubin_loader", JOURNAL)
    core.ran = ran
    return core


def real(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def spec_of(core: Any, name: str) -> Any:
    kind = getattr(core, "JitSpecNvcc", core.JitSpec)
    return kind(name, [], None, None, None, None)


class TestReleases:
    def test_a_module_is_compiled_once_and_then_loaded(self, jit, call) -> None:
        call(lambda: spec_of(jit, "decode").build_and_load())
        call(lambda: spec_of(jit, "decode").build_and_load())
        assert [row[:3] for row in told()] == [("compile", "decode", "flashinfer"), ("load", "decode", "flashinfer")]
        assert {row[3:] for row in told()} == {("attention", "works.k")}
        assert "load decode" in jit.ran

    def test_neither_after_seal(self, jit, call) -> None:
        call(lambda: spec_of(jit, "decode").build_and_load())
        ran = list(jit.ran)
        with kernelhub.seal():
            for name, kind in (("decode", "load"), ("prefill", "compile")):
                with pytest.raises(NotWarmed, match=f"{kind} {name}"):
                    call(lambda name=name: spec_of(jit, name).build_and_load())
        assert jit.ran == ran

    def test_no_download_after_seal(self, jit, call) -> None:
        loader: Any = sys.modules["fi.jit.cubin_loader"]
        with kernelhub.seal(), pytest.raises(NotWarmed, match=r"download https://example\.org/a\.cubin"):
            call(lambda: loader.get_cubin("a.cubin", "0" * 64))
        assert told() == []


@pytest.mark.parametrize("version", VERSIONS)
def test_the_tuner_measures_where_it_is_watched(version: str) -> None:
    folder = wheel("flashinfer-python", version) / "flashinfer"
    path = folder / "autotuner" / "autotuner.py"
    tree = ast.parse((path if path.is_file() else folder / "autotuner.py").read_text())
    (tuner,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "AutoTuner"]
    methods = {node.name: node for node in tuner.body if isinstance(node, ast.FunctionDef)}
    assert [item.arg for item in methods["_profile_single_kernel"].args.args][:2] == ["self", "runner"]


MASKED = """
import functools
MADE = []
@functools.cache
def get_cute_dsl_compiled_masked_gemm_kernel(m, n):
    MADE.append((m, n))
    return lambda: (m, n)
def grouped_gemm_nt_masked(m):
    return get_cute_dsl_compiled_masked_gemm_kernel(m=m, n=8)()
"""


def test_a_product_of_masked_rows_is_compiled_for_each_room_and_not_after_seal(monkeypatch, call) -> None:
    module: Any = stub(monkeypatch, "fi_masked")
    exec(MASKED, module.__dict__)
    watch.watch_masked("fi_masked", JOURNAL)
    for room in (64, 64, 128):
        call(lambda room=room: module.grouped_gemm_nt_masked(room))
    assert [row[:3] for row in told()] == [("compile", "grouped_gemm_nt_masked", "flashinfer")] * 2
    with kernelhub.seal():
        call(lambda: module.grouped_gemm_nt_masked(128))
        with pytest.raises(NotWarmed, match="compile grouped_gemm_nt_masked"):
            call(lambda: module.grouped_gemm_nt_masked(256))
    assert module.MADE == [(64, 8), (128, 8)]


@pytest.mark.parametrize("version", VERSIONS[2:])
def test_products_of_masked_rows_request_their_kernel_where_it_is_watched(version: str) -> None:
    path = wheel("flashinfer-python", version) / "flashinfer/gemm/kernels/grouped_gemm_masked_blackwell.py"
    tree = ast.parse(path.read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    called = {node.func.id for node in ast.walk(functions["_grouped_gemm_nt_masked_sm100"])
              if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}  # fmt: skip
    assert "get_cute_dsl_compiled_masked_gemm_kernel" in called


def test_a_kernel_of_cutile_is_compiled_for_each_kind_of_group_and_not_after_seal(monkeypatch, call) -> None:
    module = stub(monkeypatch, "tiles_compile", MADE=[])

    def compile_tile(kernel: Any, size: int) -> int:
        module.MADE.append(size)
        return size

    module.compile_tile = compile_tile
    watch.watch_tiles("tiles_compile", JOURNAL)
    watch.watch_tiles("tiles_compile", JOURNAL)
    kernel = types.SimpleNamespace(pyfunc=types.SimpleNamespace(__name__="per_group"))

    def launch(size: int) -> None:
        """As cuTile does: it keeps what was compiled, and imports the compiler where it needs it."""
        if size not in module.MADE:
            importlib.import_module("tiles_compile").compile_tile(kernel, size)

    for size in (64, 64, 128):
        call(lambda size=size: launch(size))
    assert [row[:3] for row in told()] == [("compile", "per_group", "cutile")] * 2
    with kernelhub.seal():
        call(lambda: launch(128))
        with pytest.raises(NotWarmed, match="compile per_group"):
            call(lambda: launch(256))
    assert module.MADE == [64, 128]


@pytest.mark.parametrize("version", ["1.4.0", "1.7.0"])
def test_cutile_compiles_where_it_is_watched(version: str) -> None:
    """`cuda.tile._compile` is imported with the first kernel that is compiled, and its function by each that is."""
    folder = wheel("cuda-tile", version, platform="manylinux2014_x86_64") / "cuda" / "tile"
    tree = ast.parse((folder / "_execution.py").read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
             and node.module == "cuda.tile._compile" for alias in node.names]  # fmt: skip
    assert "compile_tile" in names
    at_the_top = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert "cuda.tile._compile" not in at_the_top
    compiler = ast.parse((folder / "_compile.py").read_text())
    (made,) = [node for node in compiler.body if isinstance(node, ast.FunctionDef) and node.name == "compile_tile"]
    assert made.args.args[0].arg == "ann_func"
    assert (folder / "tune").is_dir()
