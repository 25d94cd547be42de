"""Order of the kernels of `write_kv_cache`."""

from kernelhub.dispatch.order import Line

ORDER = {
    "write_kv_cache": (
        Line("cpu", "*", ("torch.scatter", "triton.write"), "Triton is only interpreted on a CPU"),
        Line(
            "*",
            "*",
            ("triton.write", "torch.scatter"),
            "torch reads the places before it writes them; 8192 tokens of write_mla_cache take 0.010 and 0.145 ms "
            "on an H200 (benchmarks/results/mla_h200.json)",
        ),
    ),
}
