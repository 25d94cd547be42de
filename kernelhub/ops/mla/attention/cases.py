"""Cases of `mla_attention`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelhub.ops.attention.problem import ONE
from kernelhub.ops.attention.softmax_cases import AttendingCases, padded
from kernelhub.ops.case import Arguments, Case, Make
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.models.shapes import MlaModel

FP8 = torch.float8_e4m3fn
SMALL, REAL = MlaModel("small", 5, 64, 16), MlaModel("deepseek", 16, 512, 64)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OFF = ("ragged", "causal", "sparse", "sinks", "lse")  # facets that are off or on


class MlaAttentionCases(AttendingCases):
    """Decode, several queries, ragged batches and listed tokens; a small latent and DeepSeek's own."""

    op = "mla_attention"
    formats = ("q_dtype", "kv_dtype", "head_dim", "value_dim")
    read = (*formats, "kv_scale", "q_len", *OFF)

    def concerns(self, of_case: Any, served: Any) -> bool:
        """Whether a case has no feature that is not served, and its formats, as far as quick cases have them.

        Of a float8 cache the cases in 16 bits count, too, which alone have empty sequences and lengths.
        """
        rank, own = served.value_dim, of_case.value_dim
        if rank != own and rank in (SMALL.kv_lora_rank, REAL.kv_lora_rank):
            return False
        if of_case.q_dtype not in (served.q_dtype, "bfloat16") or (of_case.q_len == ONE) != (served.q_len == ONE):
            return False
        stored = of_case.kv_dtype, of_case.kv_scale
        if of_case.kv_dtype != of_case.q_dtype and stored != (served.kv_dtype, served.kv_scale):
            return False
        return all(getattr(of_case, name) <= getattr(served, name) for name in OFF)

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
            if few:
                yield from self._features(model, paged)
            for name, listed in (
                ("one position each", self.uniform | {"topk": 1}),
                ("empty sequences, sparse", {"seq_lens": (0, 30, 0), "topk": 7}),
                ("long and sparse", {"seq_lens": (700, 300), "topk": 400}),
                ("17 sequences, sparse", {"seq_lens": tuple(5 + 7 * place % 60 for place in range(17)), "topk": 9}),
            ):
                yield Case(label=f"{name}, {label}", make=_make(model, listed | paged))
        yield from self._shapes()
        yield from self._formats()
        yield from self._lengths()

    def _features(self, model: MlaModel, paged: Arguments) -> Iterator[Case]:
        """Every set of features in every form."""
        for name, form in (("decode", self.decode), ("uniform", self.uniform), ("ragged", self.ragged)):
            for causal, sinks, topk in itertools.product((False, True), (None, True), (None, 20)):
                words = "causal" if causal else "all keys", "sinks" * bool(sinks), "sparse" * bool(topk)
                features = ", ".join(filter(None, words))
                make = _make(model, form | paged | {"topk": topk}, {"causal": causal, "sinks": sinks})
                yield Case(label=f"{name} with {features}, {model.name}", make=make)

    def _shapes(self) -> Iterator[Case]:
        """Widths, heads and pages, one at a time."""
        for latent, rope in ((256, 64), (192, 64), (128, 32), (128, 0), (80, 24), (16, 3), (7, 1), (512, 128)):
            model = MlaModel("widths", 5, latent, rope)
            yield Case(label=f"widths {latent} + {rope}", make=_make(model, self.decode | {"page_size": 16}))
        for label, form, counts in (
            ("decode", self.decode, (1, 3, 16, 17, 33, 65, 128)),
            ("4 queries", self.uniform, (1, 8, 17)),
            ("sparse", self.uniform | {"topk": 20}, (1, 17, 40)),
        ):
            for heads in counts:
                model = MlaModel("heads", heads, 64, 16)
                yield Case(label=f"{heads} heads, {label}", make=_make(model, form | {"page_size": 16}))
        for size in (1, 3, 64, 256):
            yield Case(label=f"pages of {size}", make=_make(SMALL, self.ragged | {"page_size": size}))

    def _formats(self) -> Iterator[Case]:
        """Dtypes of queries and of the cache, in each form."""
        for form, inputs in (("decode", self.decode), ("uniform", self.uniform), ("ragged", self.ragged)):
            for dtype in DTYPES[1:]:
                paged = inputs | {"dtype": dtype}
                yield Case(label=f"{str(dtype)[6:]}, {form}", make=_make(SMALL, paged | {"page_size": 16}))
                yield Case(label=f"{str(dtype)[6:]} of DeepSeek, {form}", make=_make(REAL, paged | {"page_size": 64}))
            formats = (torch.bfloat16, "tensor", 40), (torch.float16, "value", 5), (torch.float32, "tensor", 5)
            for dtype, scale, heads in formats:
                model = MlaModel("fp8", heads, 64, 16)
                paged = inputs | {"dtype": dtype, "page_size": 16}
                label = f"fp8, scale as {scale}, {str(dtype)[6:]}, {heads} heads, {form}"
                yield Case(label=label, make=_make(model, paged, kv_scale=scale))

    def _lengths(self) -> Iterator[Case]:
        """Empty and long sequences, more queries than tokens, lists of one token and of none."""
        empty, long = {"seq_lens": (0, 30, 0)}, {"seq_lens": (700, 300), "page_size": 64}
        most = {"max_seqlen_q": 20}
        few = {"seq_lens": (40, 9, 77), "q_lens": (1, 3, 2)}
        sinks = {"sinks": True}
        for label, inputs, more in (
            ("empty sequences, sinks", empty, sinks),
            ("empty sequences, sinks and sparse", empty | {"topk": 7}, sinks),
            ("more queries than tokens", {"seq_lens": (3, 8), "q_lens": 6}, {}),
            ("an upper bound on queries", self.ragged, most),
            ("few ragged queries", few, {"max_seqlen_q": 3}),
            ("long, sinks", long | {"seq_lens": (700, 300, 0)}, sinks),
            ("no position", self.uniform | {"topk": 0}, sinks),
        ):
            yield Case(label=label, make=_make(SMALL, {"page_size": 16} | inputs, more))
        many = MlaModel("64 rows", 40, 64, 16)
        yield Case(label="long, 64 rows", make=_make(many, long | {"q_lens": 2}))
        yield Case(label="long, fp8", make=_make(SMALL, long, kv_scale="tensor"))
        lse = {"return_lse": True}
        for label, inputs, more, kv_scale in (
            ("decode", self.decode | {"topk": 64, "page_size": 64}, {}, "value"),
            ("uniform, lse", self.uniform | {"topk": 20, "page_size": 16}, lse, "tensor"),
            ("ragged, sinks", self.ragged | {"topk": 20, "page_size": 64}, sinks, "value"),
            ("long, sinks, lse", long | {"topk": 400}, sinks | lse, "tensor"),
            ("empty sequences, all keys", empty | {"topk": 7, "page_size": 1}, lse | {"causal": False}, "tensor"),
        ):
            make = _make(REAL, inputs, more, kv_scale=kv_scale)
            yield Case(label=f"{label}, sparse fp8 of DeepSeek", make=make)
        yield Case(label="sparse fp8", make=_make(SMALL, self.ragged | {"topk": 24, "page_size": 16}, kv_scale="value"))

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
