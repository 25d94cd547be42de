"""Lock files: the selected kernels of one machine by problem class, which later runs repeat (`KERNELHUB_LOCK`).

`kernelhub lock` writes the file as JSON that is readable in a diff. Each entry of ``decisions`` has the problem class,
the kernel, its versions, the source of the selection, and the runner-ups with reasons. Only op, problem, device and
kernel have an effect; the rest is information. A facet that the file omits has its default, so that a version of
kernelhub with more facets still finds the entries.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.policy import LOCK, Override, Pins
from kernelhub.dispatch.problem_class import DeviceKey, Facets, ProblemClass, as_packed, facets_of
from kernelhub.dispatch.selection import Selection
from kernelhub.errors import ConfigurationError
from kernelhub.probes import document
from kernelhub.probes.document import SCALAR, DocumentError

FORMAT = "kernelhub lock, version 1"
_KERNEL = re.compile(r"[\w-]+\.[\w-]+", re.ASCII)
_DEVICE_FIELDS = ("vendor", "arch", "name")
_DECISION = {
    "op": str,
    "problem": {str: SCALAR},
    "kernel": str,
    "versions?": {str: str},
    "decided_by?": str,
    "phases?": [str],
    "layers?": [str],
    "runner_ups?": {str: str},
    "refused?": {str: str},
}
_SCHEMA = {
    "device": dict.fromkeys(_DEVICE_FIELDS, str),
    "decisions": [_DECISION],
    "model?": {str: SCALAR},
    "kernelhub?": str,
    "packages?": {str: str},
}


@dataclass(frozen=True)
class Locked:
    """One entry of a lock file: the selected kernel of a problem class.

    Attributes:
        op: name of the op.
        problem: the facets in the file.
        kernel: the selected kernel; empty if no kernel supports the problem.
        versions: versions of the kernel's libraries, by package.
        decided_by: source and reason of the selection.
        phases, layers: phases and layers of the model with this problem.
        runner_ups: other supported kernels, best first, each with the reason of its rank.
        refused: rejected kernels by name, each with code and reason.
        line: line in the file; 0 if the entry was not read from a file.
    """

    op: str
    problem: Mapping[str, Any]
    kernel: str
    versions: Mapping[str, str] = field(default_factory=dict)
    decided_by: str = ""
    phases: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    runner_ups: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    line: int = 0


@dataclass(frozen=True)
class Lock:
    """The content of a lock file.

    Attributes:
        device: vendor, architecture and name of the device that it is for.
        decisions: one entry for each problem class.
        model: the model, ranks, number formats and packing that `kernelhub lock` was given.
        kernelhub: version of kernelhub that wrote the file.
        packages: versions of the libraries of the selected kernels.
        path: path of the file; empty if it was not read from a file.
        digest: SHA-256 of the file's text.
    """

    device: DeviceKey
    decisions: tuple[Locked, ...]
    model: Mapping[str, Any] = field(default_factory=dict)
    kernelhub: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    digest: str = ""

    def pins(self, contract: OpRecord[Any], layouts: Mapping[str, tuple[str, ...]], closed: bool) -> Pins:
        """The pins of the file for one op.

        An entry without a kernel rejects every kernel of its problem. An entry for checkpoint weights also applies to
        the same weights packed for its kernel.

        Args:
            contract: the op.
            layouts: layouts of weights that each kernel reads, by kernel.
            closed: reject problems that are not in the file.
        """
        overrides: dict[ProblemClass, Override] = {}
        implied: dict[ProblemClass, Override] = {}
        none: dict[ProblemClass, dict[str, Rejection]] = {}
        for item in self.decisions:
            if item.op == contract.name and not item.kernel:
                reason = f"{self.path}:{item.line} says that no kernel could run this problem"
                rejection = Rejection("not_locked", reason, f"regenerate the file: {self.command}")
                none[ProblemClass(self.device, whole_problem(contract, item.problem))] = {"*": rejection}
            elif item.op == contract.name:
                undo = f"unset KERNELHUB_LOCK, or regenerate the file: {self.command}"
                override = Override(item.op, (item.kernel,), LOCK, f"{self.path}:{item.line}", undo=undo)
                facets = whole_problem(contract, item.problem)
                overrides[ProblemClass(self.device, facets)] = override
                for packed in as_packed(facets, layouts.get(item.kernel, ())):
                    implied[ProblemClass(self.device, packed)] = override
        otherwise = None
        if closed:
            reason = f"{self.path} has no entry for this problem, and KERNELHUB_LOCK_MISSING is error"
            otherwise = Rejection("not_locked", reason, f"regenerate the file: {self.command}")
        return Pins({**implied, **overrides}, none, otherwise=otherwise)

    def missing_message(self, selection: Selection[Any]) -> str:
        """The warning about a problem that is not in the file."""
        facets, here = dict(facets_of(selection.problem)), selection.problem.device
        return (
            f"{selection.op}: {self.path} (for {self.device[2]}, {self.device[1]}) has no entry for {facets} on "
            f"{here}; {selection.selected} was selected by {selection.source}. This is logged once; "
            "KERNELHUB_LOCK_MISSING=error rejects such problems, and `kernelhub lock` adds those of a model"
        )

    @property
    def command(self) -> str:
        """The command that regenerates this file."""
        model = {"name": "MODEL", **self.model}
        flags = {f"--{name.replace('_', '-')}": value for name, value in model.items() if name != "name"}
        options = "".join(f" {flag}" if value is True else f" {flag} {value}" for flag, value in flags.items())
        return f"kernelhub lock --model {model['name']}{options} --out {self.path or 'FILE'}"


def whole_problem(contract: OpRecord[Any], written: Mapping[str, Any]) -> Facets:
    """The problem class of some facets; the others have their defaults."""
    known = {item.name: item.default for item in dataclasses.fields(contract.problem) if item.name != "device"}
    return tuple(sorted({**known, **written}.items()))


def read_lock(path: Path) -> Lock:
    """Read a lock file.

    Raises:
        ConfigurationError: the file cannot be read, is not a lock file, or has an unsupported version.
    """
    where = f"lock file {path}"
    try:
        raw = document.contents(path)
    except OSError as error:
        raise ConfigurationError(
            f"{where}: {error.strerror or error}; `kernelhub lock --model NAME --out {path}` writes one"
        ) from None
    except DocumentError as error:
        raise ConfigurationError(f"{where}: it {error}; `kernelhub lock` writes another") from None
    try:
        said = document.parsed(raw)
    except DocumentError as error:
        raise ConfigurationError(f"{where}: it {error}; `kernelhub lock` writes another") from None
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        found = document.shown(said.get("format") if isinstance(said, dict) else None)
        raise ConfigurationError(f"{where}: its format is {found}, not {FORMAT!r}; write it with `kernelhub lock`")
    wrong = document.difference(said, _SCHEMA)
    if wrong:
        raise ConfigurationError(
            f"{where}: it lacks a part or has a wrong one: {wrong}; write it with `kernelhub lock`"
        )
    text = raw.decode()
    vendor, arch, name = (said["device"][key] for key in _DEVICE_FIELDS)
    try:
        decisions = tuple(
            _locked(item, line) for item, line in zip(said["decisions"], _lines_of_decisions(text), strict=True)
        )
        return Lock(
            (vendor, arch, name),
            decisions,
            dict(said.get("model", {})),
            said.get("kernelhub", ""),
            dict(said.get("packages", {})),
            str(path),
            hashlib.sha256(text.encode()).hexdigest(),
        )
    except ValueError as error:  # a duplicate key: JSON reads the last one, and the lines are of the first
        raise ConfigurationError(
            f"{where}: it has two lists of decisions: {error}; write it with `kernelhub lock`"
        ) from None


def check_lock(lock: Lock, contracts: Mapping[str, OpRecord[Any]]) -> None:
    """Check the entries of a lock file.

    Raises:
        ConfigurationError: an op, facet or value does not exist, a kernel is not one name, or two entries have the
            same problem. The message names the line.
    """
    seen: dict[tuple[str, Facets], int] = {}
    for item in lock.decisions:
        where, anew = f"{lock.path}:{item.line}", f"regenerate the file: {lock.command}"
        contract = contracts.get(item.op)
        if contract is None:
            raise ConfigurationError(f"{where}: there is no op {item.op!r} in this version; {anew}")
        for name in item.problem:
            if name not in contract.schema.facets or name == "device":
                raise ConfigurationError(f"{where}: {item.op} has no facet {name!r} in this version; {anew}")
        for name, value in item.problem.items():
            wrong = contract.schema.facets[name].wrong_with(value)
            if wrong:
                raise ConfigurationError(f"{where}: {item.op}: {name} is {value!r}; {wrong}; {anew}")
        if item.kernel and not _KERNEL.fullmatch(item.kernel):
            raise ConfigurationError(f"{where}: {item.kernel!r} is not the name of one kernel; {anew}")
        key = item.op, whole_problem(contract, item.problem)
        missing = [name for name, value in key[1] if value is dataclasses.MISSING]
        if missing:
            raise ConfigurationError(f"{where}: the facet {missing[0]!r} of {item.op} is missing; {anew}")
        if key in seen:
            raise ConfigurationError(f"{where}: line {seen[key]} has the same problem; remove one of them")
        seen[key] = item.line


def lock_text(lock: Lock) -> str:
    """The text of the file: one fact a line, in an order that depends on the entries alone."""
    head = {
        "format": FORMAT,
        "kernelhub": lock.kernelhub,
        "model": dict(lock.model),
        "device": dict(zip(_DEVICE_FIELDS, lock.device, strict=True)),
        "packages": dict(sorted(lock.packages.items())),
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    blocks = ",\n".join(_block(item) for item in sorted(lock.decisions, key=order))
    return "\n".join(["{", *lines, ' "decisions": [', *([blocks] if blocks else []), " ]", "}", ""])


def order(item: Locked) -> tuple[str, str]:
    """Sort key of an entry in a file."""
    return item.op, json.dumps(dict(item.problem), sort_keys=True)


def _block(item: Locked) -> str:
    fields: dict[str, Any] = {
        "op": item.op,
        "problem": dict(sorted(item.problem.items())),
        "phases": list(item.phases),
        "layers": list(item.layers),
        "kernel": item.kernel,
        "versions": dict(sorted(item.versions.items())),
        "decided_by": item.decided_by,
    }
    lines = [f"   {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
    for name, kernels in (("runner_ups", list(item.runner_ups.items())), ("refused", sorted(item.refused.items()))):
        rows = ",\n".join(f"    {json.dumps(kernel)}: {json.dumps(why)}" for kernel, why in kernels)
        lines.append(f'   "{name}": {{\n{rows}\n   }}' if rows else f'   "{name}": {{}}')
    return "  {\n" + ",\n".join(lines) + "\n  }"


def _locked(item: Mapping[str, Any], line: int) -> Locked:
    return Locked(
        str(item["op"]),
        dict(item["problem"]),
        str(item["kernel"]),
        dict(item.get("versions", {})),
        str(item.get("decided_by", "")),
        tuple(item.get("phases", ())),
        tuple(item.get("layers", ())),
        dict(item.get("runner_ups", {})),
        dict(item.get("refused", {})),
        line,
    )


def _lines_of_decisions(text: str) -> Iterator[int]:
    """Line of each entry's kernel, or of its start if it has no kernel."""
    for start, end in _elements(text, "decisions"):
        name = text.find('"kernel"', start, end)
        yield text.count("\n", 0, start if name < 0 else name) + 1


def _elements(text: str, wanted: str) -> Iterable[tuple[int, int]]:
    """Start and end of each element of the array `wanted` in a JSON object."""
    decoder, spans = json.JSONDecoder(), []
    at = _next(text, text.index("{") + 1)
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        at = _next(text, at)  # the value
        if key != wanted or text[at] != "[":
            _, at = decoder.raw_decode(text, at)
        else:
            at = _next(text, at + 1)
            while text[at] != "]":
                start = at
                _, end = decoder.raw_decode(text, start)
                spans.append((start, end))
                at = _next(text, end)
            at += 1
        at = _next(text, at)
    return spans


def _next(text: str, at: int) -> int:
    """The next position that is not whitespace, a comma or a colon."""
    while text[at] in " \t\r\n,:":
        at += 1
    return at
