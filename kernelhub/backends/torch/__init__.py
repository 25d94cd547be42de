"""Kernels made of torch operators: the CPU's own, and the last resort everywhere."""
