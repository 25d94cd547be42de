"""Lock files: the kernels that were chosen for problem classes of one machine, kept from one run to the next.

A file is JSON that `kernelhub lock` writes and people read as a diff. ``decisions`` lists, for each problem class,
the kernel, the versions it was chosen in, who decided, and the runner-ups with why not. Only op, problem, device and
kernel are obeyed; the rest tells a reader what was known. A facet that the file does not name has its default, so that
a version of kernelhub that knows more facets still finds its decisions.
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
    """One decision of a lock file.

    Attributes:
        op: name of the op.
        problem: the facets that the file names.
        kernel: what was chosen; empty if nothing could run.
        versions: of the kernel's libraries, by package.
        decided_by: who chose it, and why.
        phases, layers: when and where a model needs it.
        runner_ups: other kernels that could have run, best first, each with why it did not.
        refused: kernels that could not run, by name, each with code and reason.
        line: where it stands in the file; 0 if it was not read from one.
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
    """A lock file.

    Attributes:
        device: the kind of device that it is for.
        decisions: one for each problem class.
        model: what it was made for: name, ranks, number formats, packing, as `kernelhub lock` was told.
        kernelhub: version that wrote it.
        packages: versions of the libraries behind the kernels chosen.
        path: the file; empty if it was not read from one.
        digest: of its text.
    """

    device: DeviceKey
    decisions: tuple[Locked, ...]
    model: Mapping[str, Any] = field(default_factory=dict)
    kernelhub: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    digest: str = ""

    def pins(self, contract: OpRecord[Any], layouts: Mapping[str, tuple[str, ...]], closed: bool) -> Pins:
        """What the file says of one op.

        Where it says that no kernel could run, none may: another choice would be as free as without the file.

        A decision about weights as in a checkpoint is one about the same weights as its kernel packs them, too.

        Args:
            contract: the op.
            layouts: of weights that its kernels read, by kernel.
            closed: whether a problem that is not in the file may not run.
        """
        overrides: dict[ProblemClass, Override] = {}
        implied: dict[ProblemClass, Override] = {}
        none: dict[ProblemClass, dict[str, Rejection]] = {}
        for item in self.decisions:
            if item.op == contract.name and not item.kernel:
                reason = f"{self.path}:{item.line} says that no kernel could run this problem"
                said = Rejection("not_locked", reason, f"write the file anew: {self.command}")
                none[ProblemClass(self.device, whole_problem(contract, item.problem))] = {"*": said}
            elif item.op == contract.name:
                undo = f"unset KERNELHUB_LOCK, or write the file anew: {self.command}"
                override = Override(item.op, (item.kernel,), LOCK, f"{self.path}:{item.line}", undo=undo)
                facets = whole_problem(contract, item.problem)
                overrides[ProblemClass(self.device, facets)] = override
                for packed in as_packed(facets, layouts.get(item.kernel, ())):
                    implied[ProblemClass(self.device, packed)] = override
        otherwise = None
        if closed:
            reason = f"{self.path} holds no decision for this problem, and KERNELHUB_LOCK_MISSING is error"
            otherwise = Rejection("not_locked", reason, f"write the file anew: {self.command}")
        return Pins({**implied, **overrides}, none, otherwise=otherwise)

    def lacks(self, selection: Selection[Any]) -> str:
        """That a problem is not in the file, and what follows."""
        facets, here = dict(facets_of(selection.problem)), selection.problem.device
        return (
            f"{selection.op}: {self.path} (for {self.device[2]}, {self.device[1]}) holds no decision for {facets} on "
            f"{here}; {selection.selected} was chosen by {selection.source}. Said once; KERNELHUB_LOCK_MISSING=error "
            "refuses such problems, and `kernelhub lock` writes those of a model down"
        )

    @property
    def command(self) -> str:
        """The command that writes this file anew."""
        model = {"name": "MODEL", **self.model}
        said = {f"--{name.replace('_', '-')}": value for name, value in model.items() if name != "name"}
        options = "".join(f" {flag}" if value is True else f" {flag} {value}" for flag, value in said.items())
        return f"kernelhub lock --model {model['name']}{options} --out {self.path or 'FILE'}"


def whole_problem(contract: OpRecord[Any], written: Mapping[str, Any]) -> Facets:
    """The problem class that written facets mean; what is not written has its default."""
    known = {item.name: item.default for item in dataclasses.fields(contract.problem) if item.name != "device"}
    return tuple(sorted({**known, **written}.items()))


def read_lock(path: Path) -> Lock:
    """A lock file.

    Raises:
        ConfigurationError: it cannot be read, or is no lock file of a version known here.
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
    except ValueError as error:  # a name twice, of which one is read and the other has the lines
        raise ConfigurationError(
            f"{where}: it tells its decisions twice: {error}; write it with `kernelhub lock`"
        ) from None


def check_lock(lock: Lock, contracts: Mapping[str, OpRecord[Any]]) -> None:
    """Refuse decisions about ops, facets and values that do not exist, for several kernels, and two for one problem.

    Raises:
        ConfigurationError: naming the line.
    """
    seen: dict[tuple[str, Facets], int] = {}
    for item in lock.decisions:
        where, anew = f"{lock.path}:{item.line}", f"write the file anew: {lock.command}"
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
        unsaid = [name for name, value in key[1] if value is dataclasses.MISSING]
        if unsaid:
            raise ConfigurationError(f"{where}: {item.op} has a facet {unsaid[0]!r}, which it does not tell; {anew}")
        if key in seen:
            raise ConfigurationError(f"{where}: line {seen[key]} decides the same problem; remove one of them")
        seen[key] = item.line


def lock_text(lock: Lock) -> str:
    """The file's text: a fact a line, in an order that depends on what is decided and on nothing else."""
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
    """Where a decision stands in a file."""
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
    """The line on which each decision names its kernel, or begins if it names none."""
    for start, end in _elements(text, "decisions"):
        name = text.find('"kernel"', start, end)
        yield text.count("\n", 0, start if name < 0 else name) + 1


def _elements(text: str, wanted: str) -> Iterable[tuple[int, int]]:
    """Start and end of each element of an array in the document's object."""
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
    """The next place that is neither space nor a comma or colon."""
    while text[at] in " \t\r\n,:":
        at += 1
    return at
