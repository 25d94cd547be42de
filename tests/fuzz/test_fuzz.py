"""A short run of the fuzzer with a fixed seed, for each op: no wrong number, no foreign byte, no raw error.

`make fuzz` runs it long, scripts/verify_on_gpu.sh on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from kernelhub.dispatch.hub import HUB
from tests.fuzz.case import CaseId, run_case
from tests.fuzz.kernels import kernels_here, ops
from tests.fuzz.kinds import NAMES
from tests.fuzz.open import is_open

ROUNDS = 1  # through all kinds; kernels take turns


def cases_of(op: str) -> list[CaseId]:
    kernels = kernels_here(op, "cpu")
    numbers = range(ROUNDS * len(NAMES))
    cases = [CaseId(op, kernels[number % len(kernels)], NAMES[number % len(NAMES)], number, 0) for number in numbers]
    return [case for case in cases if not is_open(op, case.kernel, case.kind)]


@pytest.mark.parametrize("op", ops())
def test_varied_calls_are_right_or_refused_by_name(op: str) -> None:
    failed = []
    for case in cases_of(op):
        outcome = run_case(case, torch.device("cpu")).outcome
        if outcome.kind == "failed":
            failed.append(f"{outcome.text}\n    {case.command}")
    HUB.restore()
    assert not failed, "\n".join(failed)
