"""CUTLASS' DSL tells what it compiles: its own classes for that, out of released wheels, on a compiler that is none."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import kernelhub
from kernelhub.backends.flash_attn import watch
from kernelhub.backends.flash_attn.kernels import BACKEND
from kernelhub.dispatch.work import JOURNAL
from kernelhub.errors import NotWarmed
from tests.providers.flash_attn.test_released_wheels import FA4_VERSIONS
from tests.providers.wheels import wheel
from tests.runtime.test_watches import call, told

_ = call  # a fixture
DSL_VERSIONS = ("4.6.2", "4.8.1")  # the oldest that FlashAttention-4 takes, and the newest


def package(version: str) -> Path:
    return wheel("nvidia-cutlass-dsl-libs-core", version) / "nvidia_cutlass_dsl" / "dsl_packages" / "cutlass"


def class_of(path: Path, name: str) -> ast.ClassDef:
    (found,) = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return found


class UserError(Exception):
    """What the DSL raises for a wrong use."""


class Options(dict[Any, Any]):
    """Compile options, none of which is chosen."""

    def __missing__(self, kind: Any) -> Any:
        return types.SimpleNamespace(value=False)


class Language:
    """What a decorated function belongs to: it is called where the DSL would trace and compile."""

    compiled: list[str]

    def __init__(self) -> None:
        self.compiled = []

    @staticmethod
    def _lazy_initialize_dsl(function: Any) -> None:
        pass

    def compile_and_cache(self, module: Any, module_hash: Any, function_name: str, *more: Any, **named: Any) -> str:
        self.compiled.append(function_name)
        return function_name

    def _preprocess_and_replace_code(self, function: Any) -> None:
        pass

    def _func(self, function: Any, *arguments: Any, **named: Any) -> Any:
        assert named["no_cache"] is True
        assert named["compile_only"] is True
        return self.compile_and_cache("the module", "its hash", f"cutlass_{function.__name__}", None)


@pytest.fixture(params=DSL_VERSIONS)
def cute(request, monkeypatch) -> Any:
    """`cute.compile` of a release, hooked."""
    compiler, dsl, runtime, base = (types.ModuleType(f"real_cutlass{end}") for end in ("c", "d", "r", ""))
    language = type("BaseDSL", (Language,), {"compile_and_cache": Language.compile_and_cache})
    dsl.BaseDSL = language  # type: ignore[attr-defined]
    base.__path__ = []
    compiler.__package__ = "real_cutlass"
    for name, module in (("", base), (".compiler", compiler), (".dsl", dsl), (".runtime", runtime)):
        monkeypatch.setitem(sys.modules, f"real_cutlass{name}", module)
    found = class_of(package(request.param) / "base_dsl" / "compiler.py", "CompileCallable")
    stand_ins = {
        "Any": Any,
        "inspect": inspect,
        "contextlib": contextlib,
        "CompileOptions": lambda *_options: types.SimpleNamespace(options=Options()),
        "_parse_compile_options_from_str": lambda text: types.SimpleNamespace(options=Options()),
        "BooleanCompileOption": type("BooleanCompileOption", (), {}),
        "DSLUserCodeError": UserError,
        "_diagnostics": types.SimpleNamespace(DiagId=types.SimpleNamespace(CALL_MISSING_JIT_DECORATOR="no decorator")),
        **{name: name for name in ("FrontendNext", "DisableCuteExtCompile", "DeviceTarget", "RDC")},
    }
    compiler.__dict__.update(stand_ins)
    exec(compile(ast.Module([found], []), "compiler.py", "exec"), compiler.__dict__)
    runtime.load_module = lambda path, *, enable_tvm_ffi=False: path  # type: ignore[attr-defined]
    watch.watch("real_cutlass.compiler", JOURNAL)
    watch.watch_functions("real_cutlass.dsl", JOURNAL)
    watch.watch_loads("real_cutlass.runtime", JOURNAL)
    language.load_module = staticmethod(lambda path: runtime.load_module(path, enable_tvm_ffi=True))  # type: ignore[attr-defined]
    made: Any = types.SimpleNamespace(compile=compiler.CompileCallable(), language=language())  # type: ignore[attr-defined]
    return made


def forward(language: Any) -> Any:
    """An object that is called, as FlashAttention's kernels are."""

    class Forward:
        def __call__(self, *arguments: Any) -> None:
            pass

    Forward.__call__._dsl_object = language  # type: ignore[attr-defined]
    return Forward()


class TestReleases:
    def test_what_a_call_compiles_is_reported_once_with_its_op(self, cute, call) -> None:
        call(lambda: cute.compile(forward(cute.language), 1, options="--enable-tvm-ffi"))
        assert cute.language.compiled == ["cutlass___call__"]
        ((kind, what, by, op, kernel),) = told()
        assert (kind, by, op, kernel) == ("compile", "cute_dsl", "attention", "works.k")
        assert what.endswith(".Forward")

    def test_options_in_brackets_and_other_callables_are_the_same(self, cute, call) -> None:
        def kernel() -> None:
            pass

        kernel._dsl_object = cute.language  # type: ignore[attr-defined]
        call(lambda: cute.compile["an option"](kernel))
        assert [row[1].rpartition(".")[2] for row in told()] == ["kernel"]

    def test_a_function_that_is_called_as_it_is(self, cute, call) -> None:
        call(lambda: cute.language.compile_and_cache("module", "hash", "cutlass_copy", None))
        assert [row[:3] for row in told()] == [("compile", "cutlass_copy", "cute_dsl")]

    def test_what_is_loaded_from_disk(self, cute, call) -> None:
        call(lambda: cute.language.load_module("/cache/fwd/0123.o"))
        assert [row[:3] for row in told()] == [("load", "0123.o", "cute_dsl")]

    def test_nothing_after_seal_but_an_engine_s_own(self, cute, call) -> None:
        with kernelhub.seal():
            with pytest.raises(NotWarmed, match=r"compile .*\.Forward"):
                call(lambda: cute.compile(forward(cute.language)))
            with pytest.raises(NotWarmed, match="compile cutlass_copy"):
                call(lambda: cute.language.compile_and_cache("module", "hash", "cutlass_copy", None))
            with pytest.raises(NotWarmed, match=r"load 0123\.o"):
                call(lambda: cute.language.load_module("/cache/fwd/0123.o"))
            assert cute.language.compiled == []
            cute.compile(forward(cute.language))
            assert [item.op for item in kernelhub.report().after_seal] == [None]

    def test_after_a_failure_the_next_is_reported_again(self, cute, call) -> None:
        with pytest.raises(UserError, match="no decorator"):
            call(lambda: cute.compile(type("Undecorated", (), {"__call__": lambda self: None})()))
        call(lambda: cute.compile(forward(cute.language)))
        assert len(told()) == 2


@pytest.mark.parametrize("version", DSL_VERSIONS)
class TestWhatIsHooked:
    def test_the_public_name_is_an_object_of_the_hooked_class(self, version) -> None:
        text = (package(version) / "cute" / "__init__.py").read_text()
        assert "\ncompile = _dsl.CompileCallable()\n" in text
        methods = class_of(package(version) / "base_dsl" / "compiler.py", "CompileCallable").body
        inner = {
            node.name: ast.unparse(node.body[-1])
            for node in methods
            if isinstance(node, ast.FunctionDef) and node.name in ("__call__", "to_precompiled_mlir", "compile_to")
        }
        assert inner["__call__"] == "return self._compile(*args, **kwargs)"
        assert inner["to_precompiled_mlir"] == "return self._compile(func, *args, **kwargs)"
        assert inner["compile_to"] == "return self.to_precompiled_mlir(func, *args, **kwargs)"

    def test_the_name_of_a_function_is_where_it_is_looked_for(self, version) -> None:
        methods = class_of(package(version) / "base_dsl" / "dsl.py", "BaseDSL").body
        (method,) = [node for node in methods if isinstance(node, ast.FunctionDef) and node.name == "compile_and_cache"]
        names = [argument.arg for argument in method.args.args]
        assert names[1 + watch._FUNCTION_NAME] == "function_name"

    def test_modules_that_are_waited_for_are_there(self, version) -> None:
        for item in BACKEND.watches:
            path = package(version).joinpath(*item.module.split(".")[1:])
            assert path.with_suffix(".py").is_file(), item.module
        assert "load_module as load_module" in (package(version) / "cute" / "runtime.py").read_text()


@pytest.mark.parametrize("version", FA4_VERSIONS)
def test_flash_attention_compiles_by_nothing_else(version) -> None:
    folder = wheel("flash-attn-4", version) / "flash_attn" / "cute"
    interface = (folder / "interface.py").read_text()
    assert interface.count("cute.compile(") > 5
    assert "cute.runtime.load_module(" in (folder / "cache_utils.py").read_text()
    for path in folder.glob("*.py"):
        if path.name.startswith(("bench", "testing")):
            continue
        text = path.read_text()
        for other in ("nvrtc", "load_inline", "cpp_extension", "triton.jit"):
            assert other not in text, f"{path.name} uses {other}"
