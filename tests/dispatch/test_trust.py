"""Properties of the policy of trust, on every simulated device, with every library, for every op."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernelhub
from kernelhub.dispatch.explain import problem_from
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.dispatch.problem_class import unpacked_facets
from kernelhub.dispatch.reasons import flags_of
from kernelhub.dispatch.standing import OPT_IN, PUBLISHED, TRUSTS, VERIFIED
from kernelhub.ops import functions
from kernelhub.ops.models.problems import problems_of
from kernelhub.probes.device import SIMULATED
from tests.golden.tables import ASKED, LIBRARIES

EVERYTHING = LIBRARIES["every library"]
OPS = [function.op.contract.name for function in functions()]
PROBLEMS = [*ASKED.values(), *((op, {}) for op in OPS)]


def record(op: str, name: str | None) -> Any:
    _ = HUB.settings
    return next(kernel for kernel in HUB.registry.candidates(op).kernels if kernel.name == name)


def is_portable(op: str, kernel: Any) -> bool:
    return kernel in HUB.registry.candidates(op).portable


def choose(problem: tuple[str, dict[str, Any]], device: str, trust: str, **evidence: Any) -> Any:
    op, facets = problem
    with kernelhub.use(trust=trust):
        return kernelhub.explain(op, device=device, machine=SimulatedMachine(EVERYTHING, **evidence), **facets)


problems = st.sampled_from(PROBLEMS)
devices = st.sampled_from(sorted(SIMULATED))


@settings(max_examples=200, deadline=None)
@given(problems, devices, st.sampled_from(TRUSTS))
def test_nothing_is_chosen_without_evidence_but_what_the_policy_takes(problem, device, trust) -> None:
    selection = choose(problem, device, trust)
    kernel = record(problem[0], selection.selected)
    word = kernel.standing_on(SIMULATED[device].family).word
    allowed = {VERIFIED, PUBLISHED} if trust == "vendor" else {VERIFIED}
    assert word in allowed or (is_portable(problem[0], kernel) and word != OPT_IN)


@settings(max_examples=200, deadline=None)
@given(problems, devices, st.data())
def test_evidence_for_a_kernel_only_ever_chooses_that_kernel(problem, device, data) -> None:
    before = choose(problem, device, "here")
    faster = [decision.kernel for decision in before.faster]
    names = faster or [kernel.name for kernel in HUB.registry.candidates(problem[0]).kernels]
    name = data.draw(st.sampled_from(names))
    after = choose(problem, device, "here", verified=[name])
    assert after.selected == (name if name in faster else before.selected)
    assert choose(problem, device, "here").selected == before.selected  # without it, the former choice


@settings(max_examples=100, deadline=None)
@given(problems, devices)
def test_the_first_of_the_faster_is_chosen_once_all_are_verified(problem, device) -> None:
    before, after = choose(problem, device, "here"), choose(problem, device, "here", verified=["*"])
    assert after.selected == (before.faster[0].kernel if before.faster else before.selected)
    assert after.faster == ()


@settings(max_examples=100, deadline=None)
@given(problems, devices, st.sampled_from(TRUSTS))
def test_quarantine_beats_all(problem, device, trust) -> None:
    first = choose(problem, device, trust, verified=["*"])
    without = choose(problem, device, trust, verified=["*"], wrong=[first.selected])
    assert without.selected != first.selected
    decision = next(item for item in without.decisions if item.kernel == first.selected)
    assert decision.code == "quarantined"


@settings(max_examples=100, deadline=None)
@given(problems, devices, st.data())
def test_evidence_for_another_class_changes_nothing(problem, device, data) -> None:
    op, _ = problem
    before = choose(problem, device, "here")
    others = [other for other in PROBLEMS if other[0] == op and other != problem]
    if not others or not before.faster:
        return
    other = choose(data.draw(st.sampled_from(others)), device, "here").problem
    if unpacked_facets(other) == unpacked_facets(before.problem):
        return
    evidence = {before.faster[0].kernel: {unpacked_facets(other)}}
    assert choose(problem, device, "here", verified=evidence).selected == before.selected
    evidence = {before.faster[0].kernel: {unpacked_facets(before.problem)}}
    assert choose(problem, device, "here", verified=evidence).selected == before.faster[0].kernel


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3.2", "gpt-oss-120b", "kimi-k2-thinking"])
def test_the_flags_of_a_hint_are_the_problem_class(model) -> None:
    """What the command verifies is what the call asks for, for every problem class of real models."""
    for need in problems_of(model, tp=8):
        contract = HUB.function(need.op).op.contract
        problem = need.problem("B200")
        assert parsed(contract, flags_of(contract.schema, problem)) == unpacked_facets(problem)


@pytest.mark.parametrize("op", OPS)
def test_a_class_of_usual_facets_has_a_flag_too(op: str) -> None:
    """Without one the command would be about the op's own cases, and earn nothing for the class."""
    contract = HUB.function(op).op.contract
    problem = kernelhub.explain(op, device="B200").problem
    flags = flags_of(contract.schema, problem)
    assert flags
    assert parsed(contract, flags) == unpacked_facets(problem)


def parsed(contract: Any, flags: list[str]) -> Any:
    """The class that the command line would verify."""
    import argparse

    from kernelhub.cli.facets import add_facets, given

    parser = argparse.ArgumentParser()
    add_facets(parser, contract)
    words = [word for flag in flags for word in flag.split(" ")]
    return unpacked_facets(problem_from(contract, SIMULATED["B200"], given(parser.parse_args(words), contract)))
