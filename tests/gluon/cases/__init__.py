"""Launches to compile ahead: a file for each family of ops, each with `CASES`."""
