"""What ``unsafe`` does not lift: a kernel that cannot be loaded."""

from __future__ import annotations

import pytest

import kernelhub
from kernelhub.errors import NoKernel
from tests.dispatch.backends import qkv, record, register


def test_a_forced_kernel_that_cannot_be_loaded_is_an_error_with_the_reason() -> None:
    register("gone", record("gone.k", "tests.dispatch.nowhere:Adapter"))
    with (
        kernelhub.use(unsafe=True),
        pytest.raises(NoKernel, match="load_failed: importing"),
    ):
        kernelhub.attention(*qkv(), backend="gone")
