"""Defects of issue 14 that are known and not yet mended: the gate's run leaves their cases out."""

from __future__ import annotations

from fnmatch import fnmatch

# Globs of op, kernel and kind, and the item of the issue.
OPEN: tuple[tuple[str, str, str, str], ...] = (
    ("mla_attention", "*", "alias", "1.9: destinations that alias operands or themselves"),
    ("mla_attention", "*", "context", "1.9c: autocast"),
    ("mla_attention", "*", "step_sizes", "1.3: shapes in step.run"),
    ("write_mla_cache", "*", "wrong", "2: nested tensors"),
    ("concat_mla_k", "*", "alias", "1.9"),
    ("paged_mqa_logits", "*", "alias", "1.9"),
    ("paged_mqa_logits", "*", "context", "1.9c"),
    ("paged_mqa_logits", "*", "metadata", "1.9e: wrong metadata on a CPU"),
    ("topk_indices", "*", "alias", "1.9"),
    ("linear_attention", "*", "alias", "1.9"),
    ("linear_attention", "*", "metadata", "1.9e"),
)


def is_open(op: str, kernel: str, kind: str) -> bool:
    """Whether a defect of these cases is known."""
    return any(fnmatch(op, a) and fnmatch(kernel, b) and fnmatch(kind, c) for a, b, c, _ in OPEN)
