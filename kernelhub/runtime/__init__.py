"""WHEN work is done: seal, warm calls, caches, ranks, health, scratch that outlives a call, operators of others."""
