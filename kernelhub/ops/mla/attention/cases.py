"""Cases of `mla_attention`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from kernelhub.ops.attention.softmax_cases import AttendingCases, padded
from kernelhub.ops.case import Arguments, Case, Make
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.models.shapes import MlaModel

FP8 = torch.float8_e4m3fn
SMALL, REAL = MlaModel("small", 5, 64, 16), MlaModel("deepseek", 16, 512, 64)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class MlaAttentionCases(AttendingCases):
    """Decode, several queries, ragged batches and listed tokens; a small latent and DeepSeek's own."""

    op = "mla_attention"
    decode: ClassVar[Arguments] = {"seq_lens": (40, 1, 77)}
    uniform: ClassVar[Arguments] = {"seq_lens": (40, 5, 77), "q_lens": 4}
    ragged: ClassVar[Arguments] = {"seq_lens": (40, 9, 77, 0, 3), "q_lens": (1, 9, 20, 0, 5)}

    def cases(self) -> Iterator[Case]:
        for model, page_size in (
            (SMALL, 16),
            (REAL, 64),
            (MlaModel("64 heads", 64), 64),
            (MlaModel("128 heads", 128), 64),
        ):
            label, paged = f"{model.name}, pages of {page_size}", {"page_size": page_size}
            few = model.num_heads <= 16
            for name, form in (("decode", self.decode), ("uniform", self.uniform), ("ragged", self.ragged)):
                inputs = form | paged
                yield Case(label=f"{name}, {label}", make=_make(model, inputs), quick=few, repeats=True)
                lse = _make(model, inputs, {"return_lse": True})
                yield Case(label=f"{name}, lse, {label}", make=lse, quick=few)
                yield Case(
                    label=f"{name}, sinks, {label}",
                    make=_make(model, inputs, {"sinks": True}),
                    without=_make(model, inputs),
                    feature="sinks",
                    quick=few,
                )
                yield Case(
                    label=f"{name}, sparse, {label}",
                    make=_make(model, inputs | {"topk": 20}),
                    without=_make(model, inputs | {"topk": 20}, listed=False),
                    feature="topk_indices",
                    quick=few,
                )
                listing = inputs | {"topk": 64}
                compiled = model.num_heads == 64 and name == "decode"  # sizes that kernels are compiled for
                make = _make(model, listing)
                yield Case(label=f"{name}, 64 listed, {label}", make=make, quick=compiled, repeats=compiled)
                yield Case(
                    label=f"{name}, scale, {label}",
                    make=_make(model, inputs, {"scale": 0.3}),
                    without=_make(model, inputs),
                    feature="scale",
                )
                for kv_scale in ("value", "tensor"):
                    yield Case(
                        label=f"{name}, fp8, scale as {kv_scale}, {label}",
                        make=_make(model, inputs, kv_scale=kv_scale),
                        without=_make(model, inputs, kv_scale=kv_scale, factor=4.0),
                        feature="kv_scale",
                        quick=few and name == "decode",
                    )
            yield Case(label=f"ragged and padded, {label}", make=padded(_make(model, self.ragged | paged)), quick=few)
            uniform = self.uniform | paged
            yield Case(
                label=f"causal, {label}",
                make=_make(model, uniform, {"causal": True}),
                without=_make(model, uniform, {"causal": False}),
                feature="causal",
                quick=few,
            )
            yield Case(label=f"not causal, {label}", make=_make(model, self.decode | paged, {"causal": False}))
            yield Case(label=f"empty sequences, {label}", make=_make(model, {"seq_lens": (0, 30, 0)} | paged))
            yield Case(label=f"scale of zero, {label}", make=_make(model, self.decode | paged, {"scale": 0.0}))
            yield Case(label=f"long, {label}", make=_make(model, {"seq_lens": (700, 300)} | paged), quick=few)
            for count in (0, 1, 2, 3, 17):
                lens = {"seq_lens": tuple(5 + 7 * place % 60 for place in range(count))} | paged
                make = _make(model, lens)
                yield Case(label=f"{count} sequences, {label}", make=make, tokens=True, quick=few and count < 4)
        for dtype in DTYPES[1:]:
            yield Case(label=str(dtype)[6:], make=_make(SMALL, self.uniform | {"dtype": dtype, "page_size": 16}))
            yield Case(
                label=f"{str(dtype)[6:]} of DeepSeek", make=_make(REAL, self.decode | {"dtype": dtype, "page_size": 64})
            )

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        q = arguments["q"]
        return {"out": ((*q.shape[:-1], arguments["value_dim"]), q.dtype)}

    def wanted(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
        want, lse = self.reference(**arguments | {"return_lse": True}, compute_dtype=torch.float64)
        return want, lse

    def largest_value(self, arguments: Arguments) -> float:
        return _largest_value(arguments)


def _make(
    model: MlaModel,
    inputs: Arguments,
    more: Arguments | None = None,
    kv_scale: str | None = None,
    factor: float = 1.0,
    listed: bool = True,
) -> Make:
    def made(device: torch.device) -> Arguments:
        arguments = mla_attention_inputs(model, device=device, kv_dtype=FP8 if kv_scale else None, **inputs)
        arguments |= more or {}
        if arguments.get("sinks") is True:
            arguments["sinks"] = torch.linspace(-1, 4, model.num_heads, device=device, dtype=arguments["q"].dtype)
        if kv_scale:
            scale = 0.75 * factor * arguments["kv_scale"]
            arguments["kv_scale"] = (
                torch.tensor([scale], device=device, dtype=torch.float32) if kv_scale == "tensor" else scale
            )
        if not listed:  # all but the first are the same: a kernel that ignores the list is seen
            arguments["topk_indices"] = torch.full_like(arguments["topk_indices"], -1)
            arguments["topk_indices"][..., 0] = 0
        return arguments

    return made


def _largest_value(arguments: Arguments) -> float:
    latent = arguments["kv_cache"][..., : arguments["value_dim"]].float().nan_to_num()
    scale = arguments.get("kv_scale")
    return float(latent.abs().max()) * (1.0 if scale is None else float(scale)) if latent.numel() else 0.0
