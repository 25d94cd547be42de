"""FlashAttention 2, 3 and 4 as kernels of `attention` and `paged_attention`.

Records are in `kernels`, what they need on the machine in `requirements` and `fa3_build`. Each version has its adapter:
`fa2`, `fa3`, `fa4`; vLLM's builds of the first two are in `vllm_builds` and `vllm_libraries`. What all share, the
operands they read and what is made of their results, is in `operands`.
"""
