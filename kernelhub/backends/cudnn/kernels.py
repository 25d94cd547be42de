"""Records of cuDNN's kernels."""

from __future__ import annotations

from kernelhub.backends.cudnn.requirements import MACHINE
from kernelhub.dispatch.constraint import Rule, SameValue, anything, dtype_in
from kernelhub.dispatch.kernel import Backend, Band, Kernel
from kernelhub.ops.attention.problem import AttentionProblem

BACKEND = Backend(
    name="cudnn",
    summary="cuDNN's attention by its Python frontend",
    package="cudnn",
    homepage="https://github.com/NVIDIA/cudnn-frontend",
)

WIDTHS = ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256))


def _width_not_seen(problem: AttentionProblem) -> str | None:
    width = (problem.head_dim_qk, problem.head_dim_vo)
    return f"heads are {width[0]} and {width[1]} wide; taken are {_TAKEN}" if width not in WIDTHS else None


_TAKEN = ", ".join(f"{qk}/{vo}" for qk, vo in WIDTHS)

KERNELS = (
    Kernel(
        op="attention",
        name="cudnn.sdpa",
        target="kernelhub.backends.cudnn.sdpa:Sdpa",
        summary="cuDNN's flash attention over packed sequences, a graph for each class of sizes",
        band=Band.SPECIALISED,
        constraints=(
            *MACHINE,
            dtype_in("q_dtype", "bfloat16", "float16"),
            SameValue("q_dtype", "kv_dtype", why="its fp8 attention takes fp8 queries"),
            Rule(("head_dim_qk", "head_dim_vo"), _width_not_seen, code="value"),
            anything("num_q_heads", "num_kv_heads", "q_len"),
        ),
        features=frozenset({"ragged", "causal", "window_left", "window_right", "lse"}),
        source="cuDNN, scaled dot product attention",
    ),
)
