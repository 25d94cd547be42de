"""FlashInfer's kernels: each of its concrete backends is a kernel of ours, and ``backend="auto"`` is never passed on.

requirements   what a kernel needs on the machine: the package, the module it runs (built ahead, or a compiler)
calls          the calls that adapters make of the library, checked against its source before it is imported
steps          attention: where queries and keys are, wrappers lent to one engine step, and running their plans
attention/     `paged_attention` and `attention`
mla/           `mla_attention` and `concat_mla_k`
trtllm/        attention of TensorRT-LLM's kernels for Blackwell: paged, ragged and latent
cudnn/         attention of cuDNN's kernels, by graphs that the library makes: paged and ragged
gemm/          `fp8_gemm`, `bmm_fp8` and `fp4_gemm`
moe/           `fused_moe`
comm/          `all_reduce` and `all_reduce_rms_norm`
"""
