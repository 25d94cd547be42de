"""Making a process ready before its first request: what serving needs, made ready and verified, once for each node."""
