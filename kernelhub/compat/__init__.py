"""Compatibility with other projects: kernelhub behind the interfaces that they already call."""
