"""Compile Gluon launches of real calls for sm_90a, with no GPU, and report what came out.

    python -m tests.gluon.ahead [--family NAME] [--case NAME] [--first]

Prints one JSON object per launch: what spills, whether ptxas serialised matrix products (warnings C7510 to C7518, which
nothing else shows and which cost several times the speed), shared memory, counts of instructions in PTX and SASS, and
registers that machine code reads unwritten.
It must run in a process without TRITON_INTERPRET, which is why the test starts it as one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton

from kernelhub.probes.device import simulated
from tests.backends.triton_ahead import compiling_for
from tests.gluon import cases
from tests.gluon.registers import unwritten

CASES = {
    family.name: importlib.import_module(f"{cases.__name__}.{family.name}").CASES
    for family in pkgutil.iter_modules(cases.__path__)
}
DEVICE = "H200"
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_PTX = {
    "wgmma": r"wgmma\.mma_async",
    "tma_loads": r"cp\.async\.bulk\.tensor[^\n]*shared[^\n]*global",
    "tma_stores": r"cp\.async\.bulk\.tensor[^\n]*global\.shared",
    "register_moves": r"setmaxnreg",
    "copies": r"cp\.async\.c[ag]",
}
_PRODUCT = r"\b[HQ]GMMA"
_BRANCH = re.compile(r"\bBRA\S* [^`]*`\((\.L_x_\d+)\)")
_ENDS = re.compile(r"\*/\s+(BRA|BRX|JMX|EXIT|RET)\b(?!\.DIV|\.U)")  # without a predicate


def report(kernel: Any) -> dict[str, Any]:
    """What the compiler made of a kernel."""
    log, ptx = kernel.metadata.ptxas_log, kernel.asm["ptx"]
    listing = sass(kernel.asm["cubin"])
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return {
        "triton": triton.__version__,
        "shared_memory_bytes": kernel.metadata.shared,
        "spill_store_bytes": int(spilled[1]) if spilled else 0,
        "spill_load_bytes": int(spilled[2]) if spilled else 0,
        "serialised": sorted(set(re.findall(r"C75\d\d", log))),
        **{name: len(re.findall(pattern, ptx)) for name, pattern in _PTX.items()},
        "idle_barriers": idle_barriers(kernel.asm["ttgir"]),
        "listed": bool(listing),
        "unwritten": unwritten(listing),
        "loops": loops(listing),
    }


def idle_barriers(ttgir: str) -> list[str]:
    """Barriers that no warp group uses, so that other data share their memory."""
    specialized = re.search(r"ttg\.warp_specialize\(([^)]*)\)", ttgir)
    used = set(re.findall(r"%[\w#]+", specialized[1])) if specialized else set()
    for view, whole in reversed(re.findall(r"(%[\w#]+) = ttg\.memdesc_index (%[\w#]+)\[", ttgir)):
        if view in used:
            used.add(whole)
    made = re.findall(r"(%[\w#]+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(?:\d+x)?1xi64", ttgir)
    return sorted(set(made) - used)


def sass(cubin: bytes) -> str:
    """The listing of a compiled kernel; empty if the disassembler is not there."""
    tool = _TOOLS / "nvdisasm"
    if not tool.exists():
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True).stdout


def loops(listing: str) -> list[dict[str, int]]:
    """The innermost loops that multiply: instructions, matrix products, registers that are stored and loaded."""
    lines = listing.split("\n")
    labels = {match[1]: at for at, line in enumerate(lines) if (match := re.match(r"\s*(\.L_x_\d+):", line))}
    targets = [labels.get(match[1]) if (match := _BRANCH.search(line)) else None for line in lines]
    found = [(target, at) for at, target in enumerate(targets) if target is not None and target < at]
    long = [one for one in found if one[1] - one[0] > 15 and _comes_round(*one, lines, targets)]
    inner = [one for one in long if not any(one != o and one[0] <= o[0] and o[1] <= one[1] for o in long)]
    made = []
    for begin, end in sorted(inner):
        body = lines[begin:end]
        products = sum(bool(re.search(_PRODUCT, text)) for text in body)
        if products:
            stores, loads = (sum(bool(re.search(rf"\b{name}\b", text)) for text in body) for name in ("STL", "LDL"))
            made.append({"instructions": len(body), "products": products, "stores": stores, "loads": loads})
    return made


def _comes_round(begin: int, end: int, lines: list[str], targets: list[int | None]) -> bool:
    """Whether what begins at one line gets to the branch back to it, within those lines.

    Else it is a wait that is written behind the rest, and goes back to where it was called for.
    """
    seen, left = set(), [begin]
    while left:
        at = left.pop()
        if at == end:
            return True
        if at in seen or not begin <= at < end:
            continue
        seen.add(at)
        target = targets[at]
        if target is not None:
            left.append(target)
        if not _ENDS.search(lines[at]):
            left.append(at + 1)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", action="append", help="a family of ops; all of them by default")
    parser.add_argument("--case", action="append", help="a case by name; all of them by default")
    parser.add_argument("--first", action="store_true", help="the first case of each family")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        sys.exit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    device = simulated(DEVICE)
    families = options.family or sorted(CASES)
    for case in (case for family in families for case in CASES[family][: 1 if options.first else None]):
        if options.case and case.name not in options.case:
            continue
        with compiling_for(device) as launches:
            case.launch(device)
        for launched, kernel in launches:
            print(json.dumps({"case": case.name, **launched, **report(kernel)}), flush=True)


if __name__ == "__main__":
    main()
