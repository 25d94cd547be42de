"""Process-wide state: sealing, warm calls, caches, ranks, health, and scratch memory that outlives a call."""
