"""FlashInfer's kernels: each of its concrete backends is a kernel of ours, and ``backend="auto"`` is never passed on.

requirements   what a kernel asks of the machine: the package, the module it runs (built ahead, or a compiler)
calls          the calls that adapters make of the library, held against its source before it is imported
layout         where the queries and keys of a step are, as wrappers want to be told
planning       wrappers of the library, lent to one engine step at a time
steps          plans by step and by the values that a plan holds, and running them as our ops promise
operands       what the library asks of tensors, and of the factor of the scores
attention/     `paged_attention` and `attention`
mla/           `mla_attention` and `concat_mla_k`
trtllm/        attention of TensorRT-LLM's kernels for Blackwell: paged, ragged and latent
cudnn/         attention of cuDNN's kernels, by graphs that the library makes: paged and ragged
gemm/          `fp8_gemm`, `bmm_fp8` and `fp4_gemm`
moe/           `fused_moe`
"""
