"""Shared by the adapters of several backends: operands as libraries read them, scales in tiles, compiled operators."""
