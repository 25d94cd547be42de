"""Cases of `fused_moe`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.case import Arguments, Case, Judgement, Make, OpCases, Packing
from kernelhub.ops.models.shapes import MoeModel
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.problem import ASKED_FORMATS, FORMATS, SILU
from kernelhub.ops.moe.experts.problem import PLAIN as NOT_QUANTISED
from kernelhub.ops.moe.experts.tolerance import Expected, compare, expected_of

TOKENS = (0, 1, 2, 3, 16, 17, 64, 65, 90)
PLAIN = MoeModel("5 experts", num_experts=5, top_k=2, hidden_size=160, intermediate_size=128)
WHOLE = MoeModel("8 experts", num_experts=8, top_k=2, hidden_size=256, intermediate_size=256)


# What changes the result, from a base with biases and silu.
FEATURES: dict[str, Arguments] = {
    "activation gelu": {"activation": "gelu"},
    "activation gelu_tanh": {"activation": "gelu_tanh"},
    "activation swiglu_oai": {"activation": "swiglu_oai"},
    "activation swiglu_clamped": {"activation": "swiglu_clamped", "alpha": 1.0, "limit": 0.5},
    "activation swiglu_step": {"activation": "swiglu_step", "limit": 0.5},
    "w13_bias": {"w13_bias": None},
    "w2_bias": {"w2_bias": None},
    "apply_router_weight_on_input": {"apply_router_weight_on_input": True},
    "residual": {"residual": "tokens"},
    "expert_map": {"expert_map": "swapped"},
    "topk_weights": {"topk_weights": "flipped"},
}

OFF = ("static_scales", "apply_router_weight_on_input", "expert_map", "residual")  # facets that are off or on


class ExpertsCases(OpCases):
    """Every format of weights and every feature, at an awkward shape and at one of whole blocks."""

    op = "fused_moe"
    formats = ("dtype", "weights", "activation_dtype")
    read = (*formats, "activation", *OFF)

    def concerns(self, of_case: Any, served: Any) -> bool:
        """Whether a case has weights and activations that are served, and no feature that is not, but biases.

        Weights that are not quantised count always: only with them there is a case of each activation and feature.
        """
        own = of_case.weights, of_case.activation_dtype
        if own != (served.weights, served.activation_dtype) and own != (NOT_QUANTISED, of_case.dtype):
            return False
        known = of_case.activation in (SILU, served.activation) and of_case.dtype in ("bfloat16", served.dtype)
        return known and all(getattr(of_case, name) <= getattr(served, name) for name in OFF)

    def cases(self) -> Iterator[Case]:
        for model in (PLAIN, WHOLE):
            biased = dataclasses.replace(model, bias=True)
            quick = model is PLAIN
            for weights in FORMATS:
                label, inputs = f"{weights}, {model.name}", {"weights": weights}
                yield Case(label=label, make=_make(model, inputs), quick=quick, repeats=True)
                yield Case(label=f"{label}, biases", make=_make(biased, inputs))
                if weights.startswith("fp8"):
                    wide = _make(model, inputs, {"activation_dtype": torch.bfloat16})
                    yield Case(label=f"{label}, wide tokens", make=wide)
                for tokens in TOKENS if weights in ("plain", "fp8_block") else (0, 1, 3):
                    make = _make(model, inputs | {"tokens": tokens})
                    fast = quick and weights in ("plain", "fp8_block") and tokens in (0, 1, 2, 17)
                    yield Case(label=f"{tokens} tokens, {label}", make=make, tokens=True, quick=fast)
            for form, fitting in ASKED_FORMATS.items():
                for weights in fitting:
                    inputs = {"weights": weights, "activation_dtype": form}
                    label = f"activations in {form}, {weights}, {model.name}"
                    first = weights == fitting[0]
                    yield Case(label=label, make=_make(model, inputs), quick=quick and first, repeats=first)
                    yield Case(label=f"{label}, biases", make=_make(biased, inputs))
                    for tokens in (0, 1, 17):
                        yield Case(label=f"{tokens} tokens, {label}", make=_make(model, inputs | {"tokens": tokens}))
            for weights in ("plain", "fp8_block", "mxfp4", "mxint4"):
                usual = {"weights": weights, "tokens": 5 if weights == "plain" or model is WHOLE else 2}
                for name, change in FEATURES.items():
                    yield Case(
                        label=f"{name}, {weights}, {model.name}",
                        make=_changed(_make(biased, usual), change),
                        without=_changed(_make(biased, usual), {}),
                        feature=name.partition(" ")[0],
                        quick=quick and weights == "plain",
                    )
            for name, change in {"limit": {"limit": 0.25}, "alpha": {"alpha": 0.5}}.items():
                clamped = {"activation": "swiglu_oai", "limit": 1.0}
                yield Case(
                    label=f"{name} of swiglu_oai, {model.name}",
                    make=_changed(_make(biased, {}), clamped | change),
                    without=_changed(_make(biased, {}), clamped),
                    feature=name,
                    quick=quick,
                )
            for ids in ("some nowhere", "all to the first", "all to the last", "each twice"):
                make = _changed(_make(model, {}), {"topk_ids": ids})
                yield Case(label=f"ids: {ids}, {model.name}", make=make, quick=quick and ids == "some nowhere")
            for weights in ("fp8_tensor", "fp8_channel"):
                yield Case(
                    label=f"static scales, {weights}, {model.name}",
                    make=_changed(_make(model, {"weights": weights}), {"a1_scale": 3.0 / 448, "a2_scale": 1.0 / 448}),
                    without=_changed(
                        _make(model, {"weights": weights}), {"a1_scale": 1.0 / 448, "a2_scale": 0.2 / 448}
                    ),
                    feature="a1_scale, a2_scale",
                    quick=quick,
                )
            for weights in ("fp8_block", "fp8_channel"):
                yield Case(
                    label=f"tiny scales, {weights}, {model.name}",
                    make=_tiny(_make(model, {"weights": weights})),
                    quick=quick,
                )
            for dtype in (torch.float16, torch.float32):
                for weights in ("plain", "fp8_channel", "fp8_block", "mxfp4", "nvfp4", "mxint4"):
                    make = _make(model, {"dtype": dtype, "weights": weights})
                    yield Case(label=f"{str(dtype)[6:]}, {weights}, {model.name}", make=make)
        for weights, hidden, inner in (
            *(("plain", 64, 64), ("plain", 33, 17), ("plain", 130, 66), ("plain", 128, 193), ("fp8_channel", 64, 40)),
            *(("mxfp4", 32, 96), ("mxint4", 32, 96), ("nvfp4", 48, 16), ("fp8_tensor", 100, 36)),
            *(("fp8_block", 129, 256), ("fp8_block", 96, 128)),
        ):
            shape = {"weights": weights, "hidden_size": hidden, "intermediate_size": inner}
            yield Case(label=f"{hidden} by {inner}, {weights}", make=_make(PLAIN, shape), quick=hidden == 33)
        biased = dataclasses.replace(PLAIN, bias=True)
        for form in ("fp8_block_gate_up", "mxfp8", "nvfp4"):
            asked = {"weights": ASKED_FORMATS[form][-1], "activation_dtype": form}
            before = {"apply_router_weight_on_input": True}
            clamped = {"activation": "swiglu_oai", "limit": 0.5}
            label, small = f"activations in {form}", asked | {"dtype": torch.float32, "hidden_size": 64, "tokens": 2}
            yield Case(label=f"{label}, the router's weight before", make=_make(biased, asked, before))
            yield Case(label=f"{label}, clamped", make=_make(biased, asked, clamped))
            yield Case(label=f"{label}, of float32", make=_make(biased, small))
        odd = {"weights": "fp8_block_ue8m0", "activation_dtype": "mxfp8", "hidden_size": 129, "intermediate_size": 256}
        yield Case(label="activations in mxfp8, 129 by 256", make=_make(PLAIN, odd))
        before = {"apply_router_weight_on_input": True}
        yield Case(label="router's weight before, fp8_channel", make=_make(PLAIN, {"weights": "fp8_channel"}, before))
        for name in ("swiglu_oai", "swiglu_clamped", "swiglu_step"):
            hard = {"activation": name, "alpha": 0.5, "limit": 0.25}
            yield Case(label=f"{name} clamped hard", make=_make(biased, {}, hard))
        for experts, top_k in ((1, 1), (23, 1), (23, 22)):
            sizes = {"num_experts": experts, "top_k": top_k, "tokens": 3}
            yield Case(label=f"{top_k} of {experts} experts", make=_make(PLAIN, sizes))

    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"out": (tuple(arguments["x"].shape), arguments["x"].dtype)}

    def expect(self, arguments: Arguments) -> tuple[Expected, ...]:
        return expected_of(arguments)

    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        want = expected[0].want
        agreement = compare(results["out"], arguments, expected=expected)
        ratio = agreement.ratio if agreement.finite else torch.inf
        figures = f"{agreement.worst:.2g} of what an element may be off, {agreement.overall:.2g} of all together"
        return Judgement(ratio, figures if agreement.finite else "some elements are no numbers", {"out": want})

    def pack(self, plan: Any, arguments: Arguments) -> tuple[Arguments, tuple[Packing, ...]]:
        names = {side: [side + part for part in _PARTS] for side in ("w13", "w2")}
        layer = {name: arguments.get(name) for side in names.values() for name in side}
        made = dict(zip(names, plan.pack(**layer), strict=True))
        rest = {name: value for name, value in arguments.items() if name not in layer}
        each = tuple(Packing(made[side], tuple(layer[name] for name in names[side])) for side in names)
        return rest | made, each


_PARTS = ("", "_scale", "_global_scale", "_bias")


def _make(model: MoeModel, inputs: Arguments, more: Arguments | None = None) -> Make:
    asked: Arguments = {"tokens": 5} | inputs
    return lambda device: moe_inputs(model, **asked, device=device) | (more or {})


def _changed(make: Make, change: Arguments) -> Make:
    """Arguments with some of them changed; words are placeholders for tensors of the call."""

    def made(device: torch.device) -> Arguments:
        arguments = make(device)
        for name, value in change.items():
            if value == "tokens":
                value = arguments["x"].clone()
            elif value == "swapped":
                value = torch.arange(arguments["w13"].shape[0], dtype=torch.int32, device=device).flip(0)
                value[2] = -1
            elif value == "some nowhere":
                value = arguments["topk_ids"].clone()
                value[0, 1], value[2], value[3, 0] = -1, arguments["w13"].shape[0], 1 << 30
            elif value in ("all to the first", "all to the last"):
                last = 0 if value == "all to the first" else arguments["w13"].shape[0] - 1
                value = torch.full_like(arguments["topk_ids"], last)
            elif value == "each twice":
                value = arguments["topk_ids"][:, :1].expand(-1, 2).contiguous()
            elif value == "flipped":
                value = arguments["topk_weights"].flip(1)
            elif name in ("a1_scale", "a2_scale"):
                value = torch.tensor([value], device=device, dtype=torch.float32)
            arguments[name] = value
        return {name: value for name, value in arguments.items() if value is not None}

    return made


def _tiny(make: Make) -> Make:
    """A token of zeros, and weights that are next to nothing."""

    def made(device: torch.device) -> Arguments:
        arguments = make(device)
        arguments["x"][0] = 0.0
        return arguments | {"w2_scale": arguments["w2_scale"] * 1e-23}

    return made
