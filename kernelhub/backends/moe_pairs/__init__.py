"""Pairs of a dispatch format and an op that runs experts in it: the kernels of `expert_parallel_moe`."""
