"""Records of the torch kernels of linear attention."""

from __future__ import annotations

from kernelhub.backends.torch import standings
from kernelhub.backends.torch.devices import ANYWHERE
from kernelhub.dispatch.constraint import anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.linear_attention.problem import FLOATS

KERNELS = (
    Kernel(
        op="linear_attention",
        name="torch.chunked",
        target="kernelhub.backends.torch.linear_attention.chunked:Chunked",
        summary="chunks of 64 tokens by matrix products in float32; reads offsets and slots on the host",
        band=Band.REFERENCE,
        constraints=(
            ANYWHERE,
            dtype_in("dtype", *FLOATS),
            anything("num_heads", "head_dim", "value_dim", "q_len"),
        ),
        features=frozenset({"ragged", "state", "out_state", "state_indices"}),
        graph=GraphLevel.NONE,
        deterministic=True,
        reads_lengths=True,
        standings=standings.EVERYWHERE,
    ),
)
