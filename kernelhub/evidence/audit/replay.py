"""Storage of a wrong call in a file, and its replay: `kernelhub replay`."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.api import use
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.problem import WEIGHT_LAYOUT, as_dict
from kernelhub.dispatch.select import no_kernel
from kernelhub.errors import CacheError
from kernelhub.evidence.audit.found import WrongCall, lift
from kernelhub.evidence.call import Failed, GuardedCall
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.poison import kind_of_error
from kernelhub.evidence.quarantine import now
from kernelhub.evidence.validity import key_of
from kernelhub.ops.case import Arguments, bytes_of
from kernelhub.runtime.caches.cases import read_case, write_case
from kernelhub.runtime.caches.trusted import Untrusted

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_SMALL = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2")
_WHOLE = ("uint8", "int8", "int16", "int32", "int64", "bool")
_DTYPES = {name: getattr(torch, name) for name in (*_FLOATS, *_SMALL, *_WHOLE) if hasattr(torch, name)}
_HOW = {"op": str, "kernel": str, "class": str, "date": str, "figures": str, "bytes": int, "digest": str}


def keep_case(found: WrongCall) -> tuple[Path | None, str]:
    """Store a wrong call; returns the file, or None and the reason."""
    parts: list[bytes] = []
    kernel, problem = found.kernel, found.selection.problem
    try:
        arguments = {name: _written(value, parts) for name, value in found.arguments.items()}
        results = {name: _written(value, parts) for name, value in found.results.items()}
        num_bytes = sum(map(len, parts))
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        header = {
            "op": kernel.op,
            "kernel": kernel.name,
            "class": found.problem_class,
            "problem": {name: str(value) for name, value in as_dict(problem).items()},
            "date": now(),
            "figures": found.figures,
            "versions": key_of(kernel, problem.device),
            "arguments": arguments,
            "results": results,
            "bytes": num_bytes,
            "digest": digest.hexdigest(),
        }
        return write_case(re.sub(r"[^A-Za-z0-9_.+-]", "_", f"{kernel.op}.{kernel.name}"), header, parts, num_bytes)
    except (OSError, TypeError, MemoryError) as error:
        return None, str(error)


def _written(value: Any, parts: list[bytes]) -> Any:
    """A value for JSON; the bytes of tensors are appended to `parts`."""
    if isinstance(value, Tensor):
        begin = sum(map(len, parts))
        parts.append(bytes_of(value.cpu().contiguous()).numpy().tobytes())
        return {"tensor": str(value.dtype)[6:], "shape": list(value.shape), "at": begin}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [_written(part, parts) for part in value]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)[6:]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"an argument is a {type(value).__name__}, which cannot be stored")


@dataclass(frozen=True)
class Kept:
    """A case read from a file.

    Attributes:
        op, kernel: the op and the wrong kernel.
        problem_class: the problem class.
        date: date of the call.
        figures: the error in words.
        versions: versions at that time.
        arguments: arguments of the call, on the CPU.
        results: results of the kernel, on the CPU.
    """

    op: str
    kernel: str
    problem_class: str
    date: str
    figures: str
    versions: dict[str, str]
    arguments: Arguments
    results: dict[str, Tensor]


def load_case(path: Path) -> Kept:
    """A case from its file.

    Raises:
        CacheError: it cannot be read, other users could have written it, or it is not a case.
    """
    try:
        header, content = read_case(path)
        return _from_header(header, content)
    except Untrusted as error:
        remedy = f"copy it into a folder that only this user can write, with `chmod 600 {path}`"
        raise CacheError(f"{path} is not read: {error.strerror}; {remedy}") from error
    except OSError as error:
        remedy = "`kernelhub replay` lists the files that are kept"
        raise CacheError(f"{path} is not read: {error.strerror or error}; {remedy}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CacheError(f"{path} is not read: {error}; give a file that an audit wrote") from error


def _from_header(header: dict[str, Any], content: bytes) -> Kept:
    for name, kind in _HOW.items():
        if not isinstance(header.get(name), kind):
            raise ValueError(f"its {name!r} is missing")
    if header["bytes"] != len(content) or hashlib.sha256(content).hexdigest() != header["digest"]:
        raise ValueError("its operands were changed")
    if header["op"] not in CASES:
        raise ValueError(f"it is a case of {header['op']!r}, which is not an op of this version")
    memory = bytearray(content)
    arguments = {str(name): _from_written(value, memory) for name, value in header["arguments"].items()}
    results = {str(name): _from_written(value, memory) for name, value in header["results"].items()}
    versions = {str(name): str(value) for name, value in header["versions"].items()}
    fields = (header["op"], header["kernel"], header["class"], header["date"], header["figures"])
    return Kept(*fields, versions, arguments, results)


def _from_written(value: Any, memory: bytearray) -> Any:
    if not isinstance(value, dict):
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ValueError("an argument is not a value")
    if "tensor" in value:
        dtype, shape, begin = _DTYPES[value["tensor"]], value["shape"], value["at"]
        if not all(type(size) is int and size >= 0 for size in (*shape, begin)):
            raise ValueError("a tensor has no shape")
        num_bytes = math.prod(shape) * dtype.itemsize
        if begin + num_bytes > len(memory):
            raise ValueError("a tensor is larger than its bytes")
        if not num_bytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        raw = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=begin)
        return raw.clone().view(dtype).view(shape)
    if "dtype" in value:
        return _DTYPES[value["dtype"]]
    if "float" in value:
        return float(value["float"])
    if "list" in value:
        return [_from_written(part, memory) for part in value["list"]]
    return tuple(_from_written(part, memory) for part in value["tuple"])


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    Attributes:
        kept: the case.
        kernel: the kernel that ran.
        device: device of the run.
        ok: whether its numbers are right.
        code: code of the fault, a key of `results.CODES`, or ``"ok"``.
        ratio: the largest error relative to the tolerance.
        figures: the error in words.
        kept_ratio: the ratio of the stored results.
        kept_figures: the error of the stored results in words.
        differs: versions that differ from those of the case.
        lifted: whether the kernel left quarantine.
    """

    kept: Kept
    kernel: str
    device: str
    ok: bool
    code: str
    ratio: float
    figures: str
    kept_ratio: float
    kept_figures: str
    differs: dict[str, tuple[str, str]]
    lifted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "op": self.kept.op,
            "kernel": self.kernel,
            "kept_of": self.kept.kernel,
            "class": self.kept.problem_class,
            "date": self.kept.date,
            "device": self.device,
            "ok": self.ok,
            "code": self.code,
            "ratio": self.ratio if math.isfinite(self.ratio) else None,
            "figures": self.figures,
            "kept": {
                "ratio": self.kept_ratio if math.isfinite(self.kept_ratio) else None,
                "figures": self.kept_figures,
            },
            "differs": {name: list(pair) for name, pair in self.differs.items()},
            "lifted": self.lifted,
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        kept = self.kept
        yield f"{kept.op} {kept.kernel}, {kept.date}: {kept.figures}"
        figures = f": {self.kept_figures}" if self.kept_figures else ""
        yield f"results stored in the file: {self.kept_ratio:.3g} times what is allowed{figures}"
        for name, (then, here) in self.differs.items():
            yield f"{name} was {then}, is {here}"
        selection = "right" if self.ok else f"wrong ({self.code})"
        figures = f": {self.figures}" if self.figures else ""
        yield f"{self.kernel} on {self.device} now: {selection}, {self.ratio:.3g} times what is allowed{figures}"
        if self.lifted:
            yield f"{kept.op} {kept.kernel}: this call no longer quarantines it"


def replay(path: Path, backend: str | None = None, device: torch.device | str = "cpu") -> Replayed:
    """Run a stored case again, and compare the new and the stored results with the reference.

    If the wrong kernel is right now, the call no longer quarantines it.

    Args:
        path: the file.
        backend: a backend or kernel to run; by default the wrong one.
        device: device of the run.

    Raises:
        CacheError: the file cannot be read, other users could have written it, or it is not a case.
        NoKernel: no such kernel can run the case here.
    """
    kept, where = load_case(path), torch.device(device)
    cases, function = CASES[kept.op], HUB.function(kept.op)
    arguments = {name: _moved(value, where) for name, value in kept.arguments.items()}
    results = {name: value.to(where) for name, value in kept.results.items()}
    before = cases.judge(results, arguments)
    with use(unsafe=True):
        packing = {"packing": True} if WEIGHT_LAYOUT in function.op.contract.schema.facets else {}
        selection = function.explain(**arguments, backend=backend or kept.kernel, **packing)
        if selection.kernel is None:
            raise no_kernel(selection, HUB.policy(kept.op))
        kernel: Kernel = selection.kernel
        try:
            packed = None
            if kernel.needs_packing:
                packed = cases.pack(function.prepare(**arguments, backend=kernel.name), arguments)
            answer = GuardedCall(function, kernel, cases, where)(
                arguments, packed=None if packed is None else packed[0]
            )
            judgement = answer.judgement
            code = "ok" if judgement.ok else kind_of_error(answer.results, judgement)
            ratio, figures = judgement.ratio, "" if judgement.ok else judgement.figures
        except Failed as failure:
            code, ratio, figures = failure.code, math.inf, str(failure)
    facts = selection.problem.device
    there = key_of(kernel, facts) if kernel.name == kept.kernel else {}
    differs = {name: (then, there[name]) for name, then in kept.versions.items() if there.get(name, then) != then}
    lifted = code == "ok" and kernel.name == kept.kernel and lift(kernel, facts, kept.problem_class)
    fields = (kept, kernel.name, str(facts), code == "ok", code, ratio, figures)
    return Replayed(*fields, before.ratio, "" if before.ok else before.figures, differs, lifted)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return [_moved(part, device) for part in value] if isinstance(value, list) else value
