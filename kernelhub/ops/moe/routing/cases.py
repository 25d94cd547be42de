"""Cases of `route_experts`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases
from kernelhub.ops.models.shapes import MOE, MoeModel
from kernelhub.ops.moe.routing.inputs import routing_inputs
from kernelhub.ops.moe.routing.tolerance import decided, weights_agree

_BIASED: dict[str, Any] = {"scoring": "sigmoid", "correction_bias": True}
# Experts, experts of a token, groups, groups of a token.
_GROUPED: tuple[tuple[tuple[int, int, int, int], dict[str, Any]], ...] = (
    ((12, 3, 4, 1), {}),
    ((12, 6, 4, 2), _BIASED),
    ((8, 3, 8, 5), _BIASED),
    ((160, 6, 8, 3), _BIASED),
    ((60, 4, 3, 2), {"scoring": "sigmoid"}),
    ((16, 8, 2, 1), _BIASED | {"scoring": "softmax_after_topk"}),
    ((64, 8, 8, 8), _BIASED),
)
TOKENS = (0, 1, 2, 3, 16, 17, 64, 65, 90)


class RoutingCases(OpCases):
    """The routings of published models, and others; every option."""

    op = "route_experts"

    def cases(self) -> Iterator[Case]:
        for name in MOE:
            yield Case(label=name, make=_route(name), quick=True, repeats=True)
            for tokens in TOKENS if name in ("deepseek-v3.2", "gpt-oss-120b") else ():
                make = _route(name, tokens=tokens)
                yield Case(label=f"{tokens} tokens, {name}", make=make, tokens=True, quick=tokens in (0, 1, 2, 17))
        other_bias = torch.linspace(1.0, -1.0, 256, dtype=torch.float32, device="cpu")
        changes: dict[str, Arguments] = {
            "scoring softmax": {"scoring": "softmax"},
            "topk_groups": {"topk_groups": 2},
            "num_groups": {"num_groups": None, "topk_groups": None},
            "correction_bias": {"correction_bias": None},
            "correction_bias of other experts": {"correction_bias": other_bias},
            "renormalize": {"renormalize": False},
            "scaling_factor": {"scaling_factor": 1.0},
            "scaling_factor tiny": {"scaling_factor": 2.0**-40},
            "scaling_factor zero": {"scaling_factor": 0.0},
        }
        for name, change in changes.items():
            base = _route("deepseek-v3.2", tokens=32)
            yield Case(
                label=f"{name}, otherwise",
                make=_otherwise(base, change),
                without=base,
                feature=name.partition(" ")[0],
                quick=True,
            )
        for scoring in ("softmax", "sigmoid", "softmax_after_topk"):
            yield Case(label=f"NaN and infinities, {scoring}", make=_no_numbers(scoring), quick=True)
        for dtype in (torch.bfloat16, torch.float16):
            yield Case(label=str(dtype)[6:], make=_route("qwen3-30b-a3b", dtype=dtype))
        for experts, top_k in ((1, 1), (8, 8), (9, 2), (129, 22), (160, 1), (511, 10), (512, 22)):
            model = MoeModel("", experts, top_k, 1, 1)
            yield Case(label=f"{top_k} of {experts}", make=_route(model))
        for (experts, top_k, groups, chosen), more in _GROUPED:
            model = MoeModel("", experts, top_k, 1, 1, num_groups=groups, topk_groups=chosen, **more)
            yield Case(label=f"{chosen} of {groups} groups of {experts // groups}, {top_k} experts", make=_route(model))
        for label, more in (
            ("softmax, biased", {"correction_bias": True, "renormalize": False}),
            ("logits chosen by a bias", {"scoring": "softmax_after_topk", "correction_bias": True}),
            ("sigmoid, not renormalized", {"scoring": "sigmoid", "renormalize": False}),
        ):
            yield Case(label=label, make=_route(MoeModel("", 32, 5, 1, 1, **more)))

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        shape = (arguments["logits"].shape[0], arguments["top_k"])
        return {"out_weights": (shape, torch.float32), "out_ids": (shape, torch.int32)}

    def expect(self, arguments: Arguments) -> Any:
        return self.reference(**arguments, dtype=torch.float64)

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        weights, ids = results["out_weights"], results["out_ids"]
        want, want_ids = expected
        wants = {"out_weights": want, "out_ids": want_ids}
        ordered = ids.sort(1).values
        if bool((ordered[:, 1:] <= ordered[:, :-1]).any()):
            return Judgement(torch.inf, "an expert is chosen twice for a token", wants)
        if bool(((ids < 0) | (ids >= arguments["logits"].shape[1])).any()):
            return Judgement(torch.inf, "an id is of no expert", wants)
        ordered = ids.sort(1).values
        if bool((ordered[:, 1:] <= ordered[:, :-1]).any()):
            return Judgement(torch.inf, "an expert is chosen twice for a token", wants)
        if bool(((ids < 0) | (ids >= arguments["logits"].shape[1])).any()):
            return Judgement(torch.inf, "an id is of no expert", wants)
        sure = decided(**arguments)  # rounding cannot change the ids of these
        wrong = (ids != want_ids).any(1) & sure
        if bool(wrong.any()):
            return Judgement(torch.inf, f"{int(wrong.sum())} of {len(sure)} tokens go to other experts", wants)
        agree = weights_agree(weights, want, arguments.get("scaling_factor", 1.0)) | ~sure.unsqueeze(1)
        if not bool(agree.all()):
            error = (weights.double() - want).abs()[~agree]
            return Judgement(
                torch.inf, f"{int((~agree).sum())} weights are off, by up to {float(error.max()):.2g}", wants
            )
        return Judgement(0.0, "", wants)


def _route(model: MoeModel | str, **inputs: Any) -> Make:
    return lambda device: routing_inputs(model, **{"tokens": 7} | inputs, device=device)


def _no_numbers(scoring: str) -> Make:
    """Logits with NaN and infinities among numbers."""
    inf, nan = torch.inf, torch.nan
    rows = [[nan, 1.0, nan, 0.0, 3.0], [-inf, 1.0, -inf, 0.0, 2.0], [nan] * 5, [-inf] * 5, [0.0, inf, 1.0, 2.0, nan]]
    options: Arguments = {"top_k": 3, "scoring": scoring, "renormalize": True}
    return lambda device: {"logits": torch.tensor(rows, device=device, dtype=torch.float32), **options}


def _otherwise(make: Make, change: Arguments) -> Make:
    def made(device: torch.device) -> Arguments:
        changed = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in change.items()}
        return {name: value for name, value in (make(device) | changed).items() if value is not None}

    return made
