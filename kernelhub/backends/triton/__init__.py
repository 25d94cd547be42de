"""Portable kernels in Triton, for every GPU from sm_80 on."""
