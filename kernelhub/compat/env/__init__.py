"""Variables by which vLLM, FlashInfer and DeepGEMM are told which kernels to run, read as one policy of kernelhub.

- `variable`: what a variable of another project means here
- `attention`, `gemm`, `experts`: vLLM's variables, by what they choose
- `successors`: names that kernelhub does not obey, with what to write in their place
- `libraries`: variables that a library reads by itself; shown, never changed
- `translation`: an environment, translated

vLLM's variables are weaker than every word to kernelhub itself, and `KERNELHUB_IGNORE_VLLM_ENV=1` switches them off.
`kernelhub env` shows each that is set with what became of it.
"""

from kernelhub.compat.env.translation import Translation, flag, said, translate

__all__ = ["Translation", "flag", "said", "translate"]
