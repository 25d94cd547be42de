"""Records of the Triton kernels of multi-head latent attention."""

from __future__ import annotations

from kernelhub.backends.triton.requirements import MACHINE
from kernelhub.dispatch.constraint import Between, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.mla.problem import DTYPES

KERNELS = (
    Kernel(
        op="concat_mla_k",
        name="triton.concat",
        target="kernelhub.backends.triton.mla.concat_adapter:Concat",
        summary="both parts in one launch",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            dtype_in("dtype", *DTYPES),
            Between("nope_dim", 1, 2048, why="a program holds a whole head"),
            Between("rope_dim", 1, 2048, why="a program holds a whole head"),
            anything("num_heads"),
        ),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
    ),
)
