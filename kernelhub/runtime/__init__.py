"""WHEN work is done: memory that outlives a call."""
