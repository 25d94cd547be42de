"""One small call of `cuda.decode` of each kind, for compute-sanitizer: python -m tests.gpu.decode_sanitized."""

from __future__ import annotations

import torch

import kernelhub
from kernelhub.ops.attention.tolerance import compare_out
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.mla.attention.reference import mla_attention_reference


def main() -> None:
    for heads, tokens, lengths in ((128, None, (300, 64, 0, 129)), (16, 2, (700, 3))):
        arguments = mla_attention_inputs(num_heads=heads, seq_lens=lengths, q_lens=tokens, device="cuda")
        got, _ = kernelhub.mla_attention(**arguments, return_lse=True, backend="cuda.decode")
        torch.cuda.synchronize()
        print(f"{heads} heads: right {compare_out(got, mla_attention_reference(**arguments), 4.5).ok}", flush=True)


if __name__ == "__main__":
    main()
