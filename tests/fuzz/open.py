"""Defects of issue 14 that are known and not yet mended: the gate's run leaves their cases out."""

from __future__ import annotations

from fnmatch import fnmatch

# Globs of op, kernel and kind, and the item of the issue.
OPEN: tuple[tuple[str, str, str, str], ...] = (
    ("*", "*", "alias", "1.9: destinations that alias operands or themselves"),
    ("*", "*", "bits", "1.10: tensors with the negative bit"),
    ("*", "*", "context", "1.9c: autocast and global precision"),
    ("*", "*", "wrong", "2: bad input"),
    ("*", "*", "metadata", "1.9e: wrong metadata on a CPU"),
    ("*", "*", "plan_sizes", "1.9f: checks on every call"),
    ("*", "*", "step_sizes", "1.3: shapes in step.run"),
    ("*", "*", "plan", "1.10, through plans"),
    ("*", "*", "packed", "1.10 and 1.1, beside packed weights"),
    ("*attention", "*", "*", "1.1, 1.3, 1.5: strides of metadata, sinks of -inf, steps"),
    ("dequantize_fp8", "*", "*", "1.9"),
)


def is_open(op: str, kernel: str, kind: str) -> bool:
    """Whether a defect of these cases is known."""
    return any(fnmatch(op, a) and fnmatch(kernel, b) and fnmatch(kind, c) for a, b, c, _ in OPEN)
