"""Cases of `merge_attention_states`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases, joined, worst
from kernelhub.ops.formats import E4M3
from kernelhub.ops.merge.inputs import merge_inputs
from kernelhub.ops.merge.tolerance import largest_error_allowed, lse_error_allowed, quantized_error_allowed


class MergeCases(OpCases):
    """States of two parts and of more, some of them without keys."""

    op = "merge_attention_states"

    def cases(self) -> Iterator[Case]:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            label = str(dtype)[6:]
            yield Case(label=label, make=_make(dtype=dtype), quick=True, repeats=True)
            yield Case(label=f"{label}, lse", make=_make(dtype=dtype, return_lse=True), quick=True, repeats=True)
        for parts in (3, 4, 8, 9):
            yield Case(label=f"{parts} parts", make=_make(parts=parts, return_lse=True), quick=parts == 3)
        for width in (1, 16, 72, 80, 96, 128, 192, 256, 512):
            yield Case(label=f"width {width}", make=_make(head_dim=width))
        for heads in (1, 3, 7):
            yield Case(label=f"{heads} heads", make=_make(num_heads=heads))
        yield Case(label="128 heads of 128", make=_make(num_heads=128, head_dim=128, return_lse=True), quick=True)
        yield Case(label="batched", make=_make(batch=3, tokens=5, return_lse=True), quick=True)
        yield Case(label="batch of one", make=_make(batch=1, tokens=5))
        yield Case(label="batched, 5 parts", make=_make(batch=3, tokens=37, parts=5, dtype=torch.float16))
        yield Case(label="every row has keys", make=_make(empty=False))
        for label, scale in (("a number", 0.02), ("below zero", -0.3), ("tiny: all saturate", 1e-6)):
            # Compared with another scale, since without one the result has another dtype.
            other = None if scale == 1e-6 else _make(return_lse=True, out_scale=2 * scale)
            make = _make(return_lse=True, out_scale=scale)
            quick = label == "a number"
            yield Case(label=f"float8, scale {label}", make=make, quick=quick, without=other, feature="out_scale")
        for parts in (2, 5):
            make, other = (
                _make(return_lse=True, parts=parts, out_scale=torch.tensor(s, dtype=torch.float32, device="cpu"))
                for s in (0.05, 0.1)
            )
            label = f"float8, scale in memory, {parts} parts"
            yield Case(
                label=label, make=make, quick=parts == 2, without=other, feature="out_scale in memory", repeats=True
            )
        for shift in (300.0, -300.0, 1e4):
            yield Case(label=f"LSE shifted by {shift:g}", make=_shifted(shift))
        for tokens in (0, 1, 2, 3, 31, 32, 33, 129, 200):
            make = _make(tokens=tokens, return_lse=True)
            yield Case(label=f"{tokens} tokens", make=make, tokens=True, quick=tokens in (0, 1, 2, 33))

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        first, lse = arguments["outs"][0], arguments["lses"][0]
        scaled = arguments.get("out_scale") is not None
        places = {"out": (tuple(first.shape), E4M3 if scaled else first.dtype)}
        return places | ({"out_lse": (tuple(lse.shape), lse.dtype)} if arguments.get("return_lse") else {})

    def later(self, arguments: Arguments) -> Arguments:
        """The tokens in the other order: a row without keys, whose result is no number, keeps its LSE."""
        turn = {"outs": [part.flip(-3) for part in arguments["outs"]]}
        return arguments | turn | {"lses": [part.flip(-1) for part in arguments["lses"]]}

    def in_place(self, given: Arguments) -> tuple[Arguments, dict[str, Tensor]] | None:
        if given.get("out_scale") is not None:
            return None
        places = {"out": given["outs"][-1]}
        return given, places | ({"out_lse": given["lses"][-1]} if given.get("return_lse") else {})

    def expect(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
        given = {"return_lse": True, "out_scale": arguments.get("out_scale"), "dtype": torch.float64}
        want, want_lse = self.reference(arguments["outs"], arguments["lses"], **given)
        return want, want_lse

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        want, want_lse = expected
        out, scale = results["out"], arguments.get("out_scale")
        largest = max(
            (float(part.double().nan_to_num().abs().max()) for part in arguments["outs"] if part.numel()), default=0
        )
        if scale is None:
            allowed = torch.full_like(want, largest_error_allowed(out.dtype, largest))
        else:
            allowed = quantized_error_allowed(want, largest, float(scale))
        figures = [worst((out.double() - want).abs(), allowed)]
        if "out_lse" in results:
            lse = results["out_lse"].double()
            error = torch.where(lse == want_lse.double(), 0.0, (lse - want_lse).abs())
            figures.append(worst(error, lse_error_allowed(want_lse)))
        return Judgement(*joined(*figures), {"out": want, "out_lse": want_lse})


def _make(*, return_lse: bool = False, out_scale: float | Tensor | None = None, **inputs: object) -> Make:
    def made(device: torch.device) -> Arguments:
        usual: Arguments = {"tokens": 20, "num_heads": 5, "head_dim": 64}
        arguments = merge_inputs(**usual | inputs, device=device)
        if out_scale is not None:
            arguments["out_scale"] = out_scale.to(device) if isinstance(out_scale, Tensor) else out_scale
        return arguments | ({"return_lse": True} if return_lse else {})

    return made


def _shifted(shift: float) -> Make:
    """Logs far from zero, of which the exponentials would overflow or vanish."""

    def made(device: torch.device) -> Arguments:
        arguments = merge_inputs(tokens=20, num_heads=5, head_dim=64, empty=False, device=device)
        return arguments | {"lses": [lse + shift for lse in arguments["lses"]]}

    return made
