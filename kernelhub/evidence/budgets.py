"""Default time limits for the verification of a kernel, in seconds; cheap to import."""

from __future__ import annotations

FULL_BUDGET_S, QUICK_BUDGET_S = 120.0, 20.0
