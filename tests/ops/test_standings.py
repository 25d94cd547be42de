"""What a record says of where its kernel ran is what the results say, in both directions; the rest has a source."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kernelhub.backends.triton.requirements import Interpreter
from kernelhub.cli.matrix import NONE, rows
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.standing import NOTHING_KNOWN, OPT_IN, PUBLISHED, UNTESTED, VERIFIED, Standing
from kernelhub.ops import functions
from kernelhub.probes.device import SIMULATED

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FAMILIES = {"cpu": "cpu", "hopper": "h200"}  # that tests have run on: the word in the names of the files
# Runs of parts of the tests: of kernels beside a library, or of ops that are younger than the results of all tests.
RUNS = {
    "cpu": ("ranks_cpu.json", "own_ops_cpu.json"),
    "hopper": (
        "libraries_h200.json",
        "cuda_h100.json",
        "cuda_h200.json",
        "cuda_fp4_h200.json",
        "cuda_gemm_few_rows_h200.json",
        "cuda_gemm_h200.json",
        "cuda_mla_h200.json",
        "cuda_paged_h200.json",
        "nvlink_h100.json",
        "sgl_kernel_h200.json",
        "gluon_h100.json",
        "gluon_h200.json",
        "gluon_mla_h200.json",
        "gluon_more_h200.json",
        "gluon_tests_h100.json",
        "gluon_tests_h200.json",
        "comm_h100.json",
        "comm_h200.json",
        "comm_4_ranks_h200.json",
        "comm_checks_h200.json",
        "comm_cuda_h200.json",
        "comm_host_experts_h200.json",
        "comm_norm_clustered_h200.json",
        "comm_norm_early_h200.json",
        "comm_norm_h200.json",
        "comm_norm_parts_h200.json",
        "comm_norm_polled_h200.json",
        "comm_parts_4_ranks_h200.json",
        "comm_quant_h100.json",
        "comm_quant_pair_4_ranks_h200.json",
        "comm_quant_pair_h200.json",
        "comm_quant_steps_h200.json",
        "comm_quant_steps_4_ranks_h200.json",
        "comm_runs_h200.json",
        "comm_split_h200.json",
        "comm_sums_4_ranks_h200.json",
        "comm_tiles_h200.json",
        "expert_comm_h100.json",
        "expert_comm_h200.json",
        "expert_comm_4_ranks_h200.json",
        "expert_comm_formats_4_ranks_h200.json",
        "expert_comm_models_h200.json",
    ),
}
FAMILY_OF = {name: device.family for name, device in SIMULATED.items()}


@cache
def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def is_interpreted(kernel: Kernel) -> bool:
    """Whether a kernel also runs in Triton's interpreter."""
    alternatives = (one for constraint in kernel.constraints for one in getattr(constraint, "alternatives", ()))
    return any(isinstance(one, Interpreter) for one in alternatives)


@cache
def records() -> dict[Kernel, frozenset[str]]:
    """Every record, with the families of the devices that it takes; a CPU takes Triton's where they are interpreted."""
    return {
        row.kernel: frozenset(FAMILY_OF[name] for name, taken in row.devices.items() if taken != NONE)
        | ({"cpu"} if is_interpreted(row.kernel) else set())
        for function in functions()
        for row in rows(function.op.contract)
    }


def identity(kernel: Kernel) -> str:
    return f"{kernel.op} {kernel.name}"


def said_by_the_results(family: str) -> dict[Kernel, list[str]]:
    """Kernels that passed all tests on a device of a family, with what their evidence has to say of that."""
    tests = result(f"verification_{FAMILIES[family]}.json")
    totals: dict[str, int] = {}
    for row in tests["tests"]:
        backend = row["kernel"].partition(".")[0]
        totals[backend] = totals.get(backend, 0) + row["passed"]
    passed = {(row["op"], row["kernel"]) for row in tests["tests"] if row["passed"] and not row["failed"]}
    files = [result(name) for name in RUNS[family]]
    # The evidence of such a kernel names its own run.
    by_itself = {name for runs in files for run in runs["runs"] for name in run["kernels"]}
    said: dict[Kernel, list[str]] = {}
    for kernel, families in records().items():
        if family not in families:
            continue  # what ran on the host of a GPU
        names = {kernel.name, identity(kernel)}
        if (kernel.op, kernel.name) in passed and not names & by_itself:
            versions = [f"torch {tests['torch']}"]
            versions += [f"Triton {tests['triton']}"] if kernel.backend == "triton" else []
            count = f"{totals[kernel.backend]} tests of this backend passed, none failed"
            said.setdefault(kernel, []).extend([tests["device"], tests["date"], *versions, count])
        for runs in files:
            for run in runs["runs"]:
                if names & set(run["kernels"]) and run["passed"] and not run["failed"]:
                    where = [runs["device"], run.get("date", runs["date"]), f"torch {runs['torch']}"]
                    said.setdefault(kernel, []).extend([*where, f"{run['library']}: {run['passed']} tests passed"])
    return said


def on(kernel: Kernel, family: str) -> Standing:
    return kernel.standing_on(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_verified_is_what_the_results_show_to_have_run(family: str) -> None:
    shown = said_by_the_results(family)
    claimed = {kernel for kernel in records() if on(kernel, family).word == VERIFIED}
    opted = {kernel for kernel in shown if on(kernel, family).word == OPT_IN}
    assert {identity(kernel) for kernel in claimed - set(shown)} == set(), "verified, and in no result"
    assert {identity(kernel) for kernel in set(shown) - claimed - opted} == set(), "passed, and not verified"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_evidence_names_device_date_versions_and_counts_of_the_results(family: str) -> None:
    for kernel, said in said_by_the_results(family).items():
        evidence = on(kernel, family).evidence
        missing = [part for part in said if part not in evidence]
        assert not missing, f"{identity(kernel)}: its evidence on {family} lacks {missing}; it says {evidence!r}"


def test_nothing_is_verified_on_a_family_that_no_result_is_of() -> None:
    others = set(FAMILY_OF.values()) - set(FAMILIES)
    for kernel in records():
        for standing in kernel.standings:
            assert standing.word != VERIFIED or not others & set(standing.families), identity(kernel)


def test_what_was_compiled_ahead_was() -> None:
    compiled = {(row["op"], row["kernel"], row["device"]) for row in result("verification_cpu.json")["ahead"]}
    names = {device for _, _, device in compiled} - {"H200"}
    assert names == {"A100", "L40S", "B200", "RTX5090"}
    for kernel in records():
        for name in names if kernel.backend == "triton" else ():
            standing = on(kernel, FAMILY_OF[name])
            if standing.word == UNTESTED:  # states no evidence
                continue
            claimed = "compiled ahead of time" in standing.evidence
            assert claimed == ((kernel.op, kernel.name, name) in compiled), f"{identity(kernel)} on {name}"


def test_a_standing_speaks_of_devices_that_the_record_takes_and_of_all_of_them() -> None:
    known = set(FAMILY_OF.values())
    for kernel, families in records().items():
        spoken = {family for standing in kernel.standings for family in standing.families}
        assert spoken & known == families, f"{identity(kernel)}: takes {set(families)}, speaks of {spoken & known}"
        assert all(on(kernel, family) is not NOTHING_KNOWN for family in families)


def test_a_claim_has_a_link_and_a_figure_has_a_claim() -> None:
    for kernel in records():
        for standing in kernel.standings:
            assert standing.word != PUBLISHED or "https://" in standing.evidence, identity(kernel)
            assert not standing.figure or "https://" in standing.evidence, identity(kernel)
            assert standing.seconds > 0


def test_every_opt_in_standing_says_why() -> None:
    """The reasons: other bits, a guarantee by the caller, compilation at the first calls, no run yet."""
    _ = HUB.settings
    reasons = ("bits differ", "caller must guarantee", "compiles", "runs nvcc", "has not run on a GPU")
    for kernel in records():
        for standing in kernel.standings:
            assert standing.word != OPT_IN or any(word in standing.evidence for word in reasons), identity(kernel)
