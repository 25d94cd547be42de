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
        # H200, in a graph, us, caches cold, triton.rope_write / cuda.rope_write, 64 heads of q and 8 of keys: 1 token
        # 1.99 / 2.07, 8 2.17 / 2.17, 128 4.74 / 4.10, 1024 17.0 / 13.8, 8192 106 / 86; 8 and 1 heads: 8 tokens 2.12 /
        # 1.98, 1024 4.88 / 4.35, 8192 17.6 / 16.8. cuda.write was not timed there.
        Line(
            "hopper",
            "*",
            (
                "triton.write",
                "cuda.write",
                "torch.scatter",
                "cuda.rope_write",
                "triton.rope_write",
                "torch.rope_scatter",
            ),
            "measured on an H200, torch 2.11.0, Triton 3.6.0, 2026-11-27 (benchmarks/results/small_ops_h200.json)",
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
