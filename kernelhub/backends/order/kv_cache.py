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
