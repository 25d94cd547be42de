"""Cases of `mla_attention`, `write_mla_cache` and `concat_mla_k`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernelhub.evidence.cases.attending import AttendingCases, padded
from kernelhub.evidence.cases.case import Arguments, Case, Judgement, Make, OpCases, same_bits
from kernelhub.ops.mla.attention.inputs import MlaModel, mla_attention_inputs
from kernelhub.ops.mla.cache.inputs import write_mla_cache_inputs
from kernelhub.ops.mla.concat.inputs import concat_inputs

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


class MlaCacheCases(OpCases):
    """Tokens that are written and skipped, to the bit."""

    op = "write_mla_cache"
    exact = True
    written = ("kv_cache",)

    def cases(self) -> Iterator[Case]:
        for dtype in DTYPES:
            yield Case(label=str(dtype)[6:], make=_writes(dtype=dtype), quick=True, repeats=True)
            fp8: Arguments = {"dtype": dtype, "kv_dtype": FP8}
            for label, scale in (("0.0171", 0.0171), ("3.3", 3.3), ("tiny", 2.0**-60)):
                yield Case(
                    label=f"{str(dtype)[6:]} to fp8, scale {label}",
                    make=_writes(kv_scale=scale, **fp8),
                    without=_writes(kv_scale=1.0, **fp8),
                    feature="kv_scale",
                    quick=label != "3.3",
                )
            yield Case(
                label=f"{str(dtype)[6:]} to fp8, scale as tensor", make=_writes(tensor=True, kv_scale=0.3, **fp8)
            )
        for scale in (0.0171, 0.3, 1.7):
            yield Case(label=f"half way between two codes, scale {scale}", make=_half_way(scale), quick=True)
        for latent, rope in ((256, 64), (128, 0), (7, 3), (1, 1)):
            yield Case(label=f"{latent} + {rope}", make=_writes(latent_dim=latent, rope_dim=rope))
        for size in (1, 3, 16, 256):
            yield Case(label=f"pages of {size}", make=_writes(page_size=size))
        for skipped in (0, 1):
            yield Case(
                label=("nothing is skipped", "all are skipped")[skipped], make=_writes(skipped=skipped), quick=True
            )
        for tokens in (0, 1, 2, 3, 31, 32, 33, 65):
            yield Case(
                label=f"{tokens} tokens", make=_writes(tokens=tokens), tokens=True, quick=tokens in (0, 1, 2, 33)
            )

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {}

    def results(self, returned: Any, destinations: Mapping[str, Tensor], arguments: Arguments) -> dict[str, Tensor]:
        return {"kv_cache": arguments["kv_cache"]}

    def expect(self, arguments: Arguments) -> Any:
        return self.reference(**arguments)

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        want = expected
        return Judgement(*same_bits(results["kv_cache"], want), {"kv_cache": want})


def _writes(*, kv_scale: float | None = None, tensor: bool = False, **inputs: Any) -> Make:
    def made(device: torch.device) -> Arguments:
        arguments = write_mla_cache_inputs(**{"tokens": 18} | inputs, device=device)
        if kv_scale is not None:
            arguments["kv_scale"] = torch.tensor([kv_scale], device=device, dtype=torch.float32) if tensor else kv_scale
        return arguments

    return made


def _half_way(kv_scale: float) -> Make:
    """Values that lie half way between two codes after division; with the reciprocal some go to the wrong side."""

    def made(device: torch.device) -> Arguments:
        halves = torch.tensor(
            [(m + 0.5) / 8 * 2.0**e for m in range(8, 16) for e in range(-5, 8)], dtype=torch.float32, device="cpu"
        )
        values = (halves * torch.tensor(kv_scale, dtype=torch.float32, device="cpu")).to(device)
        inputs: Arguments = {"dtype": torch.float32, "kv_dtype": FP8, "tokens": 1, "skipped": 0}
        arguments = write_mla_cache_inputs(**inputs, latent_dim=len(halves), device=device)
        return arguments | {"kv_c": values[None], "kv_scale": kv_scale}

    return made


class ConcatCases(OpCases):
    """Every bit is copied."""

    op = "concat_mla_k"
    exact = True

    def cases(self) -> Iterator[Case]:
        for heads in (5, 128):
            for dtype in (*DTYPES, FP8):
                label = f"{str(dtype)[6:]}, {heads} heads"
                yield Case(label=label, make=_concat(dtype=dtype, num_heads=heads), quick=True, repeats=True)
            for tokens in (0, 1, 2, 3, 31, 33, 129):
                make = _concat(tokens=tokens, num_heads=heads)
                yield Case(
                    label=f"{tokens} tokens, {heads} heads", make=make, tokens=True, quick=tokens in (0, 1, 2, 33)
                )
        for nope, rope in ((192, 64), (7, 3), (1, 1)):
            yield Case(label=f"{nope} + {rope}", make=_concat(nope_dim=nope, rope_dim=rope))
        yield Case(label="NaN and negative zero", make=_any_bits, quick=True)

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        k_nope, k_rope = arguments["k_nope"], arguments["k_rope"]
        return {"out": ((*k_nope.shape[:2], k_nope.shape[2] + k_rope.shape[-1]), k_nope.dtype)}

    def in_place(self, given: Arguments) -> tuple[Arguments, dict[str, Tensor]]:
        k_nope = given["k_nope"]
        shape, _ = self.destinations(given)["out"]
        out = k_nope.new_empty(shape)
        kept = out[..., : k_nope.shape[2]]
        kept.copy_(k_nope)
        return given | {"k_nope": kept}, {"out": out}

    def expect(self, arguments: Arguments) -> Any:
        return self.reference(**arguments)

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        want = expected
        ratio, figures = same_bits(results["out"], want)
        return Judgement(ratio, figures, {"out": want})


def _concat(**inputs: Any) -> Make:
    return lambda device: concat_inputs(**{"tokens": 18, "num_heads": 5} | inputs, device=device)


def _any_bits(device: torch.device) -> Arguments:
    arguments = concat_inputs(tokens=18, num_heads=5, device=device)
    for seed, tensor in enumerate(arguments.values()):
        random = torch.Generator(device="cpu").manual_seed(seed)
        bits = torch.randint(-(1 << 15), 1 << 15, tensor.shape, generator=random, dtype=torch.int16, device="cpu")
        tensor.copy_(bits.view(torch.bfloat16).to(device))
    return arguments
