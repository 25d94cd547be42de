"""Warm-up: prepare and verify what serving needs before the first request, once per node."""
