"""A small op and backends made for tests: selection can be tried without any attention."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.constraint import Constraint, anything
from kernelhub.dispatch.kernel import Backend, Band, Kernel, KnownBad
from kernelhub.dispatch.machine import Machine, SimulatedMachine
from kernelhub.dispatch.order import Candidates, Line
from kernelhub.dispatch.policy import Policy
from kernelhub.dispatch.problem import Schema, facet, feature
from kernelhub.dispatch.select import select
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.standing import verified
from kernelhub.probes.device import DeviceFacts, simulated


@dataclass(frozen=True)
class ToyProblem:
    """Two structural facets and three features."""

    device: DeviceFacts = facet("device")
    width: int = facet("width", default=64)
    softcap: bool = feature("softcap", False)
    sinks: bool = feature("sinks", False)
    layout: str = feature("layout", "NHD", ("HND",))


EVERYWHERE = (verified("*", evidence="a test's own"),)
SCHEMA = Schema(ToyProblem)
H200 = simulated("H200")


def problem(**facets: Any) -> ToyProblem:
    return ToyProblem(**{"device": H200, **facets})


def kernel(
    name: str,
    *constraints: Constraint,
    band: Band = Band.PORTABLE,
    features: tuple[str, ...] = (),
    op: str = "toy",
    **more: Any,
) -> Kernel:
    """A record that takes everything but what is said."""
    mentioned = {field for constraint in constraints for field in constraint.fields}
    silent = tuple(sorted(SCHEMA.structural - mentioned))
    return Kernel(
        op=op,
        name=name,
        target=f"{__name__}:Missing",
        summary=name,
        band=band,
        constraints=(*constraints, anything(*silent)),
        features=frozenset(features),
        **{"standings": EVERYWHERE} | more,
    )


NO_POLICY = Policy()


def choose(
    *kernels: Kernel,
    policy: Policy = NO_POLICY,
    lines: tuple[Line, ...] = (),
    known_bad: tuple[KnownBad, ...] = (),
    machine: Machine | None = None,
    asked: ToyProblem | None = None,
    regime: str = "prefill",
) -> Selection[ToyProblem]:
    """The selection of the pure selector on the toy op."""
    return select(
        "toy",
        SCHEMA,
        asked or problem(),
        regime,
        Candidates(kernels, lines, known_bad),
        machine or SimulatedMachine({}),
        policy,
    )


def backend_module(name: str, kernels: tuple[Kernel, ...], known_bad: tuple[KnownBad, ...] = ()) -> Any:
    """What a backend's kernels.py looks like to the loader."""
    return types.SimpleNamespace(
        __name__=f"fake.{name}", BACKEND=Backend(name, f"the {name} backend"), KERNELS=kernels, KNOWN_BAD=known_bad
    )
