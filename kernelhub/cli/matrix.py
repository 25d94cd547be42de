"""``kernelhub backends --matrix``: what each kernel supports on each device, and its standing there, by its record.

Devices are simulated and every library is assumed to be installed, so the output is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.constraint import (
    Between,
    Constraint,
    MultipleOf,
    OneOf,
    Rule,
    SameValue,
)
from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.fingerprint import packages_of
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.dispatch.reasons import evaluate
from kernelhub.dispatch.standing import Standing
from kernelhub.probes.device import SIMULATED, DeviceFacts
from kernelhub.probes.finding import Finding, found
from kernelhub.probes.package import Wanted
from kernelhub.probes.torch_build import TorchBuild, torch_build_of

ALL, SOME, NONE = "yes", "some", "-"


class Furnished(Machine):
    """A machine that has every package in a suitable version, and on which every probe succeeds."""

    def package(self, wanted: Wanted) -> Finding:
        return found(wanted.name, None, f"{wanted.name} is assumed to be installed")

    def variable(self, name: str) -> str:
        return ""

    def torch_for(self, device: DeviceFacts) -> TorchBuild:
        return torch_build_of(None).assumed_for(device.vendor)

    def ask(self, key: Hashable, probe: Callable[[], Finding], kind: str = "") -> Finding:
        return found(str(key), None, "assumed to be present")


@dataclass(frozen=True)
class Row:
    """The problems that the record of a kernel supports.

    Attributes:
        kernel: the record.
        devices: per simulated device ``"yes"``, ``"some"`` (some problems only) or ``"-"``.
        standings: per supported simulated device, the kernel's standing on its family.
        limits: its conditions on a problem, in words.
        needs: packages, each with versions.
        missing: features of the op that it lacks.
    """

    kernel: Kernel
    devices: dict[str, str]
    standings: dict[str, Standing]
    limits: tuple[str, ...]
    needs: tuple[str, ...]
    missing: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "op": self.kernel.op,
            "kernel": self.kernel.name,
            "summary": self.kernel.summary,
            "devices": self.devices,
            "standings": {
                device: {"word": standing.word, "evidence": standing.evidence, "figure": standing.figure}
                for device, standing in self.standings.items()
            },
            "features": sorted(self.kernel.features),
            "missing": list(self.missing),
            "limits": list(self.limits),
            "needs": list(self.needs),
            "layouts": list(self.kernel.layouts),
            "graph": self.kernel.graph.name.lower(),
            "deterministic": self.kernel.deterministic,
            "batch_invariant": self.kernel.batch_invariant,
        }


def rows(record: OpRecord[Any]) -> list[Row]:
    """The kernels of an op, by name."""
    contract = record
    _ = HUB.settings
    kernels = sorted(HUB.registry.candidates(contract.name).kernels, key=lambda kernel: kernel.name)
    problems = {name: contract.problem(device=device) for name, device in SIMULATED.items()}
    taken = {kernel: {name: _takes(kernel, problem) for name, problem in problems.items()} for kernel in kernels}
    return [
        Row(
            kernel,
            taken[kernel],
            {name: kernel.standing_on(SIMULATED[name].family) for name, mark in taken[kernel].items() if mark != NONE},
            tuple(filter(None, map(limit_of, kernel.constraints))),
            tuple(f"{package.name} {package.versions}".strip() for package in packages_of(kernel.constraints)),
            tuple(sorted(contract.schema.features - kernel.features)),
        )
        for kernel in kernels
    ]


def _takes(kernel: Kernel, problem: Problem) -> str:
    """Whether a record supports a device, by its conditions on the device alone."""
    machine = Furnished()
    answer = ALL
    for constraint in kernel.constraints:
        if "device" not in constraint.fields:
            continue
        if evaluate(constraint, problem, machine) is not None:
            if constraint.fields == ("device",):
                return NONE
            answer = SOME
    return answer


def limit_of(constraint: Constraint) -> str:
    """A constraint's condition on a problem, in words; empty if its condition is on the machine."""
    if isinstance(constraint, OneOf):
        return f"{constraint.field}: {', '.join(map(str, constraint.values))}"
    if isinstance(constraint, Between):
        return f"{constraint.field}: {constraint.low} to {constraint.high}"
    if isinstance(constraint, MultipleOf):
        return f"{constraint.field}: multiples of {constraint.divisor}"
    if isinstance(constraint, SameValue):
        return f"{constraint.field} = {constraint.other}"
    if isinstance(constraint, Rule):
        return f"a rule on {', '.join(constraint.reads)}"
    return ""


def text(row: Row) -> tuple[str, ...]:
    """The cells of a row: kernel, its standing on each device, limits, features that it lacks, packages it needs."""
    return (
        row.kernel.name,
        *(_cell(row, name) for name in SIMULATED),
        "; ".join(row.limits) or "none",
        ", ".join(row.missing) or "nothing",
        ", ".join(row.needs) or "-",
    )


def _cell(row: Row, device: str) -> str:
    if device not in row.standings:
        return NONE
    word = row.standings[device].word.replace("_", "-")
    return word if row.devices[device] == ALL else f"{word}, {row.devices[device]}"


COLUMNS = ("kernel", *SIMULATED, "limits", "features it lacks", "needs")
