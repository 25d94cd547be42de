"""What every kernel of `all_reduce` must do. Subclass `AllReduceContract` and name the kernel."""

from __future__ import annotations

from kernelhub.testing import OpContract
from tests.conftest import DEVICE


class AllReduceContract(OpContract):
    op = "all_reduce"
    device = DEVICE
