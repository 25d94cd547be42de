"""Collectives: ops over the ranks of a process group."""
