"""``kernelhub lock``: write the selection for every problem of a model to a file, and show what would change."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelhub.cli.console import Console, Table
from kernelhub.cli.lock_decisions import NEW, VERSIONS, Difference, differences, lock_for
from kernelhub.cli.options import USUAL, add_machine, add_model, add_packing, machine_of, served
from kernelhub.dispatch.explain import device_facts
from kernelhub.dispatch.lock_file import Lock, Locked, lock_text, read_lock
from kernelhub.dispatch.problem_class import device_key
from kernelhub.errors import ConfigurationError
from kernelhub.ops.models.problems import Need, problems_of
from kernelhub.probes.device import SIMULATED, DeviceFacts

_USUAL = "kernelhub.lock.json"


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """The command's options."""
    add_model(parser)
    add_packing(parser)
    add_machine(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"where to write (default: {_USUAL}; - for stdout)")
    parser.add_argument("--check", type=Path, metavar="FILE", help="write nothing; show what a new file would change")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument(
        "--versions", action="store_true", help="with --check, also report other versions of a kernel's libraries"
    )
    parser.add_argument("--json", action="store_true", help="print what was written, or the differences, as JSON")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Write a file; or, with ``--check``, 1 if a decision of one would change."""
    with _no_lock_in_force():
        return _check(arguments, console) if arguments.check is not None else _make(arguments, console)


@contextlib.contextmanager
def _no_lock_in_force() -> Iterator[None]:
    """Ignore the lock in force: an old file that cannot be read must not prevent writing a new one."""
    held = os.environ.pop("KERNELHUB_LOCK", None)
    try:
        yield
    finally:
        if held is not None:
            os.environ["KERNELHUB_LOCK"] = held


def _make(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.model is None:
        raise ConfigurationError("--model: name a model or a config.json, e.g. --model llama-3.1-8b")
    if arguments.versions:
        raise ConfigurationError("--versions belongs to --check")
    said = served(arguments)
    model = {"name": arguments.model, **{name: value for name, value in said.items() if value != USUAL[name]}}
    model |= {"packing": True} if arguments.packing else {}
    device = device_facts(arguments.device)
    lock = lock_for(_needs(model), device, machine_of(arguments), model)
    path = arguments.out or Path(_USUAL)
    if path != Path("-") and path.exists() and not arguments.force:
        raise ConfigurationError(
            f"{path} exists; --force overwrites it, --out FILE writes another, --check {path} shows what would change"
        )
    lacking = [item for item in lock.decisions if not item.kernel]
    if path == Path("-"):
        print(lock_text(lock), end="", file=console.stream)
        for item in lacking:
            print(_lacking(item), file=sys.stderr)
        return 1 if lacking else 0
    _write(path, lock_text(lock))
    if arguments.json:
        missing = [{"op": item.op, "layers": list(item.layers), "problem": dict(item.problem)} for item in lacking]
        console.json({"file": str(path), "decisions": len(lock.decisions), "without_kernel": missing})
    else:
        console.line(f"{path}: {len(lock.decisions)} decisions for {arguments.model} on {device}")
        console.line(f"use them with KERNELHUB_LOCK={path}; see changes with kernelhub lock --check {path}")
        for item in lacking:
            console.line(_lacking(item))
    return 1 if lacking else 0


def _lacking(item: Locked) -> str:
    return f"no kernel can run {item.op} of {', '.join(item.layers)}: `kernelhub explain {item.op}` says why"


def _check(arguments: argparse.Namespace, console: Console) -> int:
    old = read_lock(arguments.check)
    if arguments.out is not None:
        raise ConfigurationError("--check writes nothing; leave out --out")
    if arguments.model is not None:
        raise ConfigurationError(f"--check takes the model from the file, {old.model.get('name')}; leave out --model")
    if arguments.packing:
        raise ConfigurationError("--check takes --packing from the file; leave out --packing")
    device = device_facts(arguments.device) if arguments.device else _device_of(old)
    needs = _needs(old.model) if old.model.get("name") else ()
    found = differences(old, needs, device, machine_of(arguments))
    count = [item for item in found if item.kind != VERSIONS or arguments.versions]
    if arguments.json:
        console.json({"file": old.path, "same": not count, "differences": [item.to_dict() for item in found]})
    else:
        _show(old, found, console)
    return 1 if count else 0


def _show(old: Lock, found: list[Difference], console: Console) -> None:
    """The differences as a diff between the file and what would be written."""
    kinds = Counter(item.kind for item in found)
    same = len(old.decisions) - sum(count for kind, count in kinds.items() if kind != NEW)
    counted = ", ".join([f"{same} the same", *(f"{count} {kind}" for kind, count in sorted(kinds.items()))])
    console.heading(f"{old.path}: {len(old.decisions)} decisions for {old.model.get('name', 'no model')}: {counted}")
    for item in found:
        if item.kind == VERSIONS:
            continue
        decision = item.was or item.now
        assert decision is not None
        where = f"{old.path}:{item.was.line} " if item.was else ""
        console.line(f"@@ {where}{decision.op}, {' and '.join(decision.phases)}, {', '.join(decision.layers)} @@")
        console.line(f"  {json.dumps(dict(sorted(decision.problem.items())))}")
        for sign, side in (("-", item.was), ("+", item.now)):
            if side is not None:
                console.line(f"{sign} {side.kernel or 'no kernel'}{_versions(side)}  ({side.decided_by})")
        console.line(f"  {item.why}")
    rows = [(item.was.op, item.was.kernel, item.why) for item in found if item.kind == VERSIONS and item.was]
    if rows:
        console.line("the same kernels in other versions:")
        console.table(Table(("op", "kernel", "versions"), list(dict.fromkeys(rows))))


def _versions(item: Locked) -> str:
    return "".join(f" {name} {version}" for name, version in sorted(item.versions.items()))


def _needs(model: Mapping[str, Any]) -> tuple[Need, ...]:
    return problems_of(model["name"], **{name: model[name] for name in USUAL if name in model})


def _device_of(lock: Lock) -> DeviceFacts:
    """The device of the file: this machine's if it is of that kind, else a simulated one."""
    here = device_facts(None)
    if device_key(here) == lock.device:
        return here
    known = next((facts for facts in SIMULATED.values() if device_key(facts) == lock.device), None)
    if known is None:
        _, arch, name = lock.device
        raise ConfigurationError(
            f"{lock.path} is for {name}, {arch}, not for this machine; run it there or give --device"
        )
    return known


def _write(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old one or the new one."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise ConfigurationError(f"--out {path}: {error.strerror or error}; name a writable path") from None
