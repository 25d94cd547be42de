"""Order of the kernels of `write_kv_cache`."""

from kernelhub.dispatch.order import Line

ORDER = {
    "write_kv_cache": (
        Line(
            "cpu",
            "*",
            ("torch.scatter", "torch.rope_scatter", "triton.write", "triton.rope_write"),
            "Triton is only interpreted on a CPU",
        ),
        # H200, in a graph, us, triton.write / cuda.write, 8, 128, 1024 and 8192 tokens: bfloat16 1.60 / 1.07, 2.96 /
        # 1.87, 4.57 / 3.69, 20.2 / 19.3, float8 3.38 / 1.28, 4.57 / 2.09, 6.21 / 3.70, 23.5 / 21.1 (cuda.write
        # to float8: cuda_h200.json, another run of that day). With rope, 64 heads of q and 8 of keys, triton.rope_write
        # / cuda.rope_write: 2.20 / 1.65, 4.81 / 3.53, 16.0 / 12.9, 109 / 88; 8 and 1 heads, 1024 tokens 4.93 / 3.43.
        Line(
            "hopper",
            "*",
            (
                "cuda.write",
                "triton.write",
                "torch.scatter",
                "cuda.rope_write",
                "triton.rope_write",
                "torch.rope_scatter",
            ),
            "measured on an H200, torch 2.11.0, Triton 3.6.0, 2026-11-27 "
            "(benchmarks/results/small_ops_forms_h200.json)",
        ),
        Line(
            "*",
            "*",
            (
                "triton.write",
                "cuda.write",
                "torch.scatter",
                "triton.rope_write",
                "cuda.rope_write",
                "torch.rope_scatter",
            ),
            "8192 tokens: triton.write 0.031 and torch.scatter 0.567 ms on an H100 (benchmarks/results/"
            "small_ops_h100.json); cuda.write 1.3 us of a graph at 8 tokens, triton.write 1.5, not timed with many "
            "(cuda_h100.json); with rope, 64 heads of q and 8 of keys, 1, 64, 1024 and 8192 "
            "tokens: triton.rope_write 0.0066, 0.0078, 0.023 and 0.135, cuda.rope_write 0.0069, 0.011, 0.026 and 0.144",
        ),
    ),
}
