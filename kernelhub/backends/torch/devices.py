"""Where torch kernels run."""

from __future__ import annotations

from kernelhub.dispatch.constraint import AnyOf, OnDevice

CPU = OnDevice("cpu")
ANYWHERE = AnyOf((CPU, OnDevice("nvidia"), OnDevice("amd")))
