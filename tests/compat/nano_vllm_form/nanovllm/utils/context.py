"""What the layers of a step share."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor


@dataclasses.dataclass
class Context:
    """A step of prompts (offsets, and pages if a prefix is cached) or of decode (lengths and pages)."""

    is_prefill: bool = False
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    slot_mapping: Tensor | None = None
    context_lens: Tensor | None = None
    block_tables: Tensor | None = None


_now = Context()


def get_context() -> Context:
    return _now


def set_context(*given: Any, **named: Any) -> None:
    global _now
    _now = Context(*given, **named)
