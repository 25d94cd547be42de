"""The laws of the house that can be read off the imports (DESIGN, section 2)."""

from __future__ import annotations

import ast
import functools
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import kernelhub
from kernelhub.dispatch.hub import HUB
from tests.laws.sources import FILES, ROOT, nodes, parsed, together

pytestmark = together
BACKENDS = {path.parent.name for path in (ROOT / "backends").glob("*/kernels.py")}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Absolute names that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def room(name: str) -> str:
    """The room of kernelhub that a module name lies in."""
    parts = name.split(".")
    return parts[1] if parts[0] == "kernelhub" and len(parts) > 1 else ""


# From the bottom to the top: a room may import itself and those before it.
ORDER = (
    "errors",
    "homes",
    "probes",
    "dispatch",
    "ops",
    "runtime",
    "backends",
    "evidence",
    "warming",
    "compat",
    "testing",
    "cli",
)


def edges() -> dict[str, set[str]]:
    """The modules that each module reaches: by an import anywhere in it, for types too, or by a string.

    Not counted: the table of `homes`, the targets of kernel records, which `test_every_target_of_a_record_is_defined`
    checks, and the names of rooms that are compared with names of modules or of entry points.
    """
    modules = {module_of(path): path for path in FILES}

    def module(name: str) -> str:
        while name not in modules:
            name = name.rpartition(".")[0]
        return name

    reached: dict[str, set[str]] = {}
    for name, path in modules.items():
        names = {imported for imported in imports(path) if imported.split(".")[0] == "kernelhub"}
        if name != "kernelhub.homes" and room(name) != "backends":
            strings = (node.value for node in nodes(path) if isinstance(node, ast.Constant))
            named = (re.fullmatch(r"(kernelhub(\.\w+)+)(:\w+)?", text) for text in strings if isinstance(text, str))
            names |= {match[1] for match in named if match} - NAMES_OF_ROOMS.get(name, set())
        reached[name] = {module(imported) for imported in names} - {name, "kernelhub"}
    return reached


NAMES_OF_ROOMS = {
    "kernelhub.dispatch.registry": {"kernelhub.backends"},  # the group of entry points
    "kernelhub.cli.probe_plugins": {"kernelhub.backends"},  # the same
}


def test_imports_have_no_circle() -> None:
    TopologicalSorter(edges()).prepare()


@pytest.mark.parametrize("upper", ORDER)
def test_a_room_imports_only_rooms_below_it(upper: str) -> None:
    """The package itself and __main__ are in no room."""
    inside = [path for path in FILES if room(module_of(path)) == upper]
    assert inside
    allowed = {*ORDER[: ORDER.index(upper) + 1], "__version__"}
    for path in inside:
        for imported in imports(path):
            if imported.startswith("kernelhub."):
                assert room(imported) in allowed, f"{module_of(path)} imports {imported}"


def test_ops_and_dispatch_import_the_package_for_no_name() -> None:
    """The package imports them."""
    for path in FILES:
        if room(module_of(path)) in ("probes", "dispatch", "ops", "runtime", "backends"):
            assert "kernelhub" not in imports(path), path


@pytest.mark.parametrize("part", ["ops", "dispatch", "evidence.cases"])
def test_ops_dispatch_and_cases_name_no_backend(part: str) -> None:
    inside = [path for path in FILES if f"{module_of(path)}.".startswith(f"kernelhub.{part}.")]
    assert inside
    for path in inside:
        check_names_no_backend(path)


def check_names_no_backend(path: Path) -> None:
    docstrings = {
        id(node.body[0].value)
        for node in nodes(path)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node)
    }
    # torch is no stranger to ops, and "cuda" is its name of a type of device; "cuda.NAME" is a kernel of ours.
    vendors = BACKENDS - {"torch", "cuda"} | {"flashinfer", "deep_gemm", "flash_attn", "flash_mla", "cudnn", "cutlass"}
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words = set(re.findall(r"[a-z_]+", node.value))
            assert not words & vendors, f"{path}:{node.lineno} names {words & vendors}"
            assert not re.search(r"(?<!torch\.)\bcuda\.[a-z]", node.value), f"{path}:{node.lineno}: {node.value}"
        elif isinstance(node, ast.Name):
            assert node.id not in vendors, f"{path}:{node.lineno} names {node.id}"


def test_backends_do_not_import_each_other() -> None:
    for backend in BACKENDS:
        for path in (ROOT / "backends" / backend).rglob("*.py"):
            for imported in imports(path):
                if imported.startswith("kernelhub.backends."):
                    assert imported.split(".")[2] in (backend, "shared"), f"{path} imports {imported}"


def test_records_import_no_adapter() -> None:
    """A backend's `kernels.py` gathers the records of its families; none imports what only an adapter needs."""
    for backend in BACKENDS:
        folder = ROOT / "backends" / backend
        light = re.compile(rf"kernelhub\.backends\.{backend}\.(\w+\.)*(devices|requirements|calls|standings)")
        families = {module_of(path) for path in folder.glob("*/**/__init__.py")}
        for path in (folder / "kernels.py", *folder.glob("*/**/__init__.py")):
            for imported in imports(path):
                own = light.fullmatch(imported.rpartition(".")[0]) or light.fullmatch(imported) or imported in families
                assert own or not imported.startswith("kernelhub.backends"), f"{path} imports {imported}"
                assert imported.split(".")[0] in ("kernelhub", "__future__", "dataclasses", "typing"), imported


def test_only_order_files_name_kernels_of_several_backends() -> None:
    for path in FILES:
        if "order" in path.parts or room(module_of(path)) != "backends":
            continue
        own = path.relative_to(ROOT / "backends").parts[0]
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found = re.fullmatch(r"(\w+)\.(\w+)", node.value)
                assert not (found and found[1] in BACKENDS - {own}), f"{path}:{node.lineno} names {node.value}"


def test_no_wildcard_and_no_name_of_a_model_in_the_public_api() -> None:
    models = re.compile(r"llama|qwen|gemma|deepseek|mistral|gpt_oss", re.IGNORECASE)
    assert not [name for name in kernelhub.__all__ if models.search(name)]


def test_every_target_of_a_record_is_defined() -> None:
    """Records name adapters and watches as text, so that a moved file would be missed until its kernel is selected."""
    kernelhub.attention.kernels()  # loads the registry
    items = [item for item in HUB.registry.backends.values() if item.backend and item.backend.name in BACKENDS]
    targets = {kernel.target for item in items for kernel in item.kernels}
    targets |= {watch.target for item in items if item.backend for watch in item.backend.watches}
    assert len(targets) > 100
    for target in targets:
        module, _, name = target.partition(":")
        body = parsed(ROOT.parent / (module.replace(".", "/") + ".py")).body
        defined = {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        assert name in defined, f"{target} is not defined"
