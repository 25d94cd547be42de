"""Kernels as nobody should write them: each computes `attention` rightly, but for one act in its launch.

    python -m tests.fuzz.hostile_kernels

verifies one kernel of every kind, each in a child, and prints what became of them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# What a launch does, as Python, and the code that verification must find; "ok" where the result is right all the same.
ACTS: dict[str, tuple[str, str]] = {
    "segfault": ("import ctypes; ctypes.string_at(0)", "crashed"),
    "leave": ("import os; os._exit(0)", "crashed"),
    "garbage": ("import os\n[_write(fd) for fd in range(64)]", "crashed"),
    "hang": ("import time; time.sleep(3600)", "hung"),
    "abort": ("import os; os.abort()", "crashed"),
    "killed": ("import os; os.kill(os.getpid(), 9)", "crashed"),
    "deaf": ("import ctypes; ctypes.PyDLL(None).pause()", "hung"),  # a hang that no thread of Python interrupts
    "leave_from_a_thread": ("import os, threading; threading.Thread(target=os._exit, args=(3,)).start()", "crashed"),
    "exit": ("raise SystemExit(0)", "crashed"),
    "interrupt": ("raise KeyboardInterrupt", "crashed"),
    "generator_exit": ("raise GeneratorExit", "crashed"),
    "recursion": ("def deep(): deep()\ndeep()", "raised"),
    "allocate": ("import torch; torch.empty(1 << 46, dtype=torch.uint8)", "raised"),
    "corrupt": ("out.mul_(1.5)", "wrong_numbers"),
    "print": ("import os; print('\\0\\xff' * 1000); os.write(1, bytes(range(256)) * 64)", "ok"),
    "read": ("import sys; assert sys.stdin.read() == ''", "ok"),
    "fork": ("import os; os.fork()", "ok"),  # two go on, of which one answers
    "fork_and_wait": ("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nelse: os._exit(0)", "ok"),
    "threads": ("import threading\n[threading.Thread(target=len, args=('',)).start() for _ in range(8)]", "ok"),
}
GATE = (
    *("hang", "segfault", "leave", "garbage", "exit", "interrupt", "recursion", "allocate", "corrupt", "print"),
    "fork",
)

_KERNELS = """
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Backend, Band, Kernel
from kernelhub.dispatch.standing import verified
from kernelhub.ops.attention.problem import AttentionProblem

BACKEND = Backend("hostile", "kernels that do what none should")
KERNELS = tuple(
    Kernel(
        op="attention", name=f"hostile.{{name}}", target=f"hostile_acts:{{name}}", summary=name, band=Band.PLUGIN,
        constraints=(anything(*AttentionProblem.__dataclass_fields__),),
        standings=(verified("*", evidence="so it says itself"),),
    )
    for name in {names!r}
)
"""
_ACTS = """
import os
from kernelhub.backends.torch.attention.blocked import Blocked

def _write(fd):
    try:
        os.write(fd, b"garbage\\n" * 3)
    except OSError:
        pass

def _made(name, act):
    code = compile(act, name, "exec")
    class Hostile(Blocked):
        def launch(self, q, k, v, step, values, out, lse):
            super().launch(q, k, v, step, values, out, lse)
            if q.numel():
                exec(code, {{"out": out, "_write": _write}})
    return Hostile

for _name, _act in {acts!r}.items():
    globals()[_name] = _made(_name, _act)
"""


def install(site: Path, names: Iterable[str], *, listed: bool = True) -> None:
    """A package with these kernels, as pip would leave it in a folder of sys.path; only modules if not `listed`."""
    names = tuple(names)
    (site / "hostile_kernels_plugin.py").write_text(_KERNELS.format(names=names))
    (site / "hostile_acts.py").write_text(_ACTS.format(acts={name: ACTS[name][0] for name in names}))
    if not listed:
        return
    info = site / "hostile_kernels_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile-kernels-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kernelhub.backends]\nhostile = hostile_kernels_plugin\n")


def told(found: Any) -> str:
    """What became of them, in one line."""
    codes = Counter(result.code for result in found.results)
    survived = f"{len(found.results)} hostile kernels verified, {sum(codes.values())} recorded"
    return f"{survived}: " + ", ".join(f"{count} {code}" for code, count in sorted(codes.items()))


def main() -> int:
    """All kinds; 1 if one was not found to be what it is."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        install(site, ACTS)
        sys.path.insert(0, folder)
        os.environ |= {"KERNELHUB_CACHE_DIR": str(site / "cache"), "KERNELHUB_VERIFY_TIMEOUT_S": "10"}
        import kernelhub

        found = kernelhub.verify("attention", backend="hostile", device="cpu", quick=True)
        for result in found.results:
            print(f"{result.kernel:<28} {result.code:<14} {result.reason[:140]}")
        print(told(found))
        return int(any(result.code != ACTS[result.kernel.partition(".")[2]][1] for result in found.results))


if __name__ == "__main__":
    sys.exit(main())
