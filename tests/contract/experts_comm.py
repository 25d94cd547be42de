"""What every kernel of the ops of expert parallelism must do. Subclass a contract and name the kernel."""

from __future__ import annotations

from kernelhub.testing import OpContract
from tests.conftest import DEVICE


class DispatchContract(OpContract):
    op = "moe_dispatch"
    device = DEVICE


class CombineContract(OpContract):
    op = "moe_combine"
    device = DEVICE


class ParallelContract(OpContract):
    op = "expert_parallel_moe"
    device = DEVICE
