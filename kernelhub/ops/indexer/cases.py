"""Cases of `mqa_logits`, `paged_mqa_logits` and `topk_indices`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases, same_bits, worst
from kernelhub.ops.indexer.inputs import logits_inputs, paged_logits_inputs, topk_inputs
from kernelhub.ops.indexer.layout import split_cache
from kernelhub.ops.indexer.tolerance import relative_error_allowed, sizes
from kernelhub.ops.models.shapes import IndexerModel

FP8 = torch.float8_e4m3fn
DTYPES = (FP8, torch.bfloat16, torch.float16, torch.float32)
SMALL, REAL = IndexerModel("6 heads of 32", 6, 32, 64), IndexerModel("64 heads of 128", 64, 128, 2048)


SHAPES = ((1, 64), (33, 20), (32, 32), (32, 64), (64, 32), (64, 64))  # heads and their width


class LogitsCases(OpCases):
    """`mqa_logits`."""

    op = "mqa_logits"

    def cases(self) -> Iterator[Case]:
        for model in (SMALL, REAL, IndexerModel("32 heads of 128", 32, 128, 2048)):
            for dtype in DTYPES:
                label = f"{str(dtype)[6:]}, {model.name}"
                yield Case(label=label, make=_logits(model, dtype=dtype), quick=dtype is FP8, repeats=True)
                yield Case(label=f"{label}, no scale", make=_logits(model, dtype=dtype, k_scale=False))
                for factor in (4.0, 2.0**-60):
                    yield Case(
                        label=f"{label}, scales times {factor:g}",
                        make=_times(_logits(model, dtype=dtype), "k_scale", factor),
                        without=_logits(model, dtype=dtype),
                        feature="k_scale",
                        quick=dtype is FP8,
                    )
                yield Case(label=f"{label}, weights of zero", make=_times(_logits(model, dtype=dtype), "weights", 0.0))
            for tokens in (0, 1, 2, 3, 15, 16, 17, 64, 65):
                make = _logits(model, tokens=tokens)
                yield Case(
                    label=f"{tokens} tokens, {model.name}", make=make, tokens=True, quick=tokens in (0, 1, 2, 17)
                )
            for keys in (33, 128, 129, 300):
                yield Case(label=f"{keys} keys, {model.name}", make=_logits(model, keys=keys))
            for tokens, keys in ((1, 1), (7, 7), (3, 129), (9, 128), (64, 2000)):
                make = _logits(model, tokens=tokens, keys=keys)
                yield Case(label=f"{tokens} tokens over {keys} keys, {model.name}", make=make)
        for heads, width in SHAPES:
            model = IndexerModel(f"{heads} heads of {width}", heads, width, 64)
            yield Case(label=f"fp8, {model.name}", make=_logits(model))
            yield Case(label=f"fp8, {model.name}, no scale", make=_logits(model, k_scale=False))

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"out": ((arguments["q"].shape[0], arguments["k"].shape[0]), torch.float32)}

    def expect(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
        size = sizes(*(arguments[name] for name in ("q", "k", "k_scale", "weights")))
        return self.reference(**arguments, dtype=torch.float64), size

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        want, size = expected
        return _judged(results["out"], want, size, arguments["q"])


class PagedLogitsCases(OpCases):
    """`paged_mqa_logits`."""

    op = "paged_mqa_logits"
    whole = ("k_cache",)

    def cases(self) -> Iterator[Case]:
        for model, page_size in ((SMALL, 16), (REAL, 64), (IndexerModel("32 heads of 128", 32, 128, 2048), 64)):
            for dtype in DTYPES:
                label = f"{str(dtype)[6:]}, {model.name}"
                inputs = {"dtype": dtype, "page_size": page_size}
                yield Case(label=label, make=_paged(model, **inputs), quick=dtype is FP8, repeats=True)
                yield Case(label=f"{label}, no scale", make=_paged(model, k_scale=False, **inputs))
                for factor in (4.0, 2.0**-60):
                    yield Case(
                        label=f"{label}, scales times {factor:g}",
                        make=_times(_paged(model, **inputs), "k_scale_cache", factor),
                        without=_paged(model, **inputs),
                        feature="k_scale_cache",
                        quick=dtype is FP8,
                    )
            label, inputs = model.name, {"page_size": page_size}
            yield Case(label=f"scales among the values, {label}", make=_paged(model, fused=True, **inputs), quick=True)
            for next_n in (2, 3, 5):
                make = _paged(model, next_n=next_n, fused=True, **inputs)
                yield Case(label=f"{next_n} tokens each, {label}", make=make, tokens=True, quick=next_n == 2)
            for count in (0, 1, 2, 3, 17):
                lens = tuple(30 + 17 * place % 90 for place in range(count))
                make = _paged(model, seq_lens=lens, fused=True, **inputs | ({} if count else {"max_seq_len": 9}))
                yield Case(label=f"{count} sequences, {label}", make=make, tokens=True, quick=count < 4)
            for lens in ((0, 1, 30), (127, 128), (129, 1), (64, 65), (63, 1), (128,), (257, 3, 0), (3000, 3, 0, 700)):
                make = _paged(model, seq_lens=lens, fused=True, **inputs)
                yield Case(label=f"sequences of {lens}, {label}", make=make)
            for next_n, lens in ((3, (0, 1, 30)), (4, (131, 40)), (6, (131, 40))):
                make = _paged(model, seq_lens=lens, next_n=next_n, fused=True, **inputs)
                yield Case(label=f"{next_n} tokens each of sequences of {lens}, {label}", make=make)
            make = _paged(model, max_seq_len=270, fused=True, **inputs)
            yield Case(label=f"columns beyond every length, {label}", make=make)
        for heads, width in SHAPES:
            model = IndexerModel(f"{heads} heads of {width}", heads, width, 64)
            yield Case(label=f"fp8, {model.name}", make=_paged(model, page_size=64, fused=True))
        for page_size in (1, 3, 64):
            yield Case(label=f"pages of {page_size}", make=_paged(SMALL, page_size=page_size))
        for page_size in (3, 64):
            make = _paged(SMALL, page_size=page_size, fused=True)
            yield Case(label=f"pages of {page_size}, scales among the values", make=make)

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"out": ((arguments["weights"].shape[0], arguments["max_seq_len"]), torch.float32)}

    def expect(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
        want = self.reference(**arguments, dtype=torch.float64)
        q = arguments["q"]
        k, k_scale = split_cache(arguments["k_cache"], arguments["k_scale_cache"], q.shape[-1])
        largest = sizes(
            q.flatten(0, 1),
            k.float().abs().flatten(0, 1).amax(0, keepdim=True),
            None if k_scale is None else k_scale.amax().view(1),
            arguments["weights"],
        )
        return want, largest.expand_as(want)

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        want, size = expected
        return _judged(results["out"], want, size, arguments["q"])


class TopKCases(OpCases):
    """`topk_indices`: all kernels return the same indices."""

    op = "topk_indices"
    exact = True

    def cases(self) -> Iterator[Case]:
        for k in (300, 2048):
            label = f"{k} of each row"
            ranged, whole = _topk(k=k), _topk(k=k, ranges=False)
            yield Case(label=f"whole rows, {label}", make=whole, quick=True, repeats=True)
            yield Case(
                label=f"ranges, {label}",
                make=ranged,
                without=whole,
                feature="row_starts, row_ends",
                quick=True,
                repeats=True,
            )
            for name in ("row_starts", "row_ends"):
                yield Case(
                    label=f"{name}, {label}", make=_one_of(ranged, name), without=whole, feature=name, quick=True
                )
            for levels in (1, 3, 40):
                yield Case(label=f"{levels} values, {label}", make=_topk(k=k, levels=levels), quick=levels == 3)
            for tokens in (0, 1, 2, 3, 17, 33):
                make = _topk(k=k, tokens=tokens)
                yield Case(label=f"{tokens} tokens, {label}", make=make, tokens=True, quick=tokens < 4)
            for keys in (1, 5, 2047, 2048, 2049, 9000):
                yield Case(label=f"{keys} columns, {label}", make=_topk(k=k, keys=keys))
            yield Case(label=f"values of every kind, {label}", make=_kinds(k), quick=True)
        for k in (1, 2, 255, 3000):
            yield Case(label=f"{k} of each", make=_topk(k=k))
        for k in range(1, 14):
            yield Case(label=f"values of every kind, {k} of each row", make=_kinds(k))
        for sign in (1, -1):
            yield Case(label=f"floats next to {sign}", make=_neighbours(sign))
        outside = _ranges((5, 40, -3, 30), (5, 50, 6, 99))
        yield Case(label="ranges without columns and past the row", make=outside)
        for name in ("row_starts", "row_ends"):
            yield Case(label=f"{name} without columns and past the row", make=_one_of(outside, name))
        yield Case(label="fewer columns than k", make=_topk(keys=50, k=64))
        yield Case(label="as many columns as k", make=_topk(keys=64, k=64, ranges=False))
        yield Case(label="one row of 9000 columns", make=_topk(tokens=1, keys=9000, k=300))
        yield Case(label="no columns", make=_topk(tokens=2, keys=0, k=3, ranges=False))

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"out": ((arguments["logits"].shape[0], arguments["k"]), torch.int32)}

    def expect(self, arguments: Arguments) -> Any:
        return self.reference(**arguments)

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        want = expected
        return Judgement(*same_bits(results["out"], want), {"out": want})


def _judged(out: Tensor, want: Tensor, size: Tensor, q: Tensor) -> Judgement:
    """-inf exactly where it belongs, the rest within the bound."""
    unseen = want == -torch.inf
    if not torch.equal(out == -torch.inf, unseen):
        return Judgement(
            torch.inf, f"-inf differs at {int(((out == -torch.inf) != unseen).sum())} places", {"out": want}
        )
    allowed = relative_error_allowed(*q.shape[-2:], float8_products=q.dtype is FP8 and q.is_cuda)
    error = (out.double() - want).abs()[~unseen]
    return Judgement(*worst(error, (allowed * size + 1e-300)[~unseen]), {"out": want})


def _logits(model: IndexerModel, **inputs: Any) -> Make:
    asked: Arguments = {"tokens": 18, "keys": 150} | inputs
    return lambda device: logits_inputs(model, **asked, device=device)


def _paged(model: IndexerModel, **inputs: Any) -> Make:
    asked: Arguments = {"seq_lens": (131, 40)} | inputs
    return lambda device: paged_logits_inputs(model, **asked, device=device)


def _topk(**inputs: Any) -> Make:
    return lambda device: topk_inputs(**{"tokens": 3, "keys": 5000} | inputs, device=device)


def _kinds(k: int) -> Make:
    values = [0.0, -0.0, 1e-45, -1e-45, torch.inf, -torch.inf, 3.4e38, -3.4e38, 1.0, -1.0, 2.0**-126, 0.0]
    rows = [values, values[::-1], [-torch.inf] * 12, [*values[:11], torch.nan]]
    return lambda device: {"logits": torch.tensor(rows, device=device, dtype=torch.float32), "k": k}


def _neighbours(sign: int) -> Make:
    """600 consecutive floats in random order."""
    random = torch.Generator(device="cpu").manual_seed(1)
    bits = 0x3F800000 + torch.randperm(600, generator=random, device="cpu").int()
    return lambda device: {"logits": (sign * bits.view(torch.float32))[None].to(device), "k": 123}


def _ranges(starts: Sequence[int], ends: Sequence[int]) -> Make:
    """Rows of 40 columns with these ranges."""

    def made(device: torch.device) -> Arguments:
        ranges = {"row_starts": starts, "row_ends": ends}
        return topk_inputs(tokens=len(starts), keys=40, k=8, ranges=False, device=device) | {
            name: torch.tensor(row, dtype=torch.int32, device=device) for name, row in ranges.items()
        }

    return made


def _times(make: Make, parameter: str, factor: float) -> Make:
    def made(device: torch.device) -> Arguments:
        arguments = make(device)
        return arguments | {parameter: arguments[parameter] * factor}

    return made


def _one_of(make: Make, kept: str) -> Make:
    def made(device: torch.device) -> Arguments:
        return {name: value for name, value in make(device).items() if not name.startswith("row_") or name == kept}

    return made
