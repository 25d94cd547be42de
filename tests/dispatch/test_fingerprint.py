"""A fingerprint is equal in two processes exactly if both would run the same."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys

import kernelhub
from kernelhub.dispatch.constraint import Package, Rule, anything
from kernelhub.dispatch.fingerprint import fingerprint_of, packages_of, record_digest, versions_of
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Backend
from kernelhub.dispatch.machine import SimulatedMachine
from tests.dispatch.fakes import kernel

ASK = """
import kernelhub
from kernelhub.dispatch.fingerprint import record_digest
from kernelhub.dispatch.hub import HUB
selection = kernelhub.explain("paged_attention", device="CPU")
print(HUB.fingerprint_of(selection))
for op in HUB.registry.contracts:
    for kernel in HUB.registry.candidates(op).kernels:
        print(op, kernel.name, record_digest(kernel))
"""


def test_every_record_has_the_same_digest_in_every_process():
    """Hashing is seeded anew in each, so that a set in the order of its hashes would show."""

    def told(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, env=environment, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = told("1")
    assert told("2") == first
    assert first.startswith("v1:")
    assert len(first.splitlines()) > 100


class TestRecords:
    def test_anything_in_it_counts(self):
        record = kernel("a.b")
        others = [
            kernel("a.c"),
            dataclasses.replace(record, summary="another"),
            dataclasses.replace(record, target="m:other"),
            dataclasses.replace(record, deterministic=True),
            kernel("a.b", Package("x", ">=1")),
            kernel("a.b", features=("softcap",)),
        ]
        assert len({record_digest(item) for item in (record, *others)}) == 1 + len(others)
        assert record_digest(kernel("a.b")) == record_digest(record)

    def test_the_source_of_a_function_counts_and_so_does_what_it_closes_over(self):
        def rule(limit):
            return Rule(("width",), lambda problem: None if problem.width < limit else "too wide")

        assert record_digest(kernel("a.b", rule(1))) == record_digest(kernel("a.b", rule(1)))
        assert record_digest(kernel("a.b", rule(1))) != record_digest(kernel("a.b", rule(2)))
        other = Rule(("width",), lambda problem: None)
        assert record_digest(kernel("a.b", rule(1))) != record_digest(kernel("a.b", other))

    def test_so_do_the_arguments_of_a_partial_function(self):
        def check(limit, problem):
            return None

        one, two = (Rule(("width",), functools.partial(check, limit)) for limit in (1, 2))
        assert record_digest(kernel("a.b", one)) != record_digest(kernel("a.b", two))


class TestVersions:
    def test_they_are_those_of_the_packages_that_the_record_requires(self):
        record = kernel("a.b", Package("triton", ">=3"))
        machine = SimulatedMachine({"triton": "3.7.1", "torch": "2.13.0", "other": "1"})
        assert versions_of(record, Backend("a", "", package="torch"), machine) == {"triton": "3.7.1", "torch": "2.13.0"}
        assert [package.name for package in packages_of(record.constraints)] == ["triton"]

    def test_where_there_is_no_library_it_is_kernelhubs_own(self):
        assert versions_of(kernel("a.b", anything("width")), None, SimulatedMachine({})) == {
            "kernelhub": kernelhub.__version__
        }


class TestFingerprints:
    def test_whatever_two_ranks_must_have_in_common_counts(self):
        selection = kernelhub.explain("fp8_gemm", device="CPU")
        backend = HUB.registry.backends[selection.kernel.backend].backend
        mark = fingerprint_of(selection, backend, SimulatedMachine({"torch": "2.13.0"}))
        same = fingerprint_of(selection, backend, SimulatedMachine({"torch": "2.13.0"}))
        assert str(mark) == str(same)
        others = [
            fingerprint_of(kernelhub.explain("fp8_gemm", device="CPU", n=512), backend, SimulatedMachine({})),
            dataclasses.replace(mark, versions=(("torch", "2.14.0"),)),
            dataclasses.replace(mark, record="x"),
            dataclasses.replace(mark, kernel="x"),
            dataclasses.replace(mark, layout="x"),
            dataclasses.replace(mark, tuned="x"),
        ]
        assert len({str(item) for item in (mark, *others)}) == 1 + len(others)

    def test_the_device_does_not_count_since_ranks_may_have_several(self):
        one, two = (kernelhub.explain("fp8_gemm", device=name) for name in ("H100", "H200"))
        assert one.selected == two.selected
        assert str(HUB.fingerprint_of(one)) == str(HUB.fingerprint_of(two))
