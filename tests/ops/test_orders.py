"""What a line of an order file says: which kernels, on whose word, and that no other line has lost one of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kernelhub.cli.matrix import NONE, rows
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.order import Line, first, line_for
from kernelhub.ops import functions
from kernelhub.probes.device import SIMULATED, simulated

OPS = {function.op.contract.name: function for function in functions()}
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def lines(op: str) -> tuple[Line, ...]:
    _ = HUB.settings
    return HUB.registry.candidates(op).lines


def measured_families() -> set[str]:
    """Families of the devices that a kernel was timed on."""
    machines = {json.loads(path.read_text())["device"] for path in RESULTS.glob("verification_*.json")}
    return {"cpu" if "CPU" in machine else simulated(machine).family for machine in machines}


@pytest.mark.parametrize("op", OPS)
def test_no_line_of_a_family_has_lost_a_kernel_that_runs_there(op: str) -> None:
    """What the line of every other GPU names; without a place it would stand before those that were found faster."""
    taken = {row.kernel.name: row.devices for row in rows(OPS[op].op.contract)}
    for regime in OPS[op].op.contract.regimes or ("*",):
        common = line_for(lines(op), simulated("sm_137"), regime)
        for device, facts in SIMULATED.items() if common is not None else ():
            line = line_for(lines(op), facts, regime)
            if facts.type == "cpu" or line is None:
                continue
            lost = {name for name in common.kernels if taken[name][device] != NONE} - set(line.kernels)
            assert not lost, f"{op}, {device}, {regime}: the line {line.family}/{line.regime} lacks {sorted(lost)}"


@pytest.mark.parametrize("op", OPS)
def test_a_line_of_a_family_that_nobody_measured_is_an_expectation_with_a_source(op: str) -> None:
    for line in lines(op):
        of = f"{op}, {line.family}/{line.regime}"
        family, _, part = line.family.partition("/")
        if family not in {*measured_families(), "*"}:
            assert line.expected, of
        elif not part:  # of a family that was measured, a part may not have been
            assert not line.expected, of
        if line.expected:
            source = r"https://|H200|benchmarks/results/"
            assert re.search(source, line.evidence), f"{of}: {line.evidence!r} has no source"


@pytest.mark.parametrize("op", OPS)
def test_a_family_has_one_line_for_each_regime(op: str) -> None:
    places = [(line.family, line.regime) for line in lines(op)]
    assert len(places) == len(set(places))
    assert all(len(line.kernels) == len(set(line.kernels)) for line in lines(op))


def test_an_expectation_is_said_to_be_one() -> None:
    import kernelhub
    from kernelhub.dispatch.machine import SimulatedMachine

    machine = SimulatedMachine({"triton": "3.7.1"})
    expected = kernelhub.explain("paged_attention", device="B200", q_len="one", machine=machine)
    measured = kernelhub.explain("paged_attention", device="H200", q_len="one", machine=machine)
    assert "which is expected and not measured" in str(expected)
    assert "which is expected and not measured" not in str(measured)


def test_the_first_go_before_the_others_and_none_twice() -> None:
    assert first(("c", "a"), ("a", "b", "c", "d")) == ("c", "a", "b", "d")
