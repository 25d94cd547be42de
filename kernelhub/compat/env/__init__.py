"""Environment variables of vLLM, FlashInfer and DeepGEMM that choose kernels, translated to one policy of kernelhub.

- `variable`: the meaning of another project's variable
- `attention`, `gemm`, `experts`: vLLM's variables, by the ops that they control
- `libraries`: variables that a library reads by itself; reported, never changed
- `translation`: the translation of an environment, and names that are ignored, with their successors

Every setting of kernelhub itself takes precedence over vLLM's variables; `KERNELHUB_IGNORE_VLLM_ENV=1` disables them.
`kernelhub env` shows each variable that is set, and its effect.
"""

from kernelhub.compat.env.translation import Translation, flag, said, translate

__all__ = ["Translation", "flag", "said", "translate"]
