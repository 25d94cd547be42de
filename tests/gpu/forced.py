"""Contracts of kernels that are known to be bad, forced by ``unsafe=True`` on operands that they are right with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import kernelhub
from kernelhub.dispatch.selection import Decision
from kernelhub.evidence.checks import Subject
from tests.contract.attention import split
from tests.contract.varied_attention import VariedContract


def decision_of(kernel: str, arguments: dict[str, Any]) -> Decision:
    """What is said of a kernel of an op of attention, though a test may force it."""
    args, kwargs = split(arguments)
    op = kernelhub.attention if "k" in arguments else kernelhub.paged_attention
    with kernelhub.use(unsafe=False):
        selection = op.explain(*args, backend=kernel, **kwargs)
    return next(item for item in selection.decisions if item.kernel == kernel)


def takes(kernel: str, arguments: dict[str, Any]) -> bool:
    """Whether nothing but known defects speaks against it."""
    return {rejection.code for rejection in decision_of(kernel, arguments).rejections} <= {"known_bad"}


@contextlib.contextmanager
def forcing(kernel: str, arguments: dict[str, Any]) -> Iterator[None]:
    """A block in which limits do not hold; the test is skipped where the kernel cannot run."""
    if not takes(kernel, arguments):
        reasons = "; ".join(item.reason for item in decision_of(kernel, arguments).rejections)
        pytest.skip(f"{kernel} cannot run here: {reasons}")
    with kernelhub.use(unsafe=True):
        yield


class Forced(VariedContract):
    """Mixed in before a contract: its cases are those against which known defects alone speak."""

    @classmethod
    def _subject(cls) -> Subject:
        return replace(super()._subject(), overruled=frozenset({"known_bad"}))

    @pytest.fixture(autouse=True)
    def forced(self) -> Iterator[None]:
        with forcing(self.kernel, self.inputs(**self.plain)):
            yield
