"""What cuDNN's kernels need on the machine.

The frontend makes `sdpa` at run time, so its parameters cannot be read from source: versions are those whose results
were seen. The other functions that we call are checked against their source.
"""

from __future__ import annotations

from kernelhub.dispatch.constraint import Constraint, OnDevice, Package, Takes
from kernelhub.probes.signature import Call

INSTALL = 'pip install "kernelhub[cudnn]"'
LOWEST_BACKEND = 91900  # cuDNN 9.19, which torch 2.11 brings

_DTYPES = ("io_data_type", "intermediate_data_type", "compute_data_type")
CALLS: tuple[Call, ...] = (
    Call("cudnn:pygraph.__init__", keywords=(*_DTYPES, "handle")),
    Call("cudnn:pygraph.tensor", keywords=("name", "dim", "stride", "data_type", "uid")),
    Call("cudnn:pygraph.create_execution_plans", ("heuristics",)),
    Call("cudnn:pygraph.execute", ("tensor_dict", "workspace"), ("handle",)),
    Call("cudnn:pygraph.get_workspace_size"),
    Call("cudnn:create_handle"),
    Call("cudnn:set_stream", keywords=("handle", "stream")),
)

MACHINE: tuple[Constraint, ...] = (
    OnDevice("nvidia", only=((9, 0),)),
    Package("cudnn", ">=1.32,<1.33", distribution="nvidia-cudnn-frontend", install=INSTALL),
    Package("triton", ">=3.6,<3.10"),  # for `blank`
    *(Takes(call, INSTALL) for call in CALLS),
)
