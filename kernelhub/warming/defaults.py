"""Default arguments of a warm-up; cheap to import, so that help can print them."""

from __future__ import annotations

from kernelhub.ops.models.problems import GRAPH_SIZES

TOKEN_COUNTS = (*GRAPH_SIZES, 1024, 2048, 4096, 8192)
# Kernels of CPUs are compiled once, whatever the number of tokens, and a call with 8192 takes minutes.
TOKEN_COUNTS_OF_CPU = (1, 4, 16, 64, 256)
CONTEXT_LEN, MAX_CONTEXT_LEN = 256, 8192
VERIFY_BUDGET_S = 600.0
