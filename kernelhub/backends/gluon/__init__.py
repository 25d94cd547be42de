"""Kernels in Gluon for sm_90: programs whose warps load by TMA while others multiply by wgmma.

Each stands beside a portable kernel in Triton, which runs on every other device and is the reference in tests.
"""
