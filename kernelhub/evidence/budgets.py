"""The most time that verifying a kernel takes where nothing is said, in seconds; light to import."""

from __future__ import annotations

FULL_BUDGET_S, QUICK_BUDGET_S = 120.0, 20.0
