"""vLLM's own modules, as far as they are about kernels: same names and meaning, answered by kernelhub's probes.

- `flashinfer`: in place of ``vllm.utils.flashinfer``
- `deep_gemm`: in place of ``vllm.utils.deep_gemm``
- `plugin`, `attention`: kernelhub as an attention backend of vLLM
- `answer`, `here`, `library`: what these share

An engine changes the import line and nothing else. What differs: no question imports a library, opens a socket or
remembers its answer past `kernelhub.reload()`, and every question has ``.why()``, the finding with reason and remedy.
"""
