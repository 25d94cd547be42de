"""A library that is there and cannot be loaded gives way to the next kernel, with what it said; no call raises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.backends.import_faults import BACKENDS, FAULTS, label, records

ROOT = Path(__file__).parents[2]
# Backends whose adapters import no library beside torch and Triton, but for cuda: its compiler is a probed fact. The
# records of `unsupported` have no adapter.
OURS = {"comm_pairs", "cpp", "cuda", "gluon", "moe_pairs", "torch", "triton", "unsupported"}
pytestmark = pytest.mark.xdist_group("import_faults")  # one process answers for all


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What became of a call of each kernel with each fault of the tests of this run, in a process of its own."""
    asked: dict[str, list[str]] = {}
    for item in request.session.items:
        if getattr(item, "originalname", "") == "test_the_next_kernel_runs_and_the_reason_is_reported":
            params = item.callspec.params  # type: ignore[attr-defined]
            asked.setdefault(params["fault"], []).append(params["kernel"])
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET",)}
    command = [sys.executable, "-m", "tests.backends.import_faults", json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kernel", [label(kernel) for kernel in records()])
@pytest.mark.fault("libraries_that_fail")
def test_the_next_kernel_runs_and_the_reason_is_reported(
    told: dict[str, dict[str, Any]], kernel: str, fault: str
) -> None:
    became = told[fault][kernel]
    assert "raised" not in became, became
    assert became["selected"].startswith("torch.")
    assert became["code"] == FAULTS[fault][2]
    assert FAULTS[fault][1] in became["reason"]
    assert "raised" in became["reason"]


def test_every_external_backend_is_among_them() -> None:
    folder = ROOT / "kernelhub" / "backends"
    others = {path.parent.name for path in folder.glob("*/kernels.py")} - OURS
    assert others == set(BACKENDS), "name it in tests/backends/import_faults.py, with the packages that it imports"
