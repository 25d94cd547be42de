"""The flash_attn backend and its records.

No kernel supports an fp8 cache: the libraries multiply fp8 keys with fp8 queries only, and ours are not rounded to
that.
"""

from __future__ import annotations

from kernelhub.backends.flash_attn import standings
from kernelhub.backends.flash_attn.requirements import (
    FA2,
    FA2_CACHE,
    FA2_INSTALL,
    FA2_MACHINE,
    FA2_VARLEN,
    FA3_MACHINE,
    FA4,
    FA4_INSTALL,
    FA4_MACHINE,
    FA4_VARLEN,
    VLLM_FA2_MACHINE,
    VLLM_FA3_MACHINE,
    Where,
    fa3_part,
)
from kernelhub.dispatch.constraint import Between, MultipleOf, OneOf, Rule, SameValue, Takes, anything, dtype_in
from kernelhub.dispatch.kernel import Backend, Band, GraphLevel, Kernel, KnownBad, Watch
from kernelhub.ops.attention.problem import ANY, MANY, AttentionProblem

_HERE = "kernelhub.backends.flash_attn"

BACKEND = Backend(
    "flash_attn",
    "FlashAttention 2, 3 and 4, as installed",
    package="flash_attn",
    homepage="https://github.com/Dao-AILab/flash-attention",
    watches=(
        Watch("cutlass.base_dsl.compiler", f"{_HERE}.watch:watch"),
        Watch("cutlass.base_dsl.dsl", f"{_HERE}.watch:watch_functions"),
        Watch("cutlass.cute.runtime", f"{_HERE}.watch:watch_loads"),
    ),
)

_FA2_SOURCE = "FlashAttention-2 (Dao 2023)"
_FA3_SOURCE = "FlashAttention-3 (Shah et al. 2024)"
_FA4_SOURCE = "FlashAttention-4, flash_attn.cute"

_OPERANDS = (
    dtype_in("q_dtype", "float16", "bfloat16"),
    SameValue("q_dtype", "kv_dtype", why="fp8 keys require fp8 queries"),
    Between("head_dim_qk", 8, 256, why="the width of its widest tiles"),
    MultipleOf("head_dim_qk", 8, why="rows must be multiples of 16 bytes"),
    anything("num_q_heads", "num_kv_heads"),
)
_ONE_WIDTH = SameValue("head_dim_qk", "head_dim_vo", why="both widths must be equal")
_ANY_LENGTH = anything("q_len")
_ANY_PAGE = Between("page_size", 1, 1 << 16)
_FEATURES = frozenset({"ragged", "causal", "window_left", "window_right", "sinks", "lse"})
# Sinks would be worked in after the launch: gpt-oss's prefill of 2 x 4096 then takes 0.372 ms on an H200, Triton's
# 0.126, and paged decode of 32 x 8192 0.048 against 0.012.
_FA3_FEATURES = (_FEATURES - {"sinks"}) | {"softcap"}
_PAGES = frozenset({"kv_layout=HND"})


def _unequal(problem: AttentionProblem) -> bool:
    return problem.head_dim_qk != problem.head_dim_vo


def _fa3_widths(problem: AttentionProblem) -> str | None:
    """Upstream's check, without narrow q and k with wide v, which no model uses."""
    qk, vo = problem.head_dim_qk, problem.head_dim_vo
    if not _unequal(problem) or (128 < qk <= 192 and 96 < vo <= 128 and vo % 8 == 0):
        return None
    return f"q is {qk} wide and v {vo}; where they differ, q may be 136 to 192 wide and v 104 to 128"


def _fa4_widths(problem: AttentionProblem) -> str | None:
    """The widths that the library lists for sm_100; sm_90 supports them too."""
    qk, vo = problem.head_dim_qk, problem.head_dim_vo
    if (qk == vo and qk <= 128) or (qk, vo) in ((192, 128), (256, 256)):
        return None
    return f"heads are {qk} and {vo} wide, not alike up to 128, (192, 128) or (256, 256)"


def _vllm_fa3_widths(problem: AttentionProblem) -> str | None:
    """Whole tiles of those that vLLM compiles for queries and keys of many kinds."""
    qk, vo = problem.head_dim_qk, problem.head_dim_vo
    if (qk == vo and qk in _VLLM_WIDTHS) or (qk, vo) == (192, 128):
        return None
    return f"heads are {qk} and {vo} wide, not alike and one of {_VLLM_WIDTHS}, or 192 and 128"


_VLLM_WIDTHS = (64, 96, 128, 192, 256)
_WHOLE_TILES = OneOf("head_dim_qk", _VLLM_WIDTHS, why="builds may leave out other widths, which fill its tiles in part")
_WIDTHS = ("head_dim_qk", "head_dim_vo")
_LONG = OneOf("q_len", (MANY, ANY), why="it does not split keys here; few queries need that")

KERNELS = (
    Kernel(
        op="attention",
        name="flash_attn.fa3",
        target=f"{_HERE}.fa3:Dense",
        summary="FlashAttention-3, which selects the number of splits",
        band=Band.SPECIALISED,
        constraints=(
            *FA3_MACHINE,
            *_OPERANDS,
            _ANY_LENGTH,
            Rule(_WIDTHS, _fa3_widths),
            # Without these tiles host and kernel disagree about the keys of a tile.
            Where(_WIDTHS, _unequal, fa3_part("HDIMDIFF192")),
        ),
        features=_FA3_FEATURES,
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_FA3_SOURCE,
        standings=standings.FA3,
    ),
    Kernel(
        op="paged_attention",
        name="flash_attn.fa3",
        target=f"{_HERE}.fa3:Paged",
        summary="FlashAttention-3 over pages: decode, prefill and mixed; it selects the number of splits",
        band=Band.SPECIALISED,
        constraints=(
            *FA3_MACHINE,
            fa3_part("PAGEDKV"),
            fa3_part("VARLEN"),
            *_OPERANDS,
            _ANY_LENGTH,
            _ONE_WIDTH,
            _ANY_PAGE,
        ),
        features=_FA3_FEATURES | _PAGES,
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_FA3_SOURCE,
        standings=standings.FA3,
    ),
    Kernel(
        op="attention",
        name="flash_attn.fa2",
        target=f"{_HERE}.fa2:Dense",
        summary="FlashAttention-2",
        band=Band.TUNED,
        constraints=(
            *FA2_MACHINE,
            Takes(FA2, FA2_INSTALL),
            Takes(FA2_VARLEN, FA2_INSTALL),
            *_OPERANDS,
            _ANY_LENGTH,
            _ONE_WIDTH,
        ),
        features=_FEATURES | {"softcap"},
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_FA2_SOURCE,
        standings=standings.FA2,
    ),
    Kernel(
        op="paged_attention",
        name="flash_attn.fa2",
        target=f"{_HERE}.fa2:Paged",
        summary="FlashAttention-2 over pages of 256 tokens or a multiple, keys not split",
        band=Band.TUNED,
        constraints=(
            *FA2_MACHINE,
            Takes(FA2_CACHE, FA2_INSTALL),
            Takes(FA2_VARLEN, FA2_INSTALL),
            *_OPERANDS,
            _ANY_LENGTH,
            _ONE_WIDTH,
            MultipleOf("page_size", 256, why="its tiles of keys do not cross pages"),
        ),
        features=_FEATURES | _PAGES | {"softcap"},
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_FA2_SOURCE,
        standings=standings.FA2,
    ),
    Kernel(
        op="attention",
        name="flash_attn.vllm_fa3",
        target=f"{_HERE}.vllm_builds:Fa3Dense",
        summary="FlashAttention-3 as vLLM builds it, which selects the number of splits; batches run as ragged ones",
        band=Band.SPECIALISED,
        constraints=(*VLLM_FA3_MACHINE, *_OPERANDS, _ANY_LENGTH, Rule(_WIDTHS, _vllm_fa3_widths)),
        features=_FA3_FEATURES,
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_FA3_SOURCE,
        standings=standings.VLLM_FA3,
    ),
    Kernel(
        op="paged_attention",
        name="flash_attn.vllm_fa3",
        target=f"{_HERE}.vllm_builds:Fa3Paged",
        summary="FlashAttention-3 as vLLM builds it, over pages: decode, prefill and mixed",
        band=Band.SPECIALISED,
        constraints=(*VLLM_FA3_MACHINE, *_OPERANDS, _ANY_LENGTH, _WHOLE_TILES, _ONE_WIDTH, _ANY_PAGE),
        features=_FA3_FEATURES | _PAGES,
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_FA3_SOURCE,
        standings=standings.VLLM_FA3,
    ),
    Kernel(
        op="attention",
        name="flash_attn.vllm_fa2",
        target=f"{_HERE}.vllm_builds:Fa2Dense",
        summary="FlashAttention-2 as vLLM builds it; batches run as ragged ones",
        band=Band.TUNED,
        constraints=(*VLLM_FA2_MACHINE, *_OPERANDS, _ANY_LENGTH, _WHOLE_TILES, _ONE_WIDTH),
        features=_FEATURES | {"softcap"},
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_FA2_SOURCE,
        standings=standings.VLLM_FA2,
    ),
    Kernel(
        op="paged_attention",
        name="flash_attn.vllm_fa2",
        target=f"{_HERE}.vllm_builds:Fa2Paged",
        summary="FlashAttention-2 as vLLM builds it, over pages of 16 tokens or a multiple, keys not split",
        band=Band.TUNED,
        constraints=(
            *VLLM_FA2_MACHINE,
            *_OPERANDS,
            _ANY_LENGTH,
            _WHOLE_TILES,
            _ONE_WIDTH,
            MultipleOf("page_size", 16, why="it reads pages in rows of 16 tokens"),
        ),
        features=_FEATURES | _PAGES | {"softcap"},
        graph=GraphLevel.FULL,
        deterministic=True,
        source=_FA2_SOURCE,
        standings=standings.VLLM_FA2,
    ),
    Kernel(
        op="attention",
        name="flash_attn.fa4",
        target=f"{_HERE}.fa4:Dense",
        summary="FlashAttention-4, compiled at first use",
        band=Band.TUNED,
        constraints=(
            *FA4_MACHINE,
            Takes(FA4, FA4_INSTALL),
            Takes(FA4_VARLEN, FA4_INSTALL),
            *_OPERANDS,
            _LONG,
            Rule(_WIDTHS, _fa4_widths),
        ),
        features=_FEATURES,
        source=_FA4_SOURCE,
        standings=standings.FA4,
    ),
    Kernel(
        op="paged_attention",
        name="flash_attn.fa4",
        target=f"{_HERE}.fa4:Paged",
        summary="FlashAttention-4 over pages, prefill and mixed, compiled at first use",
        band=Band.TUNED,
        constraints=(
            *FA4_MACHINE,
            Takes(FA4_VARLEN, FA4_INSTALL),
            *_OPERANDS,
            _LONG,
            _ONE_WIDTH,
            Rule(_WIDTHS, _fa4_widths),
            _ANY_PAGE,
        ),
        features=_FEATURES | _PAGES,
        source=_FA4_SOURCE,
        standings=standings.FA4,
    ),
)

KNOWN_BAD = (
    # Pages of whole tiles are loaded with all their rows; a tile has 64 keys at least.
    KnownBad(
        "flash_attn.fa4",
        "paged_attention",
        (Between("page_size", 64, 1 << 16),),
        "a NaN in the unused rows of a sequence's last page makes its result NaN",
        "https://github.com/Dao-AILab/flash-attention/issues/2374",
    ),
)
