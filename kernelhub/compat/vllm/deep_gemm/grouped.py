"""The alignment of a group's rows in DeepGEMM's contiguous grouped products: a setting of the whole process.

A CUDA graph that was captured with one value must not be replayed over rows padded to another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kernelhub.compat.vllm.deep_gemm.calls import deep_gemm


def get_mk_alignment_for_contiguous_layout() -> list[int]:
    """The numbers of rows and columns that a group is padded to; they are equal."""
    alignment = deep_gemm("get_mk_alignment_for_contiguous_layout")()
    return [alignment, alignment]


def get_theoretical_mk_alignment_for_contiguous_layout(
    expected_m: int | None = None, num_groups: int | None = None
) -> int:
    """The alignment for a total number of rows over `num_groups` groups, or for a number of rows per group without it.

    Raises:
        ValueError: `num_groups` is not positive.
    """
    if num_groups is not None and num_groups <= 0:
        raise ValueError(f"num_groups is {num_groups}; it must be positive")
    run = deep_gemm("get_theoretical_mk_alignment_for_contiguous_layout")
    if num_groups is None:
        return int(run(expected_m))
    try:
        return int(run(expected_m, num_groups))
    except TypeError:  # releases that take rows of one group
        return int(run(None if expected_m is None else -(-expected_m // num_groups)))


def set_mk_alignment_for_contiguous_layout(value: int) -> None:
    """Set the alignment for this process."""
    deep_gemm("set_mk_alignment_for_contiguous_layout")(value)


@contextlib.contextmanager
def mk_alignment_scope(value: int) -> Iterator[None]:
    """Set the alignment within a block."""
    before = get_mk_alignment_for_contiguous_layout()[0]
    set_mk_alignment_for_contiguous_layout(value)
    try:
        yield
    finally:
        set_mk_alignment_for_contiguous_layout(before)
