"""How many rows of a group DeepGEMM pads to in grouped products over contiguous rows: a setting of the whole process.

What is captured in a CUDA graph under one value may not be replayed over rows padded to another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kernelhub.compat.vllm.deep_gemm.calls import deep_gemm


def get_mk_alignment_for_contiguous_layout() -> list[int]:
    """Rows and columns that a group is padded to, which are the same number."""
    alignment = deep_gemm("get_mk_alignment_for_contiguous_layout")()
    return [alignment, alignment]


def get_theoretical_mk_alignment_for_contiguous_layout(
    expected_m: int | None = None, num_groups: int | None = None
) -> int:
    """The alignment that suits so many rows in all over so many groups, or so many rows a group without `num_groups`.

    Raises:
        ValueError: there are no groups.
    """
    if num_groups is not None and num_groups <= 0:
        raise ValueError(f"num_groups is {num_groups}; it has to be positive")
    run = deep_gemm("get_theoretical_mk_alignment_for_contiguous_layout")
    if num_groups is None:
        return int(run(expected_m))
    try:
        return int(run(expected_m, num_groups))
    except TypeError:  # releases that take rows of one group
        return int(run(None if expected_m is None else -(-expected_m // num_groups)))


def set_mk_alignment_for_contiguous_layout(value: int) -> None:
    """Set it, for this process."""
    deep_gemm("set_mk_alignment_for_contiguous_layout")(value)


@contextlib.contextmanager
def mk_alignment_scope(value: int) -> Iterator[None]:
    """Set it for a block."""
    before = get_mk_alignment_for_contiguous_layout()[0]
    set_mk_alignment_for_contiguous_layout(value)
    try:
        yield
    finally:
        set_mk_alignment_for_contiguous_layout(before)
