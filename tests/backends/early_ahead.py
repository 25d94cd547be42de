"""Compile kernels over memory of all ranks whose launches begin early, for an H200, and report the order of their code.

    python -m tests.backends.early_ahead

Prints a JSON object for each launch: what comes before the wait for the last kernel, in PTX as it is written and in
machine code on any way, and what comes behind the place where the next launch may begin.
It must run in a process without TRITON_INTERPRET, which is why the test starts it as one.
"""

from __future__ import annotations

import json
import re
from typing import Any

import triton

from kernelhub.backends.triton.comm.adapter import ClusteredRmsNorm, OneShot, OneShotRmsNorm, PolledRmsNorm
from kernelhub.probes.device import simulated
from tests.backends.ahead.comm import _launch, _launch_norm
from tests.backends.triton_ahead import compiling_for
from tests.gluon.ahead import sass

KINDS = (OneShot, OneShotRmsNorm, PolledRmsNorm, ClusteredRmsNorm)
# Statements with memory that other kernels see, and jumps, which might lead past the wait.
PTX = {
    "wait": r"griddepcontrol\.wait",
    "next": r"griddepcontrol\.launch_dependents",
    "memory": r"(?<![\w.])(ld|st|atom|red|prefetch\w*|cp|discard|applypriority)\.(?!param|shared)",
    "jump": r"(?<![\w.])(bra|brx|call|ret|exit)\b",
}
SASS = {
    "wait": r"\bACQBULK\b",
    "next": r"\bPREEXIT\b",
    "look": r"\bLDG\S*\.STRONG\.SYS",  # at what another rank sends
    "memory": r"\b(LDG|STG|LD|ST|ATOM\w*|RED\w*|CCTL\w*|UBLK\w+)\b",
}
_LABEL, _NAMED = re.compile(r"\s*(\.L_x_\d+):"), re.compile(r"`\((\.L_x_\d+)\)")
_ENDS = re.compile(r"^\s*(BRA|BRX|JMX|EXIT|RET)\b(?!\.DIV|\.U)")  # without a predicate


def kind_of(line: str, patterns: dict[str, str]) -> str | None:
    return next((name for name, pattern in patterns.items() if re.search(pattern, line)), None)


def of_ptx(code: str) -> dict[str, Any]:
    """What stands before the wait, and between it and the place where the next launch may begin, in turn."""
    lines = [kind_of(re.sub(r"//.*", "", line), PTX) for line in code.split("\n")]
    names = [name for name in lines if name]
    waits, nexts = (names.count(name) for name in ("wait", "next"))
    first, then = (names.index(name) if name in names else len(names) for name in ("wait", "next"))
    return {"waits": waits, "nexts": nexts, "before_wait": names[:first] if waits else [], "between": then - first - 1}


def of_sass(listing: str) -> dict[str, Any]:
    """What can be reached from the beginning without a wait, and behind the place where the next launch may begin."""
    lines = [re.sub(r"/\*.*?\*/", "", line) for line in listing.split("\n") if "/*" in line or _LABEL.match(line)]
    labels = {match[1]: at for at, line in enumerate(lines) if (match := _LABEL.match(line))}
    kinds = [kind_of(line, SASS) for line in lines]

    def reached(starts: list[int], until: str) -> set[str]:
        seen, ahead = set(), list(starts)
        while ahead:
            at = ahead.pop()
            if at >= len(lines) or at in seen or kinds[at] == until:
                continue
            seen.add(at)
            ahead += [labels[name] for name in _NAMED.findall(lines[at])]
            ahead += [] if _ENDS.match(lines[at]) else [at + 1]
        return {kind for at in seen if (kind := kinds[at])}

    nexts = [at for at, kind in enumerate(kinds) if kind == "next"]
    return {
        "waits": kinds.count("wait"),
        "nexts": len(nexts),
        "without_wait": sorted(reached([0], "wait")),
        "after_next": sorted(reached([at + 1 for at in nexts], "next")),
    }


def main() -> None:
    device = simulated("H200")
    for kind in KINDS:
        for early in (0, 1, 2):
            adapter = type("Early", (kind,), {"early": early})
            with compiling_for(device) as launches:
                if kind is OneShot:
                    _launch(adapter, "32KB", 2, "bfloat16", device)
                else:
                    _launch_norm(adapter, 7168, 2, "bfloat16", device)
            for launched, kernel in launches:
                row = {
                    "kind": kind.__name__,
                    "early": early,
                    "kernel": launched["kernel"],
                    "triton": triton.__version__,
                }
                row["programmatic"] = bool(kernel.metadata.launch_pdl)
                listing = sass(kernel.asm["cubin"])
                row |= {"ptx": of_ptx(kernel.asm["ptx"]), "sass": of_sass(listing) if listing else None}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
