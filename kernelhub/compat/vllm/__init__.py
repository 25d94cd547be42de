"""Replacements for vLLM's modules about kernels: the same names and meaning, based on kernelhub's probes.

- `flashinfer`: replaces ``vllm.utils.flashinfer``
- `deep_gemm`: replaces ``vllm.utils.deep_gemm``
- `plugin`, `attention`: kernelhub as an attention backend of vLLM
- `answer`, `here`, `library`: shared code

An engine changes only the import line. Differences: no query imports a library, opens a socket or caches its result
past `kernelhub.reload()`, and every query has ``.why()``, the finding with reason and remedy.
"""
