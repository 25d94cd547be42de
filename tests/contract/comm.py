"""What every kernel of a collective must do. Subclass the contract of the op and name the kernel."""

from __future__ import annotations

from kernelhub.testing import OpContract
from tests.conftest import DEVICE


class AllReduceContract(OpContract):
    op = "all_reduce"
    device = DEVICE


class AllReduceRmsNormContract(OpContract):
    op = "all_reduce_rms_norm"
    device = DEVICE


class ReduceScatterContract(OpContract):
    op = "reduce_scatter"
    device = DEVICE


class AllGatherContract(OpContract):
    op = "all_gather"
    device = DEVICE
