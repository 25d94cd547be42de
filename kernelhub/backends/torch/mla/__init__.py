"""Records of the torch kernels of multi-head latent attention."""

from __future__ import annotations

from kernelhub.backends.torch import standings
from kernelhub.backends.torch.devices import ANYWHERE
from kernelhub.dispatch.constraint import anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.attention.problem import FLOATS, FP8
from kernelhub.ops.mla.concat.problem import DTYPES

KERNELS = (
    Kernel(
        op="mla_attention",
        name="torch.gathered",
        target="kernelhub.backends.torch.mla.latent:Gathered",
        summary="two products over gathered rows of the cache, all heads at once",
        band=Band.REFERENCE,
        constraints=(
            ANYWHERE,
            dtype_in("q_dtype", *FLOATS),
            dtype_in("kv_dtype", *FLOATS, FP8),
            anything("num_heads", "head_dim", "value_dim", "page_size", "q_len"),
        ),
        features=frozenset({"ragged", "causal", "sparse", "sinks", "lse", "kv_scale=value", "kv_scale=tensor"}),
        reads_lengths=True,
        standings=standings.EVERYWHERE,
    ),
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
        standings=standings.EVERYWHERE,
    ),
    Kernel(
        op="write_mla_cache",
        name="torch.scatter",
        target="kernelhub.backends.torch.mla.cache:Scatter",
        summary="one indexed store",
        band=Band.REFERENCE,
        constraints=(
            ANYWHERE,
            dtype_in("dtype", *FLOATS),
            dtype_in("kv_dtype", *FLOATS, FP8),
            anything("latent_dim", "rope_dim", "page_size"),
        ),
        features=frozenset({"kv_scale=value", "kv_scale=tensor"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=standings.EVERYWHERE,
    ),
)
