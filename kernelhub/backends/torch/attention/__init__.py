"""Records of the torch kernels of attention."""

from __future__ import annotations

from kernelhub.backends.torch import standings
from kernelhub.backends.torch.devices import ANYWHERE, CPU
from kernelhub.dispatch.constraint import Between, MultipleOf, OnDevice, SameValue, TorchBuilt, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel, KnownBad
from kernelhub.ops.attention.problem import FLOATS, QUANTISED

_ANY_KV = (dtype_in("q_dtype", *FLOATS), dtype_in("kv_dtype", *FLOATS, *QUANTISED))
_HEADS = anything("num_q_heads", "num_kv_heads", "q_len")
_ANY_WIDTH = anything("head_dim_qk", "head_dim_vo")
_ONE_WIDTH = SameValue("head_dim_qk", "head_dim_vo", why="both widths must be equal")

_MASKS = frozenset({"ragged", "causal", "window_left", "window_right"})
_SUMS = frozenset({"sinks", "lse"})
_KV_SCALES = frozenset({"kv_scale=value", "kv_scale=tensor", "kv_scale=head"})
_PAGES = frozenset({"kv_layout=HND"})


KERNELS = (
    Kernel(
        op="attention",
        name="torch.packed",
        target="kernelhub.backends.torch.attention.packed:Packed",
        summary="CPU flash attention with the query heads of a KV head packed as rows",
        band=Band.TUNED,
        constraints=(CPU, *_ANY_KV, _HEADS, _ONE_WIDTH),
        features=_MASKS | _SUMS | _KV_SCALES,
        deterministic=True,
        reads_lengths=True,
        source="ATen _scaled_dot_product_flash_attention_for_cpu",
        standings=standings.ON_CPU,
    ),
    Kernel(
        op="attention",
        name="torch.sdpa",
        target="kernelhub.backends.torch.attention.sdpa:Sdpa",
        summary="scaled_dot_product_attention, with the kernel that torch selects",
        band=Band.PORTABLE,
        constraints=(
            ANYWHERE,
            dtype_in("q_dtype", *FLOATS),
            SameValue("q_dtype", "kv_dtype", why="both dtypes must be equal"),
            _HEADS,
            _ANY_WIDTH,
        ),
        features=frozenset({"causal"}),
        graph=GraphLevel.FULL,
        source="torch.nn.functional.scaled_dot_product_attention",
        standings=standings.EVERYWHERE,
    ),
    Kernel(
        op="attention",
        name="torch.varlen_attn",
        target="kernelhub.backends.torch.attention.varlen:VarlenAttn",
        summary="FlashAttention-2 that torch ships, of ragged sequences; batches run as ragged ones",
        band=Band.PORTABLE,
        constraints=(
            OnDevice("nvidia", only=((8, 0), (8, 6), (8, 9), (9, 0))),
            TorchBuilt("12.6", at_least="2.11"),
            dtype_in("q_dtype", "bfloat16", "float16"),
            SameValue("q_dtype", "kv_dtype", why="both dtypes must be equal"),
            _HEADS,
            Between("head_dim_qk", 8, 256, why="the width of its widest tiles"),
            MultipleOf("head_dim_qk", 8, why="rows must be multiples of 16 bytes"),
            _ONE_WIDTH,
        ),
        features=_MASKS | {"lse"},
        graph=GraphLevel.FULL,
        deterministic=True,
        source="torch.nn.attention.varlen",
        standings=standings.FLASH_ATTENTION_2,
    ),
    Kernel(
        op="attention",
        name="torch.blocked",
        target="kernelhub.backends.torch.attention.blocked:Blocked",
        summary="all features in float32, one block of queries at a time",
        band=Band.REFERENCE,
        constraints=(ANYWHERE, *_ANY_KV, _HEADS, _ANY_WIDTH),
        features=_MASKS | _SUMS | _KV_SCALES | {"softcap"},
        reads_lengths=True,
        standings=standings.EVERYWHERE,
    ),
    Kernel(
        op="paged_attention",
        name="torch.packed",
        target="kernelhub.backends.torch.attention.packed:PackedPaged",
        summary="CPU flash attention over gathered pages, query heads of a KV head packed as rows",
        band=Band.TUNED,
        constraints=(CPU, *_ANY_KV, _HEADS, _ONE_WIDTH, anything("page_size")),
        features=_MASKS | _SUMS | _KV_SCALES | _PAGES,
        deterministic=True,
        reads_lengths=True,
        source="ATen _scaled_dot_product_flash_attention_for_cpu",
        standings=standings.ON_CPU,
    ),
    Kernel(
        op="paged_attention",
        name="torch.blocked",
        target="kernelhub.backends.torch.attention.blocked:BlockedPaged",
        summary="all features in float32 over gathered pages, one block of queries at a time",
        band=Band.REFERENCE,
        constraints=(ANYWHERE, *_ANY_KV, _HEADS, _ANY_WIDTH, anything("page_size")),
        features=_MASKS | _SUMS | _KV_SCALES | _PAGES | {"softcap"},
        reads_lengths=True,
        standings=standings.EVERYWHERE,
    ),
)

KNOWN_BAD = (
    # Seen on a B200 with torch 2.11 and 2.13, for 4 heads and fewer, not for 8; of a B300 nothing is known.
    KnownBad(
        "torch.sdpa",
        "attention",
        (
            OnDevice("nvidia", only=((10, 0), (10, 3))),
            dtype_in("q_dtype", "float16", "bfloat16"),
            Between("num_kv_heads", 1, 7),
        ),
        "cuDNN, which torch uses on Blackwell, gave wrong results for fewer than 8 KV heads",
        "https://github.com/pytorch/pytorch/issues/193893",
    ),
)
