"""What is chosen is what the golden tables say."""

from __future__ import annotations

import pytest

from kernelhub.dispatch.hub import HUB
from kernelhub.probes.device import SIMULATED
from tests.golden.tables import DEVICES, HERE, PHASES, TOOLCHAINS, reasons, table, toolchains, trusted


def test_every_simulated_device_is_a_column() -> None:
    assert set(SIMULATED) - set(DEVICES) == set()


@pytest.mark.parametrize("op", PHASES)
def test_selection_is_what_the_golden_table_says(op: str) -> None:
    written = (HERE / f"{op}.txt").read_text()
    assert table(op) == written, "if this is meant: python -m tests.golden.tables --write, and review the diff"


@pytest.mark.parametrize("op", PHASES)
def test_reasons_are_what_the_golden_table_says(op: str) -> None:
    written = (HERE / f"{op}.reasons.txt").read_text()
    assert reasons(op) == written, "if this is meant: python -m tests.golden.tables --write, and review the diff"


def test_what_a_library_can_without_its_toolchain_is_what_the_golden_table_says() -> None:
    written = (HERE / "toolchains.txt").read_text()
    assert toolchains() == written, "if this is meant: python -m tests.golden.tables --write, and review the diff"


def test_what_each_family_gets_by_what_is_trusted_is_what_the_golden_table_says() -> None:
    written = (HERE / "trust.txt").read_text()
    assert trusted() == written, "if this is meant: python -m tests.golden.tables --write, and review the diff"


@pytest.mark.parametrize(("library", "ops"), [(library, ops) for library, _, _, ops in TOOLCHAINS])
def test_every_op_of_which_a_library_has_kernels_is_in_its_table(library: str, ops: tuple[str, ...]) -> None:
    _ = HUB.settings
    assert set(ops) == {kernel.op for kernel in HUB.registry.backends[library].kernels}
