"""Small calls of `cuda.paged_decode` of each kind, for compute-sanitizer: python -m tests.gpu.paged_sanitized."""

from __future__ import annotations

import torch

import kernelhub
from kernelhub.ops.attention.cases import largest_value
from kernelhub.ops.attention.inputs import paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_out
from kernelhub.ops.models.shapes import AttentionModel


def main() -> None:
    for heads, width, tokens, kv_dtype, layout, window in (
        (32, 128, None, torch.float8_e4m3fn, "NHD", None),
        (32, 128, 4, torch.bfloat16, "HND", None),
        (64, 64, None, torch.float8_e4m3fn, "NHD", 127),
        (32, 128, [1, 0, 1, 1], torch.bfloat16, "NHD", None),
        (32, 128, [5, 0, 1, 4], torch.float8_e4m3fn, "NHD", 127),
    ):
        model = AttentionModel("small", heads, 8, width, width)
        arguments = paged_attention_inputs(
            model, seq_lens=(300, 64, 129, 17), q_lens=tokens, kv_dtype=kv_dtype, kv_layout=layout, device="cuda"
        ) | {"window": window, "max_seqlen_q": max(tokens) if isinstance(tokens, list) else None}
        got, _ = kernelhub.paged_attention(**arguments, return_lse=True, backend="cuda.paged_decode")
        torch.cuda.synchronize()
        want = kernelhub.paged_attention.reference(**arguments)
        print(f"{heads} heads of {width}: {compare_out(got, want, largest_value(arguments))}", flush=True)


if __name__ == "__main__":
    main()
