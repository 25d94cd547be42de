"""What every kernel of `fused_moe` must do. Subclass `ExpertsContract` and name the kernel."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.moe.experts.cases import FEATURES, PLAIN
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.problem import ASKED_FORMATS, FORMATS, FP8_FORMATS
from kernelhub.ops.moe.experts.tolerance import compare
from kernelhub.testing import KernelCase, OpContract
from tests.conftest import DEVICE, HAS_GPU

BIASED = dataclasses.replace(PLAIN, name="biased", bias=True)
NARROW = {"hidden_size": 64, "intermediate_size": 64}  # for tests of many calls


def some_of(weights: Tensor, experts: list[int]) -> Tensor:
    """The weights of some experts; torch 2.8 cannot index float8 on a CPU but by its bytes."""
    return weights.view(torch.uint8)[experts].view(weights.dtype) if weights.itemsize == 1 else weights[experts]


def rolled(scale: Tensor) -> Tensor:
    """Scales of the next expert and rows, which are never those that are right."""
    return scale.view(torch.uint8).roll(1, 2).view(scale.dtype) if scale.itemsize == 1 else scale.roll((1, 1), (0, 1))


class ExpertsContract(OpContract):
    """On a CPU the cases of the op's smaller shape; where Triton interprets, features with plain weights only.

    Attributes:
        weights: their format where a test does not ask for others.
        wide: tokens are then multiplied as they are.
        formats: of weights that the kernel has.
        widest: dtype of tokens that the kernel has.
    """

    op = "fused_moe"
    device = DEVICE
    most_elements = None if HAS_GPU else 210_000
    weights: ClassVar[str] = "plain"
    wide: ClassVar[bool] = True
    formats: ClassVar[tuple[str, ...]] = FORMATS
    widest: ClassVar[torch.dtype] = torch.float32

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        found = super().accepted_cases()
        if HAS_GPU or not cls.kernel.startswith("triton."):
            return found
        features = {
            f"{name}, {weights}, {PLAIN.name}" for name in FEATURES for weights in FORMATS if weights != "plain"
        }
        return [case for case in found if case.label not in features]

    def inputs(self, **changes: Any) -> dict[str, Any]:
        usual = {"model": PLAIN, "tokens": 5, "device": self.device, "weights": self.weights}
        arguments = moe_inputs(**usual | changes)
        as_they_are = self.wide and "weights" not in changes
        return arguments | {"activation_dtype": arguments["x"].dtype} if as_they_are else arguments

    def those_of(self, *formats: str) -> list[str]:
        """Those that the kernel has, of formats that a test is for."""
        found = [weights for weights in formats if weights in self.formats]
        if not found:
            pytest.skip(f"{self.kernel} has not {', '.join(formats)}: one test")
        return found

    def run(self, arguments: dict[str, Any], **more: Any) -> Tensor:
        return kernelhub.fused_moe(**arguments, **more, backend=self.kernel)

    def check(self, out: Tensor, arguments: dict[str, Any]) -> None:
        assert (out.shape, out.dtype) == (arguments["x"].shape, arguments["x"].dtype)
        agreement = compare(out, arguments)
        assert agreement.ok, str(agreement)

    def test_static_scales_of_activations(self) -> None:
        for weights in self.those_of("fp8_tensor", "fp8_channel"):
            arguments = self.inputs(weights=weights)
            scales = {
                "a1_scale": torch.tensor(3.0 / 448, device=self.device),
                "a2_scale": torch.tensor([1.0 / 448], device=self.device),
            }
            out = self.run(arguments | scales)
            self.check(out, arguments | scales)  # some tokens reach beyond 3.0, and saturate
            for name in scales:
                assert not compare(out, arguments | scales | {name: 0.5 * scales[name]}).ok

    @pytest.mark.parametrize("form", ["fp8_block_gate_up", "mxfp8", "nvfp4"])
    def test_a_format_is_for_those_who_request_it(self, form: str) -> None:
        sizes = {"intermediate_size": 256} if form != "nvfp4" else NARROW
        asked = self.inputs(activation_dtype=form, weights=ASKED_FORMATS[form][0], tokens=9, **sizes)
        if kernelhub.fused_moe.explain(**asked, backend=self.kernel).selected is None:
            pytest.skip(f"{self.kernel} has not {form}: one format")
        usual = {name: item for name, item in asked.items() if name not in ("activation_dtype", "a1_scale", "a2_scale")}
        mine, exact = self.run(asked), self.run(usual)
        self.check(mine, asked)
        self.check(exact, usual)
        assert not compare(mine, usual).ok
        assert not compare(exact, asked).ok
        assert not compare(mine, asked | {"topk_weights": 1.1 * asked["topk_weights"]}).ok
        if form == "nvfp4":
            for name in ("a1_scale", "a2_scale"):
                other = asked | {name: 1.3 * asked[name]}
                assert not compare(mine, other).ok
                self.check(self.run(other), other)
        x = asked["x"].clone()
        x[1, 3] = torch.nan
        out = self.run(asked | {"x": x})
        assert out[1].isnan().all()
        assert torch.equal(out[2:], mine[2:])
        assert not self.run(asked | {"x": torch.zeros_like(x)}).any()

    def test_scales_of_either_shape(self) -> None:
        for weights in self.those_of("fp8_tensor", "fp8_channel", "nvfp4", "mxfp4"):
            arguments = self.inputs(weights=weights, **NARROW)
            want = self.run(arguments)
            names = [name for name in ("w13_scale", "w2_scale") if arguments[name].ndim < 3]
            names += [name for name in ("w13_global_scale", "w2_global_scale") if name in arguments]
            other = arguments | {name: arguments[name].unsqueeze(-1) for name in names}
            if weights == "mxfp4":
                other = arguments | {name: arguments[name].view(torch.uint8) for name in ("w13_scale", "w2_scale")}
            assert torch.equal(self.run(other), want)
            if weights in ("nvfp4", "mxfp4") and hasattr(torch, "float4_e2m1fn_x2"):
                pairs = {name: arguments[name].view(torch.float4_e2m1fn_x2) for name in ("w13", "w2")}
                assert torch.equal(self.run(arguments | pairs), want)

    def test_every_argument_changes_the_result(self) -> None:
        nvfp4 = "nvfp4" in self.formats
        sizes: dict[str, Any] = NARROW if nvfp4 else {}
        base = self.inputs(model=BIASED, weights="nvfp4" if nvfp4 else self.weights, **sizes)
        base |= {"activation": "swiglu_oai", "limit": 0.5}
        out = self.run(base)
        self.check(out, base)
        x = base["x"]
        for change in (
            {"activation": "silu"},
            {"alpha": 1.0},
            {"limit": 1.0},
            {"w13_bias": None},
            {"w2_bias": None},
            {"apply_router_weight_on_input": True},
            {"residual": x},
            {"topk_weights": base["topk_weights"].flip(1)},
            {"topk_ids": base["topk_ids"].flip(1)},
            *({name: 1.05 * base[name]} for name in ("w13_global_scale", "w2_global_scale") if name in base),
            *({name: rolled(base[name])} for name in ("w13_scale", "w2_scale") if name in base),
            {"expert_map": torch.tensor([1, 0, 2, 3, 4], dtype=torch.int32, device=self.device)},
        ):
            assert not compare(out, base | change).ok, change.keys()
            self.check(self.run(base | change), base | change)

    def test_integers_of_four_bits_have_all_their_values(self) -> None:
        arguments = self.inputs(weights="mxint4", model=BIASED, **NARROW)
        if kernelhub.fused_moe.explain(**arguments, backend=self.kernel).selected is None:
            pytest.skip(f"{self.kernel} has not mxint4: one format")
        for name in ("w13", "w2"):
            codes = torch.arange(arguments[name].numel(), device=self.device) % 256
            arguments[name] = codes.to(torch.uint8).view(arguments[name].shape)
        out = self.run(arguments)
        self.check(out, arguments)
        for name in ("w13", "w2"):
            swapped = arguments[name] >> 4 | arguments[name] << 4
            for other in (swapped, arguments[name] ^ 0x88, arguments[name] ^ 0x80):
                assert not compare(out, arguments | {name: other}).ok
                self.check(self.run(arguments | {name: other}), arguments | {name: other})
            scale = arguments[f"{name}_scale"]
            for other in (-scale, scale.roll(1, 2), scale.roll(1, 1)):
                assert not compare(out, arguments | {f"{name}_scale": other}).ok
                self.check(self.run(arguments | {f"{name}_scale": other}), arguments | {f"{name}_scale": other})

    def test_gate_stands_before_up(self) -> None:
        arguments = self.inputs(tokens=1, dtype=self.widest)
        w13 = torch.zeros_like(arguments["w13"])
        w13[:, :128, 0], w13[:, 128:, 0] = -3.0, 2.0
        arguments |= {"w13": w13, "x": torch.ones_like(arguments["x"])}
        if self.weights != "plain":
            arguments["w13_scale"] = torch.ones_like(arguments["w13_scale"])
        inner = -3.0 / (1 + torch.tensor(3.0, dtype=torch.float64).exp()) * 2.0
        want = torch.zeros(160, dtype=torch.float64, device=self.device)
        for place in range(2):
            expert = int(arguments["topk_ids"][0, place])
            down = arguments["w2"][expert].double().sum(1)
            if self.weights != "plain":
                scale = arguments["w2_scale"][expert]
                down *= scale[:, 0].repeat_interleave(128)[:160] if scale.ndim == 2 else scale
            want += float(arguments["topk_weights"][0, place]) * inner * down
        # Tensor cores add products of float8 in 14 bits.
        wide = self.wide and self.widest is torch.float32
        near = {"rtol": 1e-4, "atol": 1e-5} if wide else {"rtol": 2.0**-9, "atol": 5e-4}
        torch.testing.assert_close(self.run(arguments)[0].double(), want, **near)

    def test_ids_outside_of_the_experts_are_left_out(self) -> None:
        arguments = self.inputs()
        for outside in (-1, 5, 1 << 30, -(1 << 31)):
            ids = arguments["topk_ids"].clone()
            ids[0, 1], ids[2] = outside, outside
            weights = arguments["topk_weights"].clone()
            weights[2, 0] = torch.nan  # it is not read either
            out = self.run(arguments | {"topk_ids": ids, "topk_weights": weights})
            self.check(out, arguments | {"topk_ids": ids})
            assert not out[2].any()
        nowhere = torch.full_like(arguments["topk_ids"], -1)
        assert torch.equal(self.run(arguments | {"topk_ids": nowhere, "residual": arguments["x"]}), arguments["x"])

    def test_a_map_says_which_experts_are_here(self) -> None:
        whole = self.inputs(tokens=9)
        want = self.run(whole)
        shares = []
        for here in ((3, 0), (1, 4, 2)):
            table = torch.full((5,), -1, dtype=torch.int32, device=self.device)
            table[list(here)] = torch.arange(len(here), dtype=torch.int32, device=self.device)
            names = [name for name in ("w13", "w2", "w13_scale", "w2_scale") if name in whole]
            part = {name: some_of(whole[name], list(here)) for name in names}
            share = self.run(whole | part | {"expert_map": table})
            self.check(share, whole | part | {"expert_map": table})
            shares.append(share.float())
        scale = float(want.float().square().mean().sqrt())
        assert float((sum(shares) - want.float()).abs().max()) <= 2**-5 * scale * 2
        table = torch.tensor([1, 0, 7, -1, 4], dtype=torch.int32, device=self.device)  # 7 is nowhere
        self.check(self.run(whole | {"expert_map": table}), whole | {"expert_map": table})

    def test_the_result_may_take_the_place_of_tokens_or_of_what_is_added(self) -> None:
        arguments = self.inputs()
        residual = torch.randn_like(arguments["x"])
        want = self.run(arguments | {"residual": residual})
        self.check(want, arguments | {"residual": residual})
        place = residual.clone()
        assert self.run(arguments | {"residual": place}, out=place) is place
        assert torch.equal(place, want)
        tokens = arguments["x"].clone()
        self.run(arguments | {"x": tokens, "residual": residual}, out=tokens)
        assert torch.equal(tokens, want)

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs(model=BIASED)
        arguments["residual"] = torch.randn_like(arguments["x"])
        want = self.run(arguments)
        wide = torch.full((5, 2 * 160), torch.nan, dtype=torch.bfloat16, device=self.device)
        moved = {name: arguments[name].t().contiguous().t() for name in ("x", "topk_weights", "topk_ids", "residual")}
        moved |= {name: arguments[name].repeat_interleave(2, 1)[:, ::2] for name in ("w13_bias", "w2_bias")}
        moved["w13"] = torch.cat([arguments["w13"], arguments["w13"]], 2)[..., :160]
        moved["w2"] = arguments["w2"].transpose(0, 1).contiguous().transpose(0, 1)
        self.run(arguments | moved, out=wide[:, ::2])
        assert torch.equal(wide[:, ::2], want)
        assert wide[:, 1::2].isnan().all()
        assert self.run(arguments | moved).is_contiguous()

    def test_nan_stays_with_its_token(self) -> None:
        for arguments in (self.inputs(), *(self.inputs(weights=one) for one in self.formats if one == "fp8_channel")):
            want = self.run(arguments)
            x = arguments["x"].clone()
            x[1, 3] = torch.nan
            out = self.run(arguments | {"x": x})
            assert out[1].isnan().all()
            others = [0, 2, 3, 4]
            assert torch.equal(out[others], want[others])

    def test_tiny_scales_and_zeros_stay_finite(self) -> None:
        for weights in self.those_of("fp8_block", "fp8_channel"):
            arguments = self.inputs(weights=weights)
            arguments["x"][0] = 0.0
            arguments["w2_scale"] = arguments["w2_scale"] * 1e-23
            out = self.run(arguments)
            assert out.isfinite().all()
            assert not out[0].any()

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        weights = "fp8_block" if "fp8_block" in self.formats else self.weights
        arguments = self.inputs(weights=weights)
        plan = kernelhub.fused_moe.prepare(**arguments, backend=self.kernel)
        assert plan.kernel == self.kernel
        step = (arguments["x"], arguments["topk_weights"], arguments["topk_ids"])
        assert torch.equal(plan.run(*step), self.run(arguments))
        assert plan.workspace_bytes(num_tokens=64) >= 64 * 2 * (160 + 128) * 2
        other = "w13 has dtype bfloat16" if weights == "plain" else "the plan is for dtype bfloat16"
        with pytest.raises(InvalidArgument, match=other):
            plan.run(step[0].half(), *step[1:])
        for bad in (step[0][0, 0], step[0][0], None, step[0].clone().requires_grad_()):
            with pytest.raises(InvalidArgument) as caught:
                plan.run(bad, *step[1:])
            assert caught.value.parameter == "x"
        with pytest.raises(InvalidArgument, match=r"topk_ids is int64"):
            plan.run(*step[:2], step[2].long())
        with pytest.raises(InvalidArgument, match="the plan is for residual False"):
            plan.run(*step, residual=step[0])
        selection = kernelhub.fused_moe.explain(**arguments, backend=self.kernel)
        assert selection.problem == plan.selection.problem
        quantised = "bfloat16" if weights == "plain" else "float8_e4m3fn"
        assert (selection.problem.weights, selection.problem.activation_dtype) == (weights, quantised)
        assert (selection.problem.weights in FP8_FORMATS) == (weights != "plain")
