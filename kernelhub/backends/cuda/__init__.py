"""Our CUDA kernels, compiled by NVRTC for the device at first use: sources in `csrc/cuda`, described in its README.

Files: `kernels` (records), `requirements` (what they need), `nvrtc` (from a source to a binary in the cache), `library`
(loading and launching), and a folder of adapters for each family of ops.
"""
