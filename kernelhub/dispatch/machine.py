"""The facts of this machine that are not facts of a device: packages, caches, what failed to load.

A `Machine` is handed to the pure selector, so that a test or `explain` can hand it another one.
"""

from __future__ import annotations

import fnmatch
import importlib
import os
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from kernelhub.dispatch.tuned import TUNED, Tuned, TunedTable
from kernelhub.errors import ConfigurationError
from kernelhub.probes.device import DeviceFacts
from kernelhub.probes.finding import Finding, Rejection, found, lacking
from kernelhub.probes.package import Wanted, fits, package
from kernelhub.probes.torch_build import TorchBuild, torch_build, torch_build_of

# What a machine may be said to lack: the code of such a finding, what is said of it, and what to do.
ABSENT: dict[str, tuple[str, str, str]] = {
    "nvcc": ("toolkit_missing", "it would be compiled, but there is no CUDA toolkit", "install a CUDA toolkit"),
    "c++": ("compiler_missing", "it would be compiled, but there is no C++ compiler", "install g++ or clang++"),
    "modules": ("symbol_missing", "none of its modules is built ahead", "install the library's modules built ahead"),
    "cubins": ("cubins_missing", "its binaries are not here", "install the library's binaries"),
}


_READ_WITH = ("packaging.specifiers", "packaging.version", "kernelhub.probes.distributions")
# Under which keys `Machine.on` keeps what was read of a device.
_QUARANTINED, _EARNED, _ASSUMED = "quarantined", "earned", "assumed"
_NOBODY: Mapping[tuple[str, str], Rejection] = MappingProxyType({})
_NOTHING: Mapping[tuple[str, str], Collection[Any]] = MappingProxyType({})


class Evidence(Protocol):
    """What is known about the kernels of a device, from the store of evidence; asked once for each device."""

    def quarantined(self, device: DeviceFacts) -> Mapping[tuple[str, str], Rejection]:
        """By (op, kernel), what `kernelhub verify` or an audit found wrong."""

    def verified(self, device: DeviceFacts) -> Mapping[tuple[str, str], Collection[Any]]:
        """By (op, kernel), the problem classes that the kernel was verified for."""

    def measured(self, device: DeviceFacts, files: Sequence[str]) -> TunedTable:
        """What `kernelhub tune` measured here, and what these table files and folders say."""

    def measured_by(self, document: Mapping[str, Any], device: DeviceFacts) -> TunedTable:
        """What another rank measured, as it sent it."""

    def check(self, document: Mapping[str, Any]) -> None:
        """Raise ConfigurationError if `measured_by` could not read a document."""


class _NoTable:
    """Where nothing was measured, or nothing of it is heeded."""

    def find(self, op: str, problem: Any) -> Tuned | None:
        return None

    def plain(self) -> dict[str, Any]:
        return {}


class Machine:
    """What probes find here, each asked once until `forget`.

    Attributes:
        load_failures: (op, kernel) whose adapter could not be imported or prepared here, and why.
        evidence: which kernels are quarantined, verified and fastest here; None if KERNELHUB_EVIDENCE is off.
        tables: table files, and folders of them, that are read beside what was measured here.
    """

    evidence: Evidence | None = None
    tables: tuple[str, ...] = ()

    def __init__(self) -> None:
        # Each is replaced rather than emptied, since what `as_it_is` gave goes on with it.
        self._findings: dict[Hashable, Finding] = {}
        self._on_devices: dict[DeviceFacts, dict[Any, Any]] = {}
        self.load_failures: Mapping[tuple[str, str], Rejection] = {}
        self._of_first_rank: Mapping[str, Any] | None = None

    def load(self) -> None:
        """Import all that answers of this machine are read with, so that no selection begins by importing it."""
        for name in _READ_WITH:
            importlib.import_module(name)

    def as_it_is(self) -> Machine:
        """The same facts, which neither `forget` nor a failure to load changes later.

        What was not asked by then is asked when it is needed, and remembered for both.
        """
        same = object.__new__(type(self))
        same.__dict__.update(self.__dict__)
        return same

    def cannot_load(self, op: str, kernel: str, rejection: Rejection) -> None:
        """Remember why a kernel's adapter could not be imported or prepared."""
        self.load_failures = {**self.load_failures, (op, kernel): rejection}

    def forget_failure(self, op: str, kernel: str) -> None:
        """Let a kernel be tried again whose adapter could not be prepared."""
        self.load_failures = {key: why for key, why in self.load_failures.items() if key != (op, kernel)}

    def quarantined(self, device: DeviceFacts) -> Mapping[tuple[str, str], Rejection]:
        """By (op, kernel), what was found wrong on a device; read from disk at the first question, until `forget`."""
        kept = self.on(device)
        found: Mapping[tuple[str, str], Rejection] | None = kept.get(_QUARANTINED)
        if found is None:
            found = kept[_QUARANTINED] = self._read_quarantine(device)
        return found

    def earned(self, device: DeviceFacts) -> Mapping[tuple[str, str], Collection[Any]]:
        """By (op, kernel), the problem classes that it was verified for on a device; read once until `forget`."""
        kept = self.on(device)
        found: Mapping[tuple[str, str], Collection[Any]] | None = kept.get(_EARNED)
        if found is None:
            found = kept[_EARNED] = self._read_earned(device)
        return found

    def tuned(self, device: DeviceFacts) -> TunedTable:
        """What was measured on a device: that which ranks agreed on, else what is on disk, read once until `forget`."""
        kept = self.on(device)
        table: TunedTable | None = kept.get(TUNED)
        if table is None:
            table = kept[TUNED] = self._read_tuned(device)
        return table

    def check_tuned(self, document: Mapping[str, Any]) -> None:
        """Refuse a table that `give_tuned` could not heed.

        Raises:
            ConfigurationError: naming what is wrong.
        """
        if self.evidence is not None and document.get("entries"):
            self.evidence.check(document)

    def give_tuned(self, document: Mapping[str, Any]) -> None:
        """Heed a table of another rank, in place of what is on disk, until `forget`."""
        self._of_first_rank = document
        self.forget_evidence()

    def forget_evidence(self) -> None:
        """Read what was found wrong and what was measured again at the next question."""
        for kept in self._on_devices.values():
            kept.pop(_QUARANTINED, None)
            kept.pop(_EARNED, None)
            kept.pop(TUNED, None)

    def _read_quarantine(self, device: DeviceFacts) -> Mapping[tuple[str, str], Rejection]:
        if device.simulated or self.evidence is None:
            return _NOBODY
        return self.evidence.quarantined(device)

    def _read_earned(self, device: DeviceFacts) -> Mapping[tuple[str, str], Collection[Any]]:
        if device.simulated or self.evidence is None:
            return _NOTHING
        return self.evidence.verified(device)

    def _read_tuned(self, device: DeviceFacts) -> TunedTable:
        if device.simulated or self.evidence is None:
            return _NoTable()
        if self._of_first_rank is not None:
            return self.evidence.measured_by(self._of_first_rank, device)
        return self.evidence.measured(device, self.tables)

    def on(self, device: DeviceFacts) -> dict[Any, Any]:
        """Where the selector keeps what only depends on this machine and a device, until `forget`."""
        kept = self._on_devices.get(device)
        if kept is None:
            kept = self._on_devices[device] = {}
        return kept

    def package(self, wanted: Wanted) -> Finding:
        """Is the package here, in a version that fits?"""
        return self.ask(
            wanted,
            lambda: package(wanted.name, wanted.versions, distribution=wanted.distribution, install=wanted.install),
        )

    def variable(self, name: str) -> str:
        """An environment variable of another project that a record depends on, as it was first seen."""
        return self.ask(("variable", name), lambda: found(name, os.environ.get(name), name)).value or ""

    def ask(self, key: Hashable, probe: Callable[[], Finding], kind: str = "") -> Finding:
        """The finding of `probe`, remembered under `key`.

        Args:
            key: what is asked.
            probe: finds the answer.
            kind: which of `ABSENT` is looked for, if one is: a machine that is not here may be said to lack it.
        """
        findings = self._findings  # `forget` may take another one while the probe looks
        finding = findings.get(key)
        if finding is None:
            finding = findings[key] = probe()
        return finding

    def torch_for(self, device: DeviceFacts) -> TorchBuild:
        """The build of torch beside a device: this one, or for a device that is not here one that can use it."""
        build = torch_build()
        return build.assumed_for(device.vendor) if device.simulated else build

    def assumed(self, device: DeviceFacts) -> str:
        """What an answer for a device that is not here takes for granted; empty for a device that is here."""
        return self._assumed_once(device) if device.simulated else ""

    def _assumed_once(self, device: DeviceFacts) -> str:
        kept = self.on(device)
        said: str | None = kept.get(_ASSUMED)
        if said is None:
            said = kept[_ASSUMED] = self._taken_for_granted(device)
        return said

    def _taken_for_granted(self, device: DeviceFacts) -> str:
        build, here = self.torch_for(device), torch_build()
        return f"{build}{'' if build == here else f' (here: {here})'}; packages, toolkit and variables are those here"

    def forget(self) -> None:
        """Run every probe again at its next use."""
        self._findings, self._on_devices, self.load_failures = {}, {}, {}
        self._of_first_rank = None


class SimulatedMachine(Machine):
    """A machine with exactly these packages, for golden tables and what-if questions.

    Args:
        packages: import name to version. That of torch may name its build (``"2.11.0+cu126"``, ``"2.13.0+cpu"``);
            where it does not, or is not given, torch is the newest release, built for CUDA 13.0.
        variables: environment variables, as `Machine.variable` would see them.
        findings: answers of other probes by their key; a probe not listed here finds what it asks for.
        lacks: which of ``"nvcc"`` (a CUDA toolkit), ``"c++"`` (a compiler), ``"modules"`` (libraries' own, built ahead)
            and ``"cubins"`` (libraries' own binaries) are not there.
        verified: kernels, backends or globs that `kernelhub verify` passed there, for every problem class; or a mapping
            of a kernel's name to its classes, as of ``kernelhub.dispatch.problem_class.facets_of``.
        wrong: kernels, backends or globs that it found wrong there.

    Example:
        >>> import kernelhub
        >>> machine = kernelhub.SimulatedMachine({"deep_gemm": "2.5.0"}, lacks={"nvcc"})
        >>> kernelhub.explain("fp8_gemm", device="H200", machine=machine, backend="deep_gemm").selected is None
        True
    """

    def __init__(
        self,
        packages: Mapping[str, str],
        variables: Mapping[str, str] | None = None,
        findings: Mapping[Hashable, Finding] | None = None,
        lacks: Collection[str] = (),
        verified: Collection[str] | Mapping[str, Collection[Any]] = (),
        wrong: Collection[str] = (),
    ) -> None:
        super().__init__()
        unknown = sorted(set(lacks) - set(ABSENT))
        if unknown:
            raise ConfigurationError(f"lacks: {unknown[0]!r} is not one of {', '.join(ABSENT)}")
        self._packages = dict(packages)
        self._variables = dict(variables or {})
        self._given = dict(findings or {})
        self._lacks = frozenset(lacks)
        self._verified = verified if isinstance(verified, Mapping) else dict.fromkeys(verified, _EVERY)
        self._wrong = tuple(wrong)

    def package(self, wanted: Wanted) -> Finding:
        version = self._packages.get(wanted.name)
        remedy = wanted.install or f'pip install "{wanted.distribution or wanted.name}{wanted.versions}"'
        if version is None:
            return lacking(wanted.name, "package_missing", f"{wanted.name} is not installed", remedy)
        if not fits(version, wanted.versions):
            reason = f"{wanted.name} {version} is installed, {wanted.versions} is needed"
            return lacking(wanted.name, "package_version", reason, remedy, version)
        return found(wanted.name, version, f"{wanted.name} {version}")

    def torch_for(self, device: DeviceFacts) -> TorchBuild:
        given = self._packages.get("torch")
        build = torch_build_of(given)
        return build if given and "+" in given else build.assumed_for(device.vendor)

    def assumed(self, device: DeviceFacts) -> str:
        return self._assumed_once(device)

    def _taken_for_granted(self, device: DeviceFacts) -> str:
        packages = [f"{name} {version}" for name, version in self._packages.items() if name != "torch"]
        lacks = f", without {' or '.join(sorted(self._lacks))}" if self._lacks else ""
        return f"{self.torch_for(device)}; {', '.join(packages) or 'nothing'} installed beside it{lacks}"

    def variable(self, name: str) -> str:
        return self._variables.get(name, "")

    def _read_earned(self, device: DeviceFacts) -> Mapping[tuple[str, str], Collection[Any]]:
        return _Named(self._verified) if self._verified else _NOTHING

    def _read_quarantine(self, device: DeviceFacts) -> Mapping[tuple[str, str], Rejection]:
        said = Rejection("quarantined", "found wrong on the simulated machine", "leave it out of wrong=")
        return _Named(dict.fromkeys(self._wrong, said)) if self._wrong else _NOBODY

    def ask(self, key: Hashable, probe: Callable[[], Finding], kind: str = "") -> Finding:
        given = self._given.get(key)
        if given is not None:
            return given
        return lacking(str(key), *ABSENT[kind]) if kind in self._lacks else found(str(key), None, "simulated")


class _Every:
    """All problem classes."""

    def __contains__(self, item: object) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


_EVERY = _Every()


class _Named(Mapping[tuple[str, str], Any]):
    """What is said of (op, kernel) by a table of names: backends, kernels or globs."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._table = table

    def __getitem__(self, key: tuple[str, str]) -> Any:
        for pattern, value in self._table.items():
            if pattern in (key[1], key[1].partition(".")[0]) or fnmatch.fnmatchcase(key[1], pattern):
                return value
        raise KeyError(key)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(())

    def __len__(self) -> int:
        return len(self._table)
