"""State of the process lies in `HUB`, `GATE`, `JOURNAL` and `AUDITS`; what else a module changes is listed here."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.laws.sources import FILES, ROOT, nodes, parsed, together

pytestmark = together

# Variables of modules that functions change, with what they hold. A table that grows has a bound, by its keys or its
# code, which is said too.
STATE: dict[str, dict[str, str]] = {
    "__init__": {"_begun": "modules that threads import now"},
    "backends.deep_ep.buffers": {"_exchanges": "buffers, which are freed by a barrier of all ranks only"},
    "backends.deep_gemm.watch": {"_stand_ins": "the nvcc that stands before the library's, one for each copy of it"},
    "backends.custom_all_reduce.adapter": {
        "_made": "states of the library in workspaces of `backends.shared.symmetric`, while those live"
    },
    "backends.flashinfer.comm.workspace": {
        "_made": "addresses of workspaces of `backends.shared.symmetric`, while those live"
    },
    "backends.flashinfer.comm.experts.workspace": {
        "_made": "exchanges in workspaces of `backends.shared.symmetric`, while those live"
    },
    "backends.flashinfer.steps": {
        "_scratch": "workspaces, which captured graphs may use, for each kind, device and stream"
    },
    "backends.torch.gemm.fp4.dequantised": {"_PAIRS": "a small table for each device"},
    "backends.shared.slot_memory": {"_made": "slots in workspaces of `backends.shared.symmetric`, while those live"},
    "backends.shared.symmetric": {"_workspaces": "workspaces that captured graphs may use, while their groups live"},
    "backends.shared.operators": {"_files": "operator libraries that torch has loaded and cannot unload"},
    "compat.env.translation": {"_warned": "variables of engines that were warned about"},
    "compat.vllm.deep_gemm.calls": {
        "_functions": "functions of the library, by name",
        "_prepared": "copies of the library that were set up",
        "_rounds_on": "whether scales are rounded, one for each capability; emptied when settings change",
    },
    "compat.vllm.deep_gemm.indexer": {"_ones": "tensors that captured graphs may read, larger each time"},
    "compat.vllm.flashinfer.presence": {
        "_reached": "whether the page of cubins answered",
        "_warned": "one warning",
    },
    "compat.vllm.flashinfer.trtllm": {"_warned": "a few constant warnings"},
    "dispatch.load": {"IMPORTING": "threads that import now"},
    "dispatch.shapes": {"STANDING_IN": "tensors in place of meta tensors, while an op reads them"},
    "evidence.audit.findings": {"_guard": "a lock, made anew after a fork", "_reported": "problems that were logged"},
    "evidence.audit.watching": {"PENDING": "audits whose result is awaited, of a bounded queue"},
    "ops.ready": {"_KEPT": "how many bytes are ready, of 64 MB at most; its lock is held for a moment"},
    "ops.comm.topology": {"_known": "how the ranks of a group are connected, while it lives"},
    "ops.packed": {"_BY_MEMORY": "packed weights, while their memory lives"},
    "ops.precision": {
        "_entered": "guarded functions that run now",
        "_lock": "a lock, made anew after a fork",
        "_restore": "puts torch's settings back",
        "_turns": "how often they were changed",
    },
    "runtime.counters": {
        "_arenas": "memory of the counters, for each device",
        "_kept": "zeros, some for each device and stream, which launches leave zero",
    },
    "runtime.caches.lock": {
        "_thread_locks": "one for each locked file; emptied after a fork",
        "_thread_locks_guard": "a lock, made anew after a fork",
    },
    "runtime.caches.notices": {
        "_guard": "a lock, made anew after a fork",
        "_said": "notices, one for each code and subject",
        "_watchers": "functions that get new notices",
    },
    "runtime.caches.root": {"_failed": "folders that could not be used"},
    "runtime.caches.store": {
        "_memory": "documents of a process that can write nowhere",
        "_memory_guard": "a lock, made anew after a fork",
    },
}
_CHANGES = frozenset(
    {"add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "insert", "pop", "popitem"}
    | {"popleft", "remove", "setdefault", "update"}
)


def changed(path: Path) -> set[str]:
    """Names of a module's variables that its functions rebind or change."""
    own: set[str] = set()
    for node in parsed(path).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        own |= {target.id for target in targets if isinstance(target, ast.Name)}
    found: set[str] = set()
    for function in nodes(path):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        inside = list(ast.walk(function))
        local = {node.arg for node in inside if isinstance(node, ast.arg)}
        rebound = {name for node in inside if isinstance(node, ast.Global) for name in node.names}
        for node in inside:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                local |= {node.id} - rebound
        found |= rebound
        for node in inside:
            target: ast.expr | None = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
                target = node.func.value
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
                target = node.value
            if isinstance(target, ast.Name) and target.id in own - local:
                found.add(target.id)
    return found & own


def test_every_variable_that_a_module_changes_is_listed() -> None:
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): names for path in FILES if (names := changed(path))
    }
    assert found == {module: set(names) for module, names in STATE.items()}
