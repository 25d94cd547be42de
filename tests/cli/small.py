"""Sizes of `demo` that take a tenth of the time, for tests of what it says and not of what it runs."""

from __future__ import annotations

from kernelhub.cli.showcase import Size

SMALL = Size(prefill_tokens=64, num_seqs=2, kv_tokens=64, num_experts=8, budget_s=0.02)
