"""Checks of a backend's module before it is registered: types, names, and the schemas of its ops.

Records of third parties are unchecked data. This module checks everything that selection, reports and commands read
later, so that a broken backend is left out as a whole, with a reason, and affects nothing else.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kernelhub.dispatch.constraint import (
    AnyOf,
    Between,
    MultipleOf,
    OnDevice,
    OneOf,
    Package,
    Rule,
    SameValue,
    Takes,
)
from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.kernel import Backend, Band, GraphLevel, Kernel, KnownBad, Watch
from kernelhub.dispatch.problem import CHECKPOINT, WEIGHT_LAYOUT, Schema
from kernelhub.dispatch.settings import did_you_mean
from kernelhub.dispatch.standing import NEEDS_EVIDENCE, WORDS, Standing
from kernelhub.errors import RegistrationError
from kernelhub.probes.device import FAMILIES
from kernelhub.probes.signature import Call

_Kinds = Mapping[str, type | tuple[type, ...]]

_BACKEND: _Kinds = {
    **dict.fromkeys(("name", "summary", "package", "homepage"), str),
    "watches": (tuple, list),
    "portable": bool,
}
_STANDING: _Kinds = {
    **dict.fromkeys(("word", "evidence", "figure"), str),
    "families": (tuple, list),
    "seconds": (int, float),
}
_WATCH: _Kinds = {"module": str, "target": str}
_KERNEL: _Kinds = {
    **dict.fromkeys(("op", "name", "target", "summary", "packs_to", "source"), str),
    **dict.fromkeys(("deterministic", "batch_invariant", "reads_lengths", "configurable"), bool),
    "band": Band,
    "graph": GraphLevel,
    "constraints": (tuple, list),
    "features": (frozenset, set, tuple, list),
    "layouts": (tuple, list),
    "standings": (tuple, list),
}
_KNOWN_BAD: _Kinds = {
    **dict.fromkeys(("kernel", "op", "symptom", "issue", "remedy"), str),
    "where": (tuple, list),
}
_NUMBER = (int, float)
_CONSTRAINTS: Mapping[type, _Kinds] = {
    Package: {"name": str, "versions": str, "distribution": (str, type(None)), "install": str},
    OnDevice: {
        "vendor": str,
        "at_least": (tuple, type(None)),
        "below": (tuple, type(None)),
        "only": tuple,
        "arch": tuple,
    },
    OneOf: {"field": str, "values": (tuple, list, set, frozenset, range), "code": str, "why": str, "remedy": str},
    Between: {"field": str, "low": _NUMBER, "high": _NUMBER, "why": str, "remedy": str},
    MultipleOf: {"field": str, "divisor": int, "why": str},
    SameValue: {"field": str, "other": str, "why": str, "remedy": str},
    Rule: {"reads": (tuple, list), "check": Callable, "code": str, "remedy": str},  # type: ignore[dict-item]
    Takes: {"call": Call, "remedy": str},
    AnyOf: {"alternatives": (tuple, list)},
}

_WORD = r"[^\W\d]\w*"
_NAME = re.compile(r"[\w-]+", re.ASCII)
_MODULE = re.compile(rf"{_WORD}(\.{_WORD})*")
_TARGET = re.compile(rf"{_WORD}(\.{_WORD})*:{_WORD}")


class Records(NamedTuple):
    """The checked content of a backend's module."""

    backend: Backend
    kernels: tuple[Kernel, ...]
    known_bad: tuple[KnownBad, ...]


def records_of(module: Any, contracts: Mapping[str, OpRecord[Any]], *, builtin: bool) -> Records:
    """The records of a backend's module.

    Raises:
        RegistrationError: the module has no records, or one is invalid or contradicts the schema of its op.
    """
    origin = getattr(module, "__name__", repr(module))
    try:
        return _checked(module, contracts, builtin)
    except RegistrationError as error:
        raise RegistrationError(f"{origin}: {error}") from None
    except Exception as error:  # any access to a foreign record may raise
        raise RegistrationError(f"{origin}: its records cannot be read: {type(error).__name__}: {error}") from error


def _checked(module: Any, contracts: Mapping[str, OpRecord[Any]], builtin: bool) -> Records:
    try:
        backend, kernels = module.BACKEND, module.KERNELS
    except AttributeError as error:
        raise RegistrationError(f"a backend module needs BACKEND and KERNELS ({error})") from None
    _check_backend(backend)
    if backend.portable and not builtin:
        raise RegistrationError("BACKEND: portable is for kernelhub's own fallbacks; give each record its standings")
    records = Records(
        backend,
        _all("KERNELS", kernels, Kernel),
        _all("KNOWN_BAD", getattr(module, "KNOWN_BAD", ()), KnownBad),
    )
    names: set[tuple[str, str]] = set()
    for place, kernel in enumerate(records.kernels):
        _check_types(f"KERNELS[{place}]", kernel, _KERNEL)
        if (kernel.op, kernel.name) in names:
            raise RegistrationError(f"two records are named {kernel.name} for {kernel.op}")
        names.add((kernel.op, kernel.name))
        contract = contracts.get(kernel.op)
        if contract is None:
            raise RegistrationError(
                f"{kernel.name} is for unknown op {kernel.op!r}{did_you_mean(kernel.op, contracts)}"
            )
        check_record(kernel, backend, contract.schema, builtin=builtin)
    for place, entry in enumerate(records.known_bad):
        _check_known_bad(f"KNOWN_BAD[{place}]", entry, backend, contracts, builtin)
    return records


def check_record(kernel: Kernel, backend: Backend, schema: Schema, *, builtin: bool) -> None:
    """Raise RegistrationError if a record has unknown facets or features, or does not mention a structural facet."""
    where = f"kernel {kernel.name} for {kernel.op}"
    variant = kernel.name.removeprefix(f"{backend.name}.")
    if variant == kernel.name or not _NAME.fullmatch(variant):
        raise RegistrationError(f"{where}: the name must be '{backend.name}.<variant>'")
    if not _TARGET.fullmatch(kernel.target):
        raise RegistrationError(f"{where}: target {reprlib.repr(kernel.target)} is not 'module:attribute'")
    for name in _all(f"{where}: features", tuple(kernel.features), str):
        if name not in schema.features:
            known = did_you_mean(name, schema.features)
            raise RegistrationError(f"{where}: unknown feature {reprlib.repr(name)}{known}")
    mentioned: set[str] = set()
    for constraint in kernel.constraints:
        for name in _fields_of(where, constraint):
            if name not in schema.facets:
                raise RegistrationError(f"{where}: unknown facet {name!r}{did_you_mean(name, schema.facets)}")
            mentioned.add(name)
        _check_numbers(where, constraint, schema)
    silent = sorted(schema.structural - mentioned)
    if silent:
        raise RegistrationError(
            f"{where}: does not mention {', '.join(silent)}; constrain them, or write anything(...)"
        )
    layouts = _all(f"{where}: layouts", kernel.layouts, str)
    if not layouts:
        raise RegistrationError(f"{where}: layouts is empty; list those it reads, usually {CHECKPOINT!r}")
    if kernel.packs_to and kernel.packs_to not in layouts:
        raise RegistrationError(f"{where}: packs to {kernel.packs_to!r}, which is not among its layouts")
    if layouts != (CHECKPOINT,) and WEIGHT_LAYOUT not in schema.facets:
        raise RegistrationError(f"{where}: has layouts of weights, but {kernel.op} takes no packed weights")
    _check_standings(where, kernel)
    if not builtin and kernel.band is not Band.PLUGIN:
        raise RegistrationError(f"{where}: a third-party kernel has band PLUGIN, not {kernel.band.name}")


def _check_backend(backend: Any) -> None:
    if not isinstance(backend, Backend):
        raise RegistrationError(f"BACKEND is {type(backend).__name__}, not a Backend")
    _check_types("BACKEND", backend, _BACKEND)
    if not _NAME.fullmatch(backend.name):
        raise RegistrationError(f"BACKEND: name is {reprlib.repr(backend.name)}; give letters, digits, - and _")
    if backend.package and not re.fullmatch(_WORD, backend.package):
        raise RegistrationError(f"BACKEND: package is {backend.package!r}; give an import name without dots")
    for watch in _all("BACKEND: watches", backend.watches, Watch):
        _check_types("BACKEND: a watch", watch, _WATCH)
        if not _MODULE.fullmatch(watch.module) or not _TARGET.fullmatch(watch.target):
            raise RegistrationError(f"BACKEND: watch {watch!r} does not name a 'module' and a 'module:function'")


def _check_standings(where: str, kernel: Kernel) -> None:
    """Raise RegistrationError for a standing without evidence or families, and for two standings on one family."""
    spoken: set[str] = set()
    for standing in _all(f"{where}: standings", kernel.standings, Standing):
        _check_types(f"{where}: a standing", standing, _STANDING)
        if standing.word not in WORDS:
            known = did_you_mean(standing.word, WORDS)
            raise RegistrationError(f"{where}: {standing.word!r} is not a standing{known}; give {', '.join(WORDS)}")
        wanted = NEEDS_EVIDENCE.get(standing.word)
        if wanted and not standing.evidence:
            raise RegistrationError(f"{where}: its standing {standing.word} has no evidence; give {wanted}")
        families = _all(f"{where}: families of its standing {standing.word}", standing.families, str)
        for family in families:
            if family not in (*FAMILIES, "*"):
                known = did_you_mean(family, FAMILIES)
                raise RegistrationError(
                    f"{where}: {family!r} is not a family of devices{known}; give {', '.join(FAMILIES)}"
                )
            if family in spoken:
                raise RegistrationError(f"{where}: two standings name {family}")
            spoken.add(family)
        if not families:
            raise RegistrationError(f"{where}: its standing {standing.word} names no family of devices")


def _check_known_bad(
    where: str, entry: KnownBad, backend: Backend, contracts: Mapping[str, OpRecord[Any]], builtin: bool
) -> None:
    _check_types(where, entry, _KNOWN_BAD)
    if entry.op != "*" and entry.op not in contracts:
        raise RegistrationError(f"{where}: unknown op {entry.op!r}{did_you_mean(entry.op, contracts)}")
    if not builtin and entry.kernel.partition(".")[0] != backend.name:
        raise RegistrationError(f"{where}: {entry.kernel!r} is of another backend than {backend.name}")
    for constraint in entry.where:
        _fields_of(where, constraint)
        if entry.op != "*":
            _check_numbers(where, constraint, contracts[entry.op].schema)


def _fields_of(where: str, constraint: Any) -> tuple[str, ...]:
    """The facets that a constraint reads; RegistrationError if it is not a valid constraint."""
    if isinstance(constraint, type) or not callable(getattr(constraint, "reject", None)):
        raise RegistrationError(f"{where}: {constraint!r} is not a constraint: it has no method reject")
    if not hasattr(constraint, "fields"):
        raise RegistrationError(f"{where}: {constraint!r} is not a constraint: it has no `fields`")
    kind = type(constraint)
    for known in kind.__mro__:
        _check_types(f"{where}: {kind.__name__}", constraint, _CONSTRAINTS.get(known, {}))
    str(constraint)  # commands print it
    if isinstance(constraint, Package):
        if not re.fullmatch(_WORD, constraint.name):
            raise RegistrationError(f"{where}: {constraint!r} does not name a package that can be imported")
        _check_versions(where, constraint)
    if isinstance(constraint, AnyOf):
        for alternative in _all(f"{where}: {type(constraint).__name__}", constraint.alternatives, object):
            _fields_of(where, alternative)
    return _all(f"{where}: fields of {constraint!r}", constraint.fields, str)


def _check_numbers(where: str, constraint: Any, schema: Schema) -> None:
    """Raise RegistrationError for a bound or a divisor of a facet whose values are not numbers."""
    if isinstance(constraint, AnyOf):
        for alternative in constraint.alternatives:
            _check_numbers(where, alternative, schema)
    elif isinstance(constraint, (Between, MultipleOf)):
        facet = schema.facets.get(constraint.field)
        if facet is not None and not facet.is_number:
            kind = type(constraint).__name__
            raise RegistrationError(
                f"{where}: {kind} is for numbers, but {facet.name} is of type {facet.annotation}; use OneOf"
            )
        if isinstance(constraint, MultipleOf) and constraint.divisor < 1:
            raise RegistrationError(f"{where}: MultipleOf {constraint.field}: divisor {constraint.divisor} is below 1")


def _check_versions(where: str, package: Package) -> None:
    if not package.versions:
        return
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # slow to import; built-in records do not need it

    try:
        SpecifierSet(package.versions)
    except InvalidSpecifier:
        raise RegistrationError(
            f"{where}: versions {package.versions!r} of {package.name} is not a version specifier"
        ) from None


def _check_types(where: str, record: Any, kinds: _Kinds) -> None:
    for name, kind in kinds.items():
        value = getattr(record, name)
        if not isinstance(value, kind):
            wanted = kind if isinstance(kind, type) else kind[0]
            raise RegistrationError(f"{where}: {name} is {reprlib.repr(value)}, not a {wanted.__name__}")


def _all(where: str, values: Any, kind: type) -> tuple[Any, ...]:
    """The values as a tuple; RegistrationError if one is not of the type `kind`."""
    if not isinstance(values, (tuple, list)):
        hint = "; a tuple of one needs a comma" if isinstance(values, kind) else ""
        raise RegistrationError(f"{where} is of type {type(values).__name__}, not a tuple{hint}")
    items = tuple(values)
    for place, value in enumerate(items):
        if not isinstance(value, kind):
            raise RegistrationError(f"{where}[{place}] is of type {type(value).__name__}, not {kind.__name__}")
    return items
