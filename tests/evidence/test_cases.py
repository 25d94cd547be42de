"""The table of cases: every op, every feature, nothing that says nothing."""

from __future__ import annotations

import pytest
import torch

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.checks import Subject
from kernelhub.evidence.poison import apart, copied
from kernelhub.ops import functions
from kernelhub.ops.case import bytes_of
from kernelhub.testing import _calls

CPU = torch.device("cpu")
OPS = [function.op.contract.name for function in functions()]


def test_every_op_has_cases() -> None:
    assert set(CASES) == set(OPS)
    assert all(cases.op == op for op, cases in CASES.items())


@pytest.mark.parametrize("op", OPS)
class TestOfAnOp:
    def test_every_feature_of_the_schema_is_requested(self, op) -> None:
        _ = HUB.settings
        schema = HUB.registry.contracts[op].schema
        calls = _calls(op, "cpu")  # made already, where tests of kernels were collected
        assert [label for label, _, _ in calls] == [case.label for case in CASES[op].cases()]
        used = {name for _, problem, _ in calls for name in schema.features_used(problem)}
        assert used == schema.features

    def test_no_two_cases_have_the_same_label(self, op) -> None:
        labels = [case.label for case in CASES[op].cases()]
        assert len(labels) == len(set(labels))
        assert any(case.quick for case in CASES[op].cases())

    def test_token_counts_are_awkward(self, op) -> None:
        swept = [case for case in CASES[op].cases() if case.tokens]
        assert len(swept) >= 4
        assert sum(case.quick for case in swept) >= 3

    def test_the_reference_hears_every_feature(self, op) -> None:
        """Where the reference's result does not change, a kernel that ignores the feature could not be told."""
        cases = CASES[op]
        for case in cases.cases():
            if case.without is None:
                continue
            assert case.feature, case.label
            wants = []
            for make in (case.make, case.without):
                arguments = make(CPU)
                places = cases.destinations(arguments)
                shapes = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in places.items()}
                results = shapes or cases.results(None, {}, arguments)
                if op.endswith("_quant"):
                    results = cases.results(_reference(op, arguments), {}, arguments)
                elif op.startswith("quantize"):
                    results = dict(
                        zip(("out", "out_scale", "out_global_scale"), _reference(op, arguments), strict=False)
                    )
                wants.append(cases.judge(results, arguments).want)
            moved = apart(*wants)
            assert any(distance > 0 for distance in moved.values()), case.label

    def test_the_same_arguments_are_made_each_time(self, op) -> None:
        case = next(CASES[op].cases())
        one, other = case.make(CPU), case.make(CPU)
        for name, value in one.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(bytes_of(value), bytes_of(other[name]))


def _reference(op: str, arguments):
    return getattr(kernelhub, op).reference(**arguments)


@pytest.mark.parametrize("op", ["fp8_gemm", "fused_moe", "attention", "mqa_logits"])
def test_the_reference_answers_a_call_once_however_often_the_kernel_is_asked(op, monkeypatch) -> None:
    cases, asked = CASES[op], []
    expect = type(cases).expect

    def counted(self, arguments):
        asked.append(arguments)
        return expect(self, arguments)

    monkeypatch.setattr(type(cases), "expect", counted)
    case, _ = next(case for case in cases.cases() if case.repeats), HUB.settings
    kernel = next(kernel for kernel in HUB.registry.candidates(op).kernels if kernel.backend == "torch")
    found = Subject(HUB.function(op), kernel, cases, CPU).check(case)
    assert found.ok
    assert len(asked) == 2  # of the call, and of a later one with other values in the same memory


def test_empty_arguments_of_two_devices_are_copied_apart() -> None:
    """As of a handle, which has numbers in CPU memory; both have address 0."""
    made = copied({"handle": [torch.empty(0), torch.empty(0, device="meta"), torch.ones(2)]})["handle"]
    assert [part.device.type for part in made] == ["cpu", "meta", "cpu"]
    assert made[2].tolist() == [1.0, 1.0]
