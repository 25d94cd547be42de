"""Records of the Triton kernels of multi-head latent attention."""

from __future__ import annotations

from kernelhub.backends.triton import standings
from kernelhub.backends.triton.requirements import MACHINE
from kernelhub.dispatch.constraint import Between, OneOf, Rule, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.attention.problem import ANY, FEW, FLOATS, FP8, MANY, ONE
from kernelhub.ops.mla.attention.problem import MlaProblem
from kernelhub.ops.mla.concat.problem import DTYPES


def _rotary_part_too_wide(problem: MlaProblem) -> str | None:
    """Queries of both parts are in shared memory beside the keys of a tile."""
    rope_dim = problem.head_dim - problem.value_dim
    return (
        f"the rotary part is {rope_dim} wide; a program holds up to 128 beside the latent" if rope_dim > 128 else None
    )


_ATTENTION = (
    *MACHINE,
    dtype_in("q_dtype", *FLOATS),
    dtype_in("kv_dtype", *FLOATS, FP8),
    Between("value_dim", 1, 512, why="a program accumulates a whole latent"),
    Rule(("head_dim", "value_dim"), _rotary_part_too_wide),
    Between("page_size", 1, 1 << 16),
    OneOf("q_len", (ONE, FEW, MANY, ANY)),
    anything("num_heads"),
)
_FEATURES = frozenset({"ragged", "causal", "sparse", "sinks", "lse", "kv_scale=value", "kv_scale=tensor"})
_SOURCE = "DeepSeek-V2 (2024), section 2.1; Flash-Decoding (Dao et al. 2023)"

KERNELS = (
    Kernel(
        op="mla_attention",
        name="triton.split_kv",
        target="kernelhub.backends.triton.mla.latent_adapter:SplitKV",
        summary="tiles of heads and tokens, keys split among programs according to the device, parts merged",
        band=Band.PORTABLE,
        constraints=_ATTENTION,
        features=_FEATURES,
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_SOURCE,
        standings=standings.STANDINGS,
    ),
    Kernel(
        op="mla_attention",
        name="triton.split_kv_fixed",
        target="kernelhub.backends.triton.mla.latent_adapter:SplitKVFixed",
        summary="tiles of heads and tokens, keys split by their number only, independent of the batch",
        band=Band.PORTABLE,
        constraints=_ATTENTION,
        features=_FEATURES,
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source=_SOURCE,
        standings=standings.STANDINGS,
    ),
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
        standings=standings.STANDINGS,
    ),
    Kernel(
        op="write_mla_cache",
        name="triton.write",
        target="kernelhub.backends.triton.mla.cache_adapter:Write",
        summary="both parts in one launch",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            dtype_in("dtype", *FLOATS),
            dtype_in("kv_dtype", *FLOATS, FP8),
            Between("latent_dim", 1, 2048, why="a program holds whole tokens"),
            Between("rope_dim", 0, 2048, why="a program holds whole tokens"),
            anything("page_size"),
        ),
        features=frozenset({"kv_scale=value", "kv_scale=tensor"}),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=standings.STANDINGS,
    ),
)
