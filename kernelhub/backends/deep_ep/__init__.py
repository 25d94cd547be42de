"""DeepEP 1.2, the library of DeepSeek-V3 for tokens of experts on other ranks.

requirements   the package, and the calls that adapters make to it
buffers        its buffer, one for each group
normal         `moe_dispatch` and `moe_combine` by its kernels for high throughput, on one machine over NVLink
"""
