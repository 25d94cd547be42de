"""Machines: the facts that selection reads besides the device, such as packages, toolkits, evidence, failed loads.

The selector takes a `Machine` as an argument, so that tests and `explain` can pass a `SimulatedMachine`.
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

# What a simulated machine may lack: code, reason and remedy of the finding.
ABSENT: dict[str, tuple[str, str, str]] = {
    "nvcc": ("toolkit_missing", "must be compiled, but no CUDA toolkit is installed", "install a CUDA toolkit"),
    "c++": ("compiler_missing", "must be compiled, but no C++ compiler is installed", "install g++ or clang++"),
    "modules": ("symbol_missing", "has no prebuilt module", "install the library's prebuilt modules"),
    "cubins": ("cubins_missing", "its binaries are not installed", "install the library's binaries"),
}


_READ_WITH = ("packaging.specifiers", "packaging.version", "kernelhub.probes.distributions")
# Keys of `Machine.on` for what was read about a device.
_QUARANTINED, _EARNED, _ASSUMED = "quarantined", "earned", "assumed"
_NOBODY: Mapping[tuple[str, str], Rejection] = MappingProxyType({})
_NOTHING: Mapping[tuple[str, str], Collection[Any]] = MappingProxyType({})


class Evidence(Protocol):
    """The store of evidence about kernels. It is read once for each device."""

    def quarantined(self, device: DeviceFacts) -> Mapping[tuple[str, str], Rejection]:
        """By (op, kernel), the rejection of a kernel that `kernelhub verify` or an audit found wrong."""

    def verified(self, device: DeviceFacts) -> Mapping[tuple[str, str], Collection[Any]]:
        """By (op, kernel), the problem classes that the kernel was verified for."""

    def measured(self, device: DeviceFacts, files: Sequence[str]) -> TunedTable:
        """The measurements of `kernelhub tune` on this machine, then those of these table files and folders."""

    def measured_by(self, document: Mapping[str, Any], device: DeviceFacts) -> TunedTable:
        """The measurements in the document of another rank."""

    def check(self, document: Mapping[str, Any]) -> None:
        """Raise ConfigurationError if `measured_by` cannot read a document."""


class _NoTable:
    """An empty table: nothing was measured, or evidence is off."""

    def find(self, op: str, problem: Any) -> Tuned | None:
        return None

    def plain(self) -> dict[str, Any]:
        return {}


class _OnDevices(dict[DeviceFacts, dict[Any, Any]]):
    """What depends on devices, by device, with the last pair: a selection asks five times, mostly for one object."""

    def __init__(self) -> None:
        super().__init__()
        self.last: tuple[DeviceFacts | None, dict[Any, Any]] = (None, {})


class Machine:
    """The facts of this machine. Each probe runs once until `forget`.

    Attributes:
        load_failures: by (op, kernel), why the adapter could not be imported or prepared.
        evidence: the store of evidence; None if KERNELHUB_EVIDENCE is off.
        tables: tuning tables, as files or folders, that are read after this machine's own (KERNELHUB_TUNED).
    """

    evidence: Evidence | None = None
    tables: tuple[str, ...] = ()

    def __init__(self) -> None:
        # `forget` replaces these and does not clear them, since copies of `snapshot` still use them.
        self._findings: dict[Hashable, Finding] = {}
        self._on_devices = _OnDevices()
        self.load_failures: Mapping[tuple[str, str], Rejection] = {}
        self._of_first_rank: Mapping[str, Any] | None = None

    def load(self) -> None:
        """Import the modules that probes use, so that the first selection does not import them."""
        for name in _READ_WITH:
            importlib.import_module(name)

    def snapshot(self) -> Machine:
        """A copy that neither `forget` nor a later load failure changes.

        Probes that have not run yet run when they are needed; both machines share their results.
        """
        same = object.__new__(type(self))
        same.__dict__.update(self.__dict__)
        return same

    def cannot_load(self, op: str, kernel: str, rejection: Rejection) -> None:
        """Store why a kernel's adapter could not be imported or prepared."""
        self.load_failures = {**self.load_failures, (op, kernel): rejection}

    def forget_failure(self, op: str, kernel: str) -> None:
        """Drop the load failure of a kernel, so that it is tried again."""
        self.load_failures = {key: why for key, why in self.load_failures.items() if key != (op, kernel)}

    def quarantined(self, device: DeviceFacts) -> Mapping[tuple[str, str], Rejection]:
        """By (op, kernel), the rejections of kernels found wrong on a device; read from disk once until `forget`."""
        kept = self.on(device)
        found: Mapping[tuple[str, str], Rejection] | None = kept.get(_QUARANTINED)
        if found is None:
            found = kept[_QUARANTINED] = self._read_quarantine(device)
        return found

    def earned(self, device: DeviceFacts) -> Mapping[tuple[str, str], Collection[Any]]:
        """By (op, kernel), the problem classes verified on a device; read from disk once until `forget`."""
        kept = self.on(device)
        found: Mapping[tuple[str, str], Collection[Any]] | None = kept.get(_EARNED)
        if found is None:
            found = kept[_EARNED] = self._read_earned(device)
        return found

    def tuned(self, device: DeviceFacts) -> TunedTable:
        """The tuning table of a device: the one that ranks agreed on, else that on disk; read once until `forget`."""
        kept = self.on(device)
        table: TunedTable | None = kept.get(TUNED)
        if table is None:
            table = kept[TUNED] = self._read_tuned(device)
        return table

    def give_tuned(self, document: Mapping[str, Any]) -> None:
        """Use the table of another rank instead of that on disk, until `forget`."""
        self._of_first_rank = document
        self.forget_evidence()

    def forget_evidence(self) -> None:
        """Drop quarantine, verifications and measurements; they are read again at their next use."""
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
        """The selector's cache of what depends on this machine and a device alone, until `forget`."""
        known = self._on_devices
        last, of_last = known.last
        if last is device:
            return of_last
        kept = known.get(device)
        if kept is None:
            kept = known[device] = {}
        known.last = device, kept
        return kept

    def package(self, wanted: Wanted) -> Finding:
        """The finding for a package: whether it is installed in a supported version."""
        return self.ask(
            wanted,
            lambda: package(wanted.name, wanted.versions, distribution=wanted.distribution, install=wanted.install),
        )

    def variable(self, name: str) -> str:
        """An environment variable of another project, as first read; empty if it is unset."""
        return self.ask(("variable", name), lambda: found(name, os.environ.get(name), name)).value or ""

    def ask(self, key: Hashable, probe: Callable[[], Finding], kind: str = "") -> Finding:
        """The finding of `probe`, cached under `key`.

        Args:
            key: identifies the probe.
            probe: function that returns the finding.
            kind: key of `ABSENT` that the probe looks for, since a simulated machine may lack it; else empty.
        """
        findings = self._findings  # `forget` may replace it while the probe runs
        finding = findings.get(key)
        if finding is None:
            finding = findings[key] = probe()
        return finding

    def torch_for(self, device: DeviceFacts) -> TorchBuild:
        """The build of torch for a device: the installed one, or for a simulated device one that supports it."""
        build = torch_build()
        return build.assumed_for(device.vendor) if device.simulated else build

    def assumed(self, device: DeviceFacts) -> str:
        """What a selection for a simulated device assumes, as a phrase; empty for a device of this machine."""
        return self._assumed_once(device) if device.simulated else ""

    def _assumed_once(self, device: DeviceFacts) -> str:
        kept = self.on(device)
        phrase: str | None = kept.get(_ASSUMED)
        if phrase is None:
            phrase = kept[_ASSUMED] = self._assumptions(device)
        return phrase

    def _assumptions(self, device: DeviceFacts) -> str:
        build, here = self.torch_for(device), torch_build()
        return f"{build}{'' if build == here else f' (here: {here})'}; packages, toolkit and variables are those here"

    def forget(self) -> None:
        """Drop all findings; every probe runs again at its next use."""
        self._findings, self._on_devices, self.load_failures = {}, _OnDevices(), {}
        self._of_first_rank = None


class SimulatedMachine(Machine):
    """A machine with exactly these packages, for `explain` and tests. No probe of this machine runs.

    Args:
        packages: import name to version. The version of torch may include its build (``"2.11.0+cu126"``,
            ``"2.13.0+cpu"``). Without a build, or without torch, it is the newest release, built for CUDA 13.0.
        variables: environment variables of other projects that records read.
        findings: findings of other probes by their key; a probe that is not listed succeeds.
        lacks: what is not installed: ``"nvcc"`` (a CUDA toolkit), ``"c++"`` (a compiler), ``"modules"`` (prebuilt
            modules of libraries), ``"cubins"`` (binaries of libraries).
        verified: kernels, backends or globs that passed `kernelhub verify` there, for every problem class; or a mapping
            of kernel name to problem classes, as ``kernelhub.dispatch.problem_class.facets_of`` returns them.
        wrong: kernels, backends or globs that `kernelhub verify` found wrong there.

    Raises:
        ConfigurationError: `lacks` has an unknown name.

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

    def _assumptions(self, device: DeviceFacts) -> str:
        packages = [f"{name} {version}" for name, version in self._packages.items() if name != "torch"]
        lacks = f", without {' or '.join(sorted(self._lacks))}" if self._lacks else ""
        return f"{self.torch_for(device)}; {', '.join(packages) or 'nothing'} installed beside it{lacks}"

    def variable(self, name: str) -> str:
        return self._variables.get(name, "")

    def _read_earned(self, device: DeviceFacts) -> Mapping[tuple[str, str], Collection[Any]]:
        return _Named(self._verified) if self._verified else _NOTHING

    def _read_quarantine(self, device: DeviceFacts) -> Mapping[tuple[str, str], Rejection]:
        rejection = Rejection("quarantined", "found wrong on the simulated machine", "leave it out of wrong=")
        return _Named(dict.fromkeys(self._wrong, rejection)) if self._wrong else _NOBODY

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
    """A mapping of (op, kernel) that looks the kernel up in a table of backends, kernels and globs."""

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
