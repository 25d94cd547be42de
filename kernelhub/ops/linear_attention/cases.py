"""Cases of `linear_attention`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases, joined, worst
from kernelhub.ops.linear_attention.inputs import linear_inputs
from kernelhub.ops.linear_attention.tolerance import result_error_allowed, state_error_allowed
from kernelhub.ops.models.shapes import LinearModel

SMALL, REAL = LinearModel("small", 3, 32, 16), LinearModel("128 wide", 2, 128, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ABSOLUTE = ("q", "k", "v", "state")


class LinearAttentionCases(OpCases):
    """Prefill, decode and ragged batches; states that are read, kept, and stored in a pool."""

    op = "linear_attention"
    written = ("out_state",)

    def cases(self) -> Iterator[Case]:
        for model in (SMALL, REAL):
            for name, inputs in _forms().items():
                label = f"{name}, {model.name}"
                yield Case(label=label, make=_make(model, inputs), quick=True, repeats=True)
                kept = _make(model, inputs, {"return_state": True})
                yield Case(label=f"{label}, new state", make=kept, quick=True)
                begun = _make(model, inputs | {"state": True}, {"return_state": True})
                yield Case(label=f"{label}, from a state", make=begun, without=kept, feature="state", quick=True)
                for scale in (0.3, -2.0, 0.0, 2.0**-40):
                    yield Case(
                        label=f"{label}, scale {scale:g}",
                        make=_make(model, inputs, {"scale": scale}),
                        without=_make(model, inputs),
                        feature="scale",
                        quick=scale == 0.3,
                    )
                slots = (2, -1, 0, 3)[: _sequences(inputs)]
                pool = _make(model, inputs | {"slots": slots, "num_slots": 5}, {"return_state": True})
                yield Case(label=f"{label}, from a pool", make=pool, quick=True)
                if "lengths" in inputs:
                    yield Case(label=f"{label}, padded", make=_padded(pool), quick=True)
                elsewhere = _elsewhere(_make(model, inputs | {"slots": slots, "num_slots": 5}))
                yield Case(label=f"{label}, into another pool", make=elsewhere, quick=True)
            for dtype in DTYPES[1:]:
                for name in ("prefill", "decode"):
                    make = _make(model, _forms()[name] | {"dtype": dtype, "state": True}, {"return_state": True})
                    yield Case(label=f"{name}, {str(dtype)[6:]}, {model.name}", make=make)
            for tokens in (0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 129):
                make = _make(model, {"batch": 1, "tokens": tokens})
                label = f"{tokens} tokens, {model.name}"
                yield Case(label=label, make=make, tokens=True, quick=tokens in (0, 1, 2, 17, 65))
            float32 = {"dtype": torch.float32, "slots": (2, 0), "num_slots": 3}
            make = _make(model, {"lengths": (30, 20)} | float32, {"return_state": True})
            yield Case(label=f"ragged, float32, from a pool, {model.name}", make=make)
            make = _make(model, {"lengths": (3, 65, 0, 1), "state": True}, {"return_state": True})
            yield Case(label=f"ragged about a chunk's end, from a state, {model.name}", make=make)
        for width, values in ((1, 1), (7, 33), (64, 8), (100, 40)):
            shape = LinearModel("", 2, width, values)
            yield Case(label=f"widths {width}, {values}", make=_make(shape, {"tokens": 20, "batch": 1, "state": True}))

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"out": (tuple(arguments["v"].shape), arguments["v"].dtype)}

    def untouched(self, arguments: Arguments) -> dict[str, Tensor]:
        """Tokens past the last offset."""
        q, offsets = arguments["q"], arguments.get("cu_seqlens")
        return {} if offsets is None else {"out": torch.arange(q.shape[0], device=q.device) >= offsets[-1]}

    def results(self, returned: Any, destinations: Mapping[str, Tensor], arguments: Arguments) -> dict[str, Tensor]:
        return dict(destinations) | ({"state": returned[1]} if isinstance(returned, tuple) else {})

    def expect(self, arguments: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        asked = {name: value for name, value in arguments.items() if name != "return_state"}
        want, want_state = self.reference(**asked, return_state=True, dtype=torch.float64)
        sized = {name: value.abs() if name in _ABSOLUTE else value for name, value in asked.items()}
        sized["scale"] = abs(arguments.get("scale", 1.0))
        size, size_state = self.reference(**sized, return_state=True, dtype=torch.float64)
        if "out_state" in arguments:
            _, size_state = self.reference(**sized | {"out_state": None}, return_state=True, dtype=torch.float64)
        return want, want_state, size, size_state

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        want, want_state, size, size_state = expected
        q, out, past = arguments["q"], results["out"], self.untouched(arguments)
        tokens, width = q.shape[-3], q.shape[-1]
        if past:
            out, want, size = (each[~past["out"]] for each in (out, want, size))
        # Whether a kernel multiplies in the operands' type is not in its record; so it is allowed to.
        allowed = result_error_allowed(want, size, q.dtype, tokens, width, rounds_operands=True)
        figures = [worst((out.double() - want).abs(), allowed + 1e-30)]
        if "out_state" in arguments:  # slots of no sequence stay as they are
            kept = arguments.get("state_indices")
            kept = torch.arange(len(want_state), device=q.device) if kept is None else kept
            others = torch.ones(len(want_state), dtype=torch.bool, device=q.device)
            others[kept[kept >= 0].long()] = False
            touched = int((results["state"][others] != arguments["out_state"][others]).sum())
            if touched:
                return Judgement(
                    torch.inf, f"{touched} elements of states that are not its own were written", {"out": want}
                )
            slots, mine = kept[kept >= 0].long(), kept >= 0
            allowed = state_error_allowed(size_state[mine], q.dtype, tokens, width, rounds_operands=True)
            error = (results["state"][slots].double() - want_state[slots]).abs()
            ratio, text = worst(error, allowed + 1e-30)
            figures.append((ratio, f"the state is {text}"))
        elif "state" in results:
            allowed = state_error_allowed(size_state, q.dtype, tokens, width, rounds_operands=True)
            error = (results["state"].double() - want_state).abs()
            ratio, text = worst(error, allowed + 1e-30)
            figures.append((ratio, f"the state is {text}"))
        return Judgement(*joined(*figures), {"out": want, "state": want_state})


def _forms() -> dict[str, Arguments]:
    return {
        "prefill": {"batch": 2, "tokens": 40},
        "decode": {"batch": 3, "tokens": 1},
        "ragged": {"lengths": (70, 1, 0, 33)},
    }


def _sequences(inputs: Arguments) -> int:
    return len(inputs["lengths"]) if "lengths" in inputs else int(inputs["batch"])


def _elsewhere(make: Make) -> Make:
    """States that are kept in another pool than the one they come from."""

    def made(device: torch.device) -> Arguments:
        arguments = make(device)
        return arguments | {"out_state": torch.full_like(arguments["state"], 7.0)}

    return made


def _padded(make: Make) -> Make:
    """Three more tokens, which belong to no sequence and hold no numbers."""

    def made(device: torch.device) -> Arguments:
        arguments = make(device)
        rows = {name: arguments[name] for name in ("q", "k", "v")}
        return arguments | {
            name: torch.cat([tensor, torch.full_like(tensor[:1], torch.nan).expand(3, -1, -1)])
            for name, tensor in rows.items()
        }

    return made


def _make(model: LinearModel, inputs: Arguments, more: Arguments | None = None) -> Make:
    return lambda device: linear_inputs(model, **inputs, device=device) | (more or {})
