"""Every kernel of quantisation that can run here, against torch's ways and against the machine's roofs.

    python benchmarks/quant.py [--quick] [--json] [--out FILE] [--plot FILE.png] [--show FILE]

How kernels are timed and what the roofs are: roofline.py. The width is that of DeepSeek-V3's hidden state, 7168. A
case's bytes are those of the input, which is read once, the codes and the scales; of a whole tensor's own maximum, or
NVFP4's global scale, a kernel has to read the input twice.

torch's way is eager: a maximum, a division, a clamp and a conversion; it has no float4.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from roofline import Case, drawn_on, main
from torch import Tensor

import kernelhub
from kernelhub.ops.models.shapes import hidden_size

WIDTH = hidden_size("deepseek-v3")
FP8 = torch.float8_e4m3fn
GROUPS = {"token": WIDTH, "group": 128}


def eager(x: Tensor, group: int) -> Callable[[], Tensor]:
    """float8 with scales of groups of a row."""

    def call() -> Tensor:
        wide = x.view(x.shape[0], -1, group).float()
        scale = wide.abs().amax(-1, keepdim=True).clamp(min=2.0**-126) / 448.0
        return (wide / scale).clamp(-448, 448).to(FP8)

    return call


def quantize(name: str, tokens: int, device: torch.device, **options: Any) -> Case:
    """Activations of that many tokens."""
    x = torch.randn(tokens, WIDTH, **drawn_on(device)).to(torch.bfloat16)
    results = getattr(kernelhub, name)(x, **options)
    group = GROUPS.get(options.get("granularity", ""))
    return Case(
        f"{name} {options.get('granularity', '')}".strip() + f", {tokens} x {WIDTH}",
        name,
        {"x": x, **options},
        {} if group is None else {"eager": eager(x, group)},
        bytes=sum(tensor.numel() * tensor.itemsize for tensor in (x, *results)),
        operations=0,
        disagreement=bits,
    )


def bits(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """0 where codes and scales are the same bit for bit."""
    pairs = zip(got, want, strict=True)
    return 0.0 if all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs) else float("inf")


def cases(device: torch.device, quick: bool) -> list[Callable[[], Case]]:
    """What is timed: a step of decode and a chunk of prefill."""
    sizes = (64,) if device.type == "cpu" else (4096,) if quick else (128, 4096)
    options: list[tuple[str, dict[str, Any]]] = [
        *(("quantize_fp8", {"granularity": granularity}) for granularity in ("token", "group", "tensor", "block")),
        ("quantize_nvfp4", {}),
        ("quantize_mxfp4", {}),
        ("quantize_mxfp8", {}),
    ]
    return [lambda n=n, t=t, o=o: quantize(n, t, device, **o) for t in sizes for n, o in options]


if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], cases))
