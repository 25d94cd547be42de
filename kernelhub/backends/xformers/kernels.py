"""Records of xformers' operators."""

from __future__ import annotations

from kernelhub.backends.xformers import standings
from kernelhub.backends.xformers.requirements import MACHINE
from kernelhub.dispatch.constraint import Between, MultipleOf, SameValue, anything, dtype_in
from kernelhub.dispatch.kernel import Backend, Band, Kernel

_HERE = "kernelhub.backends.xformers.attention"
_SOURCE = "https://github.com/facebookresearch/xformers"

BACKEND = Backend("xformers", "xformers' operators of memory-efficient attention", "xformers", _SOURCE)


_OPERANDS = (
    dtype_in("q_dtype", "bfloat16", "float16"),
    SameValue("q_dtype", "kv_dtype", why="both dtypes must be equal"),
    Between("head_dim_qk", 8, 256, why="the width of its widest tiles"),
    MultipleOf("head_dim_qk", 8, why="rows must be multiples of 16 bytes"),
    anything("q_len"),
)
# Its masks of ragged sequences support a window only together with a causal mask.
_FEATURES = frozenset({"ragged", "causal"})

KERNELS = (
    Kernel(
        op="attention",
        name="xformers.flash",
        target=f"{_HERE}:Flash",
        summary="FlashAttention-2 of the installed package, else the one that torch ships",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            *_OPERANDS,
            anything("num_q_heads", "num_kv_heads"),
            SameValue("head_dim_qk", "head_dim_vo", why="both widths must be equal"),
        ),
        features=_FEATURES | {"lse"},
        reads_lengths=True,
        source=_SOURCE,
        standings=standings.STANDINGS,
    ),
    Kernel(
        op="attention",
        name="xformers.cutlass",
        target=f"{_HERE}:Cutlass",
        summary="the CUTLASS kernel that torch took from xformers, for any width of values; copies keys of groups",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            *_OPERANDS,
            anything("num_q_heads", "num_kv_heads"),
            Between("head_dim_vo", 8, 256, why="wider values are undocumented"),
            MultipleOf("head_dim_vo", 8, why="rows must be multiples of 16 bytes"),
        ),
        features=_FEATURES,
        reads_lengths=True,
        source=_SOURCE,
        standings=standings.STANDINGS,
    ),
)
