"""Calls as adapters write them are those of the table, which probes and `tests/providers` hold against the library.

Without this a parameter that an adapter gives and the table lacks would be a TypeError of the first release without it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelhub.backends.flashinfer import calls
from kernelhub.probes.signature import Call

HERE = Path(calls.__file__).parent
# Their functions are looked at once loaded.
MODULES = (
    "get_gemm_sm90_module",
    "get_fp4_kv_dequantization_module",
    "get_fp4_kv_quantization_module",
    "get_trtllm_comm_module",
)


def table() -> dict[str, list[Call]]:
    """The calls of the table by function, those of a class's constructor by the class."""
    found: dict[str, list[Call]] = {}
    for entry in (*calls.CALLS, *calls.NEWER):
        for call in entry if isinstance(entry, tuple) else (entry,):
            name = call.target.partition(":")[2].removesuffix(".__init__")
            found.setdefault(name, []).append(call)
    return found


def written() -> Iterator[tuple[str, str, ast.Call]]:
    """File, function of the library's, and the call: by name, unwrapped, as `_run` of a class, its wrapper's `plan`."""
    for file in sorted(HERE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        names = {
            item.asname or item.name: item.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flashinfer"
            for item in node.names
        }
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("inspect.unwrap("):
                assert isinstance(node.value, ast.Call)
                names[ast.unparse(node.targets[0])] = names[ast.unparse(node.value.args[0])]
        for part in tree.body if names else ():
            keeps = "_run = staticmethod(" in ast.unparse(part)
            used = [names[node.id] for node in ast.walk(part) if isinstance(node, ast.Name) and node.id in names]
            for node in ast.walk(part):
                if not isinstance(node, ast.Call):
                    continue
                called = ast.unparse(node.func)
                module, _, function = called.rpartition(".")
                if called in names or module in names:
                    yield file.name, names.get(called, function), node
                elif called == "wrapper.plan" or (called == "self._run" and keeps):
                    yield file.name, used[0] + called.removeprefix("self._run").removeprefix("wrapper"), node


def difference(node: ast.Call, call: Call) -> str:
    """What is written and not in the table, or the other way about; empty if nothing."""
    starred = any(isinstance(argument, ast.Starred) for argument in node.args)
    given, known = len(node.args), len(call.positional)
    if given > known or (given < known and not starred):
        return f"gives {given} by position, the table has {known}"
    keywords = {item.arg for item in node.keywords if item.arg}
    more = keywords - set(call.keywords)
    less = set(call.keywords) - keywords if all(item.arg for item in node.keywords) else set()
    return f"gives {sorted(more)} besides, and not {sorted(less)}" if more or less else ""


WRITTEN = [pytest.param(name, node, id=f"{file}:{node.lineno} {name}") for file, name, node in written()]


@pytest.mark.parametrize(("name", "node"), WRITTEN)
def test_a_call_is_written_as_the_table_has_it(name, node) -> None:
    if name in MODULES:
        assert not node.args
        assert not node.keywords
        return
    differences = [difference(node, call) for call in table()[name]]
    assert "" in differences, differences


def test_every_function_of_the_table_is_among_them() -> None:
    seen = {parameter.values[0] for parameter in WRITTEN}
    missing = {name for name in table() if not name.endswith((".run", "._plan_impl"))} - seen
    assert missing == {
        "trtllm_batch_decode_with_kv_cache",  # called as the one of XQA is, in the same place
        "nvfp4_kv_dequantize",  # what calls the module's function, which is looked at once it is loaded
        "nvfp4_kv_quantize",  # likewise
        "_split_precomputed_routing",  # not called: by it a release is told
    }


def test_a_parameter_that_the_table_lacks_would_be_reported() -> None:
    (node,) = (item.value for item in ast.parse("f(a, b, out=o, fast=True)").body if isinstance(item, ast.Expr))
    assert isinstance(node, ast.Call)
    assert difference(node, Call("x:f", ("a", "b"), ("out",))) == "gives ['fast'] besides, and not []"
    assert difference(node, Call("x:f", ("a",), ("out", "fast"))) == "gives 2 by position, the table has 1"
    assert difference(node, Call("x:f", ("a", "b"), ("out", "fast", "lse"))) == "gives [] besides, and not ['lse']"
