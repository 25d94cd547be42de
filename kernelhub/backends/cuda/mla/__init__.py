"""Records of the CUDA kernels of latent attention."""

from __future__ import annotations

from kernelhub.backends.cuda.requirements import MACHINE
from kernelhub.backends.cuda.standings import standings
from kernelhub.dispatch.constraint import anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.mla.concat.problem import DTYPES

KERNELS = (
    Kernel(
        op="concat_mla_k",
        name="cuda.concat",
        target="kernelhub.backends.cuda.mla.concat:Concat",
        summary="both parts in one launch, vectors of 16 bytes",
        band=Band.PORTABLE,
        constraints=(*MACHINE, dtype_in("dtype", *DTYPES), anything("num_heads", "nope_dim", "rope_dim")),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=standings("concat_mla_k", 28),
    ),
)
