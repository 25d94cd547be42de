"""Collectives that are made of two ops, one after the other."""
