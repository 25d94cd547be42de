"""Shared by all tests: one thread per worker, Triton's interpreter where there is no GPU, a clean hub.

TRITON_INTERPRET is read when Triton is imported, so it is set here, before anything else is.
"""

from __future__ import annotations

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
for name in [name for name in os.environ if name.startswith(("KERNELHUB_", "VLLM_", "FORCE_NUM_KV_SPLITS"))]:
    del os.environ[name]

torch.set_num_threads(1)

# Hooks that count the faults and attacks that tests make, and print the counts at the end.
pytest_plugins = ("tests.faults.counting", "tests.fuzz.counting")

DEVICE = "cuda" if HAS_GPU else "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.faults.counting import note_faults

    note_faults(items)
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device here: this case runs on a GPU only"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A contract's cases are those that the kernel's record takes."""
    if "case" in metafunc.fixturenames and hasattr(metafunc.cls, "accepted_cases"):
        metafunc.parametrize("case", metafunc.cls.accepted_cases(), ids=str)


@pytest.fixture
def no_engine_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables of libraries that the machine sets, or that a watched library left in this process."""
    for name in [name for name in os.environ if name.startswith(("DG_", "FLASHINFER_"))]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def clean_hub(request):
    """What collecting or a test configures, registers or enters reaches no other test; which kernels ran is noted.

    The note is a property ``ran`` of the test in a JUnit file, which `scripts/record_verification.py` counts.
    """
    from kernelhub.dispatch.hub import HUB

    HUB.restore()
    yield
    ran = {f"{row.op} {row.kernel}" for row in HUB.report().rows if row.calls}
    request.node.user_properties += [("ran", name) for name in sorted(ran)]
    assert HUB.contexts.get() == (), "a test left a context open"
    HUB.restore()
