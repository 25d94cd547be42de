"""What every kernel of `moe_dispatch` and of `moe_combine` must do. Subclass a contract and name the kernel."""

from __future__ import annotations

from kernelhub.testing import OpContract
from tests.conftest import DEVICE


class DispatchContract(OpContract):
    op = "moe_dispatch"
    device = DEVICE


class CombineContract(OpContract):
    op = "moe_combine"
    device = DEVICE
