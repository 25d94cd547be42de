"""Fingerprints of selections: short texts that are equal in two processes exactly if both run the same kernel.

A fingerprint is a digest of the op, the problem class, the kernel, the versions of its libraries, its record, the
layout of its weights and its tuned sizes, after `VERSION`, which grows when this list changes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernelhub.dispatch.configuration import Configuration
from kernelhub.dispatch.constraint import AnyOf, Constraint, Package
from kernelhub.dispatch.problem import WEIGHT_LAYOUT
from kernelhub.dispatch.problem_class import Facets, facets_of
from kernelhub.dispatch.selection import Selection

if TYPE_CHECKING:
    from kernelhub.dispatch.kernel import Backend, Kernel
    from kernelhub.dispatch.machine import Machine

VERSION = 1


@dataclass(frozen=True)
class SelectionFingerprint:
    """Everything that two processes must have in common to run the same kernel; `str` gives the digest.

    Attributes:
        op: name of the op.
        facets: facets of the problem, without the device.
        kernel: name of the kernel.
        versions: versions of the kernel's libraries, as sorted pairs of package and version.
        record: digest of the kernel's record.
        layout: layout of the weights; empty if the op has none.
        tuned: digest of the tuned sizes in use; empty if there are none.
        parts: fingerprints of the ops that the kernel is made of.
    """

    op: str
    facets: Facets
    kernel: str
    versions: tuple[tuple[str, str], ...]
    record: str
    layout: str
    tuned: str = ""
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        facts = dataclasses.astuple(self)
        return f"v{VERSION}:{digest(facts if self.parts else facts[:-1])}"


def fingerprint_of(
    selection: Selection[Any],
    backend: Backend | None,
    machine: Machine,
    tuned: str = "",
    parts: tuple[str, ...] = (),
) -> SelectionFingerprint:
    """The fingerprint of a selection that has a kernel.

    Args:
        selection: the selection.
        backend: backend of the kernel.
        machine: machine that the kernel runs on.
        tuned: digest of a whole table; by default that of the tuned sizes of the kernel.
        parts: fingerprints of the selection's parts.
    """
    assert selection.kernel is not None
    sizes = sizes_of(machine, selection.kernel, selection.problem)
    tuned = tuned or (digest(dict(sizes)) if sizes else "")
    return SelectionFingerprint(
        selection.op,
        facets_of(selection.problem),
        selection.kernel.name,
        tuple(sorted(versions_of(selection.kernel, backend, machine).items())),
        record_digest(selection.kernel),
        getattr(selection.problem, WEIGHT_LAYOUT, ""),
        tuned,
        parts,
    )


def sizes_of(machine: Machine, kernel: Kernel, problem: Any) -> Mapping[int, Configuration]:
    """Tuned sizes of a kernel for a problem, by number of tokens; empty if it uses its defaults."""
    if not kernel.configurable:
        return {}
    tuned = machine.tuned(problem.device).find(kernel.op, problem)
    return {} if tuned is None else tuned.configurations.get(kernel.name, {})


def versions_of(kernel: Kernel, backend: Backend | None, machine: Machine) -> dict[str, str]:
    """Versions of the libraries of a kernel, by package; kernelhub's version if the kernel has no library."""
    wanted = [*packages_of(kernel.constraints)]
    if backend is not None and backend.package and backend.package not in {package.name for package in wanted}:
        wanted.append(Package(backend.package))
    found = {package.name: machine.package(package).value for package in wanted}
    versions = {name: str(version) for name, version in found.items() if version}
    return versions or {"kernelhub": own_version()}


def own_version() -> str:
    """Version of kernelhub."""
    return str(importlib.import_module("kernelhub").__version__)


def packages_of(constraints: Iterable[Constraint]) -> Iterator[Package]:
    """The packages that constraints require, including those in an `AnyOf`."""
    for constraint in constraints:
        if isinstance(constraint, Package):
            yield constraint
        elif isinstance(constraint, AnyOf):
            yield from packages_of(constraint.alternatives)


@functools.lru_cache(maxsize=4096)
def record_digest(kernel: Kernel) -> str:
    """Digest of a record: its data, and the source code of its functions."""
    return digest({item.name: _plain(getattr(kernel, item.name)) for item in dataclasses.fields(kernel)})


def digest(value: Any) -> str:
    """Sixteen hexadecimal characters of a hash over plain values."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """A value of a record as plain JSON values that are the same in every process."""
    if value is None or isinstance(value, str | int | float | bool):
        return value.name if isinstance(value, enum.Enum) else value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(item), sort_keys=True) for item in value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, functools.partial):
        return ["partial", _plain(value.func), _plain(value.args), _plain(value.keywords)]
    if inspect.isfunction(value):
        closure = [_plain(cell.cell_contents) for cell in value.__closure__ or ()]
        return [value.__module__, value.__qualname__, _source(value), closure]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [kind, {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}]
    return getattr(value, "__qualname__", kind)


def _source(function: Any) -> str:
    """The source code of a function, or a hash of its bytecode if there is no source."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return hashlib.sha256(function.__code__.co_code).hexdigest()
