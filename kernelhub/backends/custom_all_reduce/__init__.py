"""vLLM's all-reduce over peer memory, as compiled into vLLM and into SGLang's kernel package.

requirements   the packages, and the versions that were read
libraries      the compiled libraries, and their operators as they declare them
adapter        `all_reduce` by these operators, over a workspace in symmetric memory
"""
