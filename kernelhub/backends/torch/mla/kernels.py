"""Records of the torch kernels of multi-head latent attention."""

from __future__ import annotations

from kernelhub.backends.torch.devices import ANYWHERE
from kernelhub.dispatch.constraint import anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.mla.problem import DTYPES

KERNELS = (
    Kernel(
        op="concat_mla_k",
        name="torch.concat",
        target="kernelhub.backends.torch.mla.concat:Concat",
        summary="two copies",
        band=Band.REFERENCE,
        constraints=(
            ANYWHERE,
            dtype_in("dtype", *DTYPES),
            anything("num_heads", "nope_dim", "rope_dim"),
        ),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
    ),
)
