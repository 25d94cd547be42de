"""Records of the torch kernels of merging attention states."""

from __future__ import annotations

from kernelhub.backends.torch import standings
from kernelhub.backends.torch.devices import ANYWHERE
from kernelhub.dispatch.constraint import anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.merge.problem import FLOATS

KERNELS = (
    Kernel(
        op="merge_attention_states",
        name="torch.merge",
        target="kernelhub.backends.torch.merge.merge:Merge",
        summary="part by part in float32",
        band=Band.REFERENCE,
        constraints=(ANYWHERE, dtype_in("dtype", *FLOATS), anything("num_heads", "head_dim", "parts")),
        features=frozenset({"batched", "lse", "out_scale=value", "out_scale=tensor"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=standings.EVERYWHERE,
    ),
)
