"""Records of the Triton kernels of linear attention."""

from __future__ import annotations

from kernelhub.backends.triton import standings
from kernelhub.backends.triton.requirements import MACHINE
from kernelhub.dispatch.constraint import Between, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.linear_attention.problem import FLOATS

_FEATURES = frozenset({"ragged", "state", "out_state", "state_indices"})
_LIMITS = (
    *MACHINE,
    dtype_in("dtype", *FLOATS),
    anything("num_heads", "value_dim", "q_len"),
)

KERNELS = (
    Kernel(
        op="linear_attention",
        name="triton.chunked",
        target="kernelhub.backends.triton.linear_attention.adapter:Chunked",
        summary="each program updates some columns of a head's state chunk by chunk, with matrix products",
        band=Band.PORTABLE,
        constraints=(
            *_LIMITS,
            Between("head_dim", 1, 128, why="a program holds a chunk's q and k and all rows of a state"),
        ),
        features=_FEATURES,
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source="Lightning Attention-2 (Qin et al. 2024)",
        standings=standings.STANDINGS,
    ),
    Kernel(
        op="linear_attention",
        name="triton.recurrent",
        target="kernelhub.backends.triton.linear_attention.adapter:Recurrent",
        summary="token by token with the state in registers, all in float32: for decode",
        band=Band.PORTABLE,
        constraints=(*_LIMITS, Between("head_dim", 1, 256, why="a program holds all rows of a state")),
        features=_FEATURES,
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=standings.STANDINGS,
    ),
)
