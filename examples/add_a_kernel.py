"""A third party's kernel: one record and one adapter, selected automatically and compared with the reference.

In your own package this file is ``yourpackage/kernels.py``. kernelhub finds it through the entry point

    [project.entry-points."kernelhub.backends"]
    mine = "yourpackage.kernels"

Here the file registers itself. Run it with ``python examples/add_a_kernel.py``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

import kernelhub
from kernelhub.dispatch.constraint import Between, OnDevice, SameValue, anything, dtype_in
from kernelhub.dispatch.kernel import Backend, Band, Kernel
from kernelhub.dispatch.standing import verified
from kernelhub.ops.attention.adapter import AttentionAdapter
from kernelhub.ops.attention.inputs import attention_inputs
from kernelhub.ops.attention.tolerance import compare_out
from kernelhub.ops.models.shapes import AttentionModel

BACKEND = Backend("mine", "matrix products and a softmax, for heads without groups")

# Every limit is data. A constraint must mention each facet. Calls with a feature that is not listed are rejected.
KERNELS = (
    Kernel(
        op="attention",
        name="mine.naive",
        target=f"{__name__}:Naive",
        summary="a softmax between two products, for short sequences on a CPU",
        band=Band.PLUGIN,
        constraints=(
            OnDevice("cpu"),
            dtype_in("q_dtype", "float32"),
            dtype_in("kv_dtype", "float32"),
            SameValue("num_q_heads", "num_kv_heads", why="no grouped heads"),
            Between("head_dim_qk", 16, 256),
            anything("head_dim_vo", "q_len"),
        ),
        features=frozenset({"causal"}),
        deterministic=True,
        # The devices that it ran on. On other families it is selected once `kernelhub verify` has passed there.
        standings=(verified("cpu", evidence="an EPYC, 2026-11-22, torch 2.13.0: this example"),),
    ),
)


class Naive(AttentionAdapter[Any, Any]):
    """Imported when the kernel is selected."""

    def launch(self, q: Tensor, k: Tensor, v: Tensor, step: Any, values: Any, out: Tensor, lse: Tensor | None) -> None:
        scores = torch.einsum("bshd,blhd->bhsl", q, k) * values.scale
        if values.window_right == 0:
            tokens, length = q.shape[1], k.shape[1]
            hidden = torch.ones(tokens, length, dtype=torch.bool).triu(length - tokens + 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        out.copy_(torch.einsum("bhsl,blhd->bshd", scores.softmax(-1).nan_to_num(), v))


def main() -> None:
    kernelhub.register_backend(sys.modules[__name__])
    arguments = attention_inputs(AttentionModel("tiny", 4, 4, 64, 64), batch=2, q_tokens=50, dtype=torch.float32)
    print(kernelhub.attention.explain(**arguments))
    out = kernelhub.attention(**arguments)
    print("compared with the reference:", compare_out(out, kernelhub.attention.reference(**arguments), 4.0))
    print("kernel for grouped heads:", kernelhub.explain("attention", device="CPU", q_dtype="float32").selected)


if __name__ == "__main__":
    main()
