"""What every kernel of the attention ops must do, with cases made from its record.

Subclass `DenseContract` or `PagedContract` and name the kernel. Inputs are poisoned: outputs hold NaN
before the call, caches hold NaN wherever no sequence is.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.errors import InvalidArgument
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.models.shapes import AttentionModel
from tests.conftest import DEVICE

WIDTHS = (
    (32, 32),
    (64, 64),
    (72, 72),
    (80, 80),
    (96, 96),
    (112, 112),
    (128, 128),
    (192, 128),
    (192, 192),
    (256, 256),
)
HEADS = ((4, 4), (6, 2), (5, 1), (16, 2))
PAGE_SIZES = (1, 3, 16, 64, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# One way to ask for each feature that changes numbers. Values are chosen so that ignoring them shows.
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window_left": {"window": (5, -1)},
    "window_right": {"window": (-1, 3)},
    "both_windows": {"window": (7, 2)},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
}
SCALES = ("value", "tensor", "head")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, by what is unusual about it."""

    label: str
    inputs: dict[str, Any]
    heads: tuple[int, int] = (6, 2)
    widths: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.bfloat16
    kv_scale: str | None = None
    quantised: torch.dtype = FP8
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.label

    def arguments(self, generate: Any, device: str) -> dict[str, Any]:
        """The call's arguments."""
        model = AttentionModel(self.label, *self.heads, *self.widths)
        kv_dtype = None if self.kv_scale is None else self.quantised
        arguments = generate(model, dtype=self.dtype, kv_dtype=kv_dtype, device=device, **self.inputs)
        arguments["causal"] = False
        for name in self.features:
            arguments |= FEATURES[name]
        if arguments.get("sinks") is True:
            arguments["sinks"] = torch.linspace(-1, 4, self.heads[0], device=device, dtype=self.dtype)
        if self.kv_scale in ("tensor", "head"):
            factors = torch.linspace(0.5, 1.5, self.heads[1] if self.kv_scale == "head" else 1, device=device)
            for name in ("k_scale", "v_scale"):
                arguments[name] = arguments[name] * factors
        return arguments


def combinations(count: int) -> list[tuple[str, ...]]:
    """Every feature alone, then `count` random sets of them, the same each time."""
    alone = [(name,) for name in FEATURES]
    pick = random.Random(7)
    more = [tuple(sorted(pick.sample(sorted(FEATURES), pick.randint(2, 4)))) for _ in range(count)]
    return alone + list(dict.fromkeys(more))


def dense_cases() -> list[Case]:
    """Cases of `attention`, wide enough that each kernel takes some of each kind."""
    square = {"batch": 2, "q_tokens": 40}
    ragged = {"q_lens": (17, 0, 33, 1), "kv_lens": (17, 5, 50, 0)}
    cases = [Case(f"width {d}x{dv}", square, widths=(d, dv), features=("causal",)) for d, dv in WIDTHS]
    cases += [Case(f"heads {h}/{kh}", square, heads=(h, kh), features=("causal",)) for h, kh in HEADS]
    cases += [Case(f"dtype {str(dtype)[6:]}", square, dtype=dtype, features=("causal",)) for dtype in DTYPES]
    for names in [(), *combinations(6)]:
        label = "+".join(names) or "no feature"
        cases.append(Case(f"batched {label}", {"batch": 1, "q_tokens": 21, "kv_tokens": 45}, features=names))
        cases.append(Case(f"ragged {label}", ragged, features=names))
        cases.append(Case(f"one query {label}", {"batch": 3, "q_tokens": 1, "kv_tokens": 70}, features=names))
    cases += [Case(f"fp8 {scale}", square, kv_scale=scale, features=("causal",)) for scale in SCALES]
    cases += [
        Case(f"e5m2, {str(dtype)[6:]}", square, dtype=dtype, kv_scale="value", quantised=E5M2) for dtype in DTYPES
    ]
    cases += [
        Case("few queries", {"batch": 2, "q_tokens": 4, "kv_tokens": 130}, features=("causal",)),
        Case("more queries than keys", {"batch": 1, "q_tokens": 30, "kv_tokens": 9}, features=("causal",)),
        Case(
            "more queries than keys, sinks",
            {"batch": 1, "q_tokens": 30, "kv_tokens": 9},
            features=("causal", "sinks"),
        ),
        Case("no keys", {"batch": 1, "q_tokens": 5, "kv_tokens": 0}),
        Case("no keys, sinks", {"batch": 1, "q_tokens": 5, "kv_tokens": 0}, features=("sinks",)),
        Case("long", {"batch": 1, "q_tokens": 300}, heads=(2, 1), features=("causal",)),
        Case(
            "long and windowed",
            {"batch": 1, "q_tokens": 300},
            heads=(2, 1),
            features=("causal", "window_left"),
        ),
    ]
    return cases


def paged_cases() -> list[Case]:
    """Cases of `paged_attention`, wide enough that each kernel takes some of each kind."""
    decode = {"seq_lens": (40, 1, 77)}
    uniform = {"seq_lens": (40, 5, 77), "q_lens": 4}
    mixed = {"seq_lens": (40, 9, 77, 0, 3), "q_lens": (1, 9, 20, 0, 5)}
    cases = [Case(f"width {d}x{dv}", decode, widths=(d, dv)) for d, dv in WIDTHS]
    cases += [Case(f"heads {h}/{kh}", decode, heads=(h, kh)) for h, kh in HEADS]
    cases += [Case(f"dtype {str(dtype)[6:]}", decode, dtype=dtype) for dtype in DTYPES]
    cases += [Case(f"page {size}", decode | {"page_size": size}) for size in PAGE_SIZES]
    cases += [Case(f"page {size} HND", mixed | {"page_size": size, "kv_layout": "HND"}) for size in (3, 16)]
    cases += [Case(f"fp8 {scale}", form, kv_scale=scale) for scale in SCALES for form in (decode, mixed)]
    cases += [
        Case(f"e5m2, {str(dtype)[6:]}", form, dtype=dtype, kv_scale="head", quantised=E5M2)
        for dtype, form in ((torch.bfloat16, decode), (torch.float16, mixed), (torch.float32, uniform))
    ]
    cases += [Case("e5m2, wide", mixed, widths=(192, 128), kv_scale="value", quantised=E5M2)]
    for names in [(), *combinations(4)]:
        label = "+".join(names) or "no feature"
        cases.append(Case(f"decode {label}", decode, features=names))
        cases.append(Case(f"uniform {label}", uniform, features=("causal", *names)))
        cases.append(Case(f"mixed {label}", mixed, features=names))
    cases += [
        Case("ragged and causal", mixed, features=("causal",)),
        Case("prefill, same queries", {"seq_lens": (40, 64), "q_lens": 24}, features=("causal",)),
        Case("empty sequences", {"seq_lens": (0, 30, 0)}),
        Case("empty sequences, sinks", {"seq_lens": (0, 30, 0)}, features=("sinks",)),
        Case("empty ragged sequences", {"seq_lens": (0, 30, 0, 9), "q_lens": (2, 4, 100, 1)}),
        Case(
            "empty ragged sequences, causal",
            {"seq_lens": (0, 30, 0, 9), "q_lens": (2, 4, 100, 1)},
            features=("causal",),
        ),
        Case("empty ragged sequences, sinks", {"seq_lens": (30, 0), "q_lens": (3, 5)}, features=("sinks",)),
        Case("long", {"seq_lens": (700, 300), "page_size": 64}, heads=(4, 1)),
        Case("long and windowed", {"seq_lens": (700, 300)}, heads=(4, 1), features=("window_left",)),
        Case("long, sinks", {"seq_lens": (700, 300), "page_size": 64}, heads=(4, 1), features=("sinks",)),
    ]
    return cases


class Contract:
    """Statements that hold for every kernel of either op."""

    op: ClassVar[str]
    kernel: ClassVar[str]
    device: ClassVar[str] = DEVICE
    cases: ClassVar[list[Case]]
    fewest_cases: ClassVar[int]

    @classmethod
    def record(cls) -> Kernel:
        _ = HUB.settings
        return next(k for k in HUB.registry.candidates(cls.op).kernels if k.name == cls.kernel)

    @classmethod
    def function(cls) -> Any:
        return getattr(kernelhub, cls.op)

    @classmethod
    def inputs(cls, case: Case) -> dict[str, Any]:
        return case.arguments(attention_inputs if cls.op == "attention" else paged_attention_inputs, cls.device)

    @classmethod
    def accepted_cases(cls) -> list[Case]:
        """Those that the record takes; what it refuses is some other kernel's to answer."""
        return [case for case in cls.cases if cls.selection(cls.inputs(case)).selected == cls.kernel]

    @classmethod
    def selection(cls, arguments: dict[str, Any], **more: Any) -> Any:
        args, kwargs = split(arguments | more)
        return kernelhub.explain(cls.function(), *args, backend=cls.kernel, **kwargs)

    def run(self, arguments: dict[str, Any], **more: Any) -> Any:
        args, kwargs = split(arguments | more)
        return self.function()(*args, backend=self.kernel, **kwargs)

    def reference(self, arguments: dict[str, Any], **more: Any) -> Any:
        args, kwargs = split(arguments | more)
        return self.function().reference(*args, **kwargs)

    def check(self, got: Any, arguments: dict[str, Any]) -> None:
        """Hold a result, with or without LSE, against the reference."""
        want, want_lse = self.reference(arguments, return_lse=True)
        out, lse = got if isinstance(got, tuple) else (got, None)
        assert out.shape == want.shape
        agreement = compare_out(out, want, largest_value(arguments))
        assert agreement.ok, str(agreement)
        if lse is not None:
            assert lse.shape == want_lse.shape
            assert lse.dtype is torch.float32
            assert compare_lse(lse, want_lse) <= lse_tolerance(out.dtype)

    def test_takes_enough_cases(self) -> None:
        assert len(self.accepted_cases()) >= self.fewest_cases

    def test_matches_the_reference(self, case: Case) -> None:
        arguments = self.inputs(case)
        value = arguments["v"] if "v" in arguments else arguments["v_cache"]
        shape = (*arguments["q"].shape[:-1], value.shape[-1])
        out = torch.full(shape, torch.nan, dtype=case.dtype, device=self.device)
        got = self.run(arguments, out=out, return_lse="lse" in self.record().features)
        assert (got[0] if isinstance(got, tuple) else got) is out
        self.check(got, arguments)

    def test_without_out_the_result_is_the_same(self) -> None:
        cases = self.accepted_cases()
        for case in cases[:: max(1, len(cases) // 8)]:
            self.check(self.run(self.inputs(case)), self.inputs(case))

    def test_every_feature_changes_the_result(self) -> None:
        arguments = self.inputs(self.several)
        plain = self.run(arguments)
        features = self.record().features
        for name, values in FEATURES.items():
            needed = {"window_left", "window_right"} if name == "both_windows" else {name}
            if needed <= features:
                values = self.inputs(dataclasses.replace(self.several, features=(name,))) if name == "sinks" else values
                changed = self.run(arguments | values)
                assert (changed - plain).abs().max() > 0.05, f"{name} changes nothing"
                self.check(changed, arguments | values)
        scaled = self.run(arguments, scale=0.3)
        assert (scaled - plain).abs().max() > 0.05, "scale changes nothing"
        self.check(scaled, arguments | {"scale": 0.3})

    def test_the_scale_may_have_any_sign(self) -> None:
        arguments = self.inputs(self.several)
        features = {"softcap": 1.5} if "softcap" in self.record().features else {}
        for more in ({}, features):
            for scale in (-0.3, 0.0):
                self.check(self.run(arguments, scale=scale, **more), arguments | {"scale": scale} | more)

    def test_queries_may_be_larger_than_half_precision_holds(self) -> None:
        for kv_scale in (None, "value"):
            if kv_scale is None or "kv_scale=value" in self.record().features:
                arguments = self.inputs(dataclasses.replace(self.several, kv_scale=kv_scale))
                arguments["q"] = arguments["q"] * 1e30
                arguments["scale"] = 1e-31
                self.check(self.run(arguments), arguments)

    def test_every_code_of_a_float8_value_is_exact(self) -> None:
        """A query that sees one key gives that key's value: all codes of a byte in four heads of 64."""
        one = (
            {"batch": 1, "q_tokens": 1, "kv_tokens": 1}
            if self.op == "attention"
            else {"seq_lens": (1,), "q_lens": (1,)}
        )
        for quantised in (FP8, E5M2):
            case = Case("codes", one, heads=(4, 4), dtype=torch.float32, kv_scale="value", quantised=quantised)
            arguments = self.inputs(case)
            with kernelhub.use(unsafe=False):  # a record that is forced takes no other dtypes than it says
                decision = next(item for item in self.selection(arguments).decisions if item.kernel == self.kernel)
            if {rejection.code for rejection in decision.rejections} - {"known_bad"}:
                continue
            codes = torch.arange(256, device=self.device).to(torch.uint8)
            codes[~codes.view(quantised).float().isfinite()] = 0
            value = arguments["v"] if "v" in arguments else arguments["v_cache"][arguments["block_table"][0, 0]]
            value.view(torch.uint8)[..., :1, :, :].copy_(codes.view(4, 64))
            out = self.run(arguments)
            assert torch.equal(out.flatten(), codes.view(quantised).float() * arguments["v_scale"])

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs(self.plain)
        want = self.run(arguments)
        for layout in (_sliced, _transposed, _spread, _in_wider, _moved):
            moved = {
                name: layout(t) if name in ("q", "k", "v", "k_cache", "v_cache") else t for name, t in arguments.items()
            }
            out = layout(torch.full_like(want, torch.nan))
            assert self.run(moved, out=out) is out
            self.check(out, arguments)
            new = self.run(moved)
            assert new.is_contiguous()
            assert torch.equal(new, out)

    def test_no_tokens_give_an_empty_result(self) -> None:
        arguments = self.inputs(self.plain)
        arguments["q"] = arguments["q"][:0]
        if "cu_seqlens_q" in arguments:
            arguments["cu_seqlens_q"] = torch.zeros_like(arguments["cu_seqlens_q"])
        else:
            for name in ("k", "v", "block_table", "seq_lens"):
                if name in arguments:
                    arguments[name] = arguments[name][:0]
        assert self.run(arguments).shape == arguments["q"].shape

    def test_writes_nothing_past_its_output(self) -> None:
        arguments = self.inputs(self.plain)
        want = self.run(arguments)
        guarded = torch.full((want.shape[0] + 2, *want.shape[1:]), -777.0, dtype=want.dtype, device=self.device)
        self.run(arguments, out=guarded[1:-1])
        assert torch.equal(guarded[1:-1], want)
        assert (guarded[0] == -777.0).all()
        assert (guarded[-1] == -777.0).all()

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        for case in (self.plain, self.rich):
            arguments = self.inputs(case)
            args, kwargs = split(arguments)
            want = self.run(arguments)
            plan = self.function().prepare(*args, backend=self.kernel, **kwargs)
            assert plan.kernel == self.kernel
            run_args = args if self.op == "paged_attention" else args[:3]
            offsets = [kwargs[name] for name in ("cu_seqlens_q", "cu_seqlens_k") if name in kwargs]
            assert torch.equal(plan.run(*run_args, *offsets), want)
            step = plan.begin(*run_args[3:], *offsets)
            out = torch.full_like(want, torch.nan)
            assert step.run(*args[:3], out) is out
            assert torch.equal(out, want)
            assert torch.equal(step.run(*args[:3]), want)

    def test_a_plan_refuses_operands_it_is_not_for(self) -> None:
        args, kwargs = split(self.inputs(self.plain))
        offsets = [kwargs[name] for name in ("cu_seqlens_q", "cu_seqlens_k") if name in kwargs]
        step = self.function().prepare(*args, backend=self.kernel, **kwargs).begin(*args[3:], *offsets)
        q, k, v = args[:3]
        for wrong, parameter in (
            ((q[..., :-1], k, v), 0),
            ((q[..., 1:, :], k, v), 0),
            ((q.float() if q.dtype is not torch.float32 else q.half(), k, v), 0),
            ((q, k[..., :-1], v), 1),
            ((q, k, v[..., :-1]), 2),
        ):
            with pytest.raises(InvalidArgument) as caught:
                step.run(*wrong)
            assert caught.value.parameter == list(split_names(self.op))[parameter]

    def test_the_same_call_gives_the_same_bits(self) -> None:
        assert self.record().deterministic or not self.claims_determinism
        if self.record().deterministic:
            arguments = self.inputs(self.rich)
            first = self.run(arguments)
            assert all(torch.equal(self.run(arguments), first) for _ in range(3))

    claims_determinism: ClassVar[bool] = False

    plain: ClassVar[Case]
    several: ClassVar[Case]
    rich: ClassVar[Case]


class DenseContract(Contract):
    """A kernel of `attention`."""

    op = "attention"
    cases = dense_cases()
    plain = several = Case("plain", {"batch": 2, "q_tokens": 24, "kv_tokens": 40})
    rich = Case("rich", {"batch": 2, "q_tokens": 24, "kv_tokens": 40}, features=("causal",))

    def test_what_lies_behind_the_last_sequence_counts_for_nothing(self) -> None:
        ragged = (self.inputs(case) for case in self.accepted_cases() if "ragged no feature" in case.label)
        for arguments in ragged:
            want = self.run(arguments)
            longer = {name: _with_nans_behind(arguments[name]) for name in ("q", "k", "v")}
            out = torch.full_like(_with_nans_behind(want), 7.0)
            self.run(arguments | longer, out=out)
            assert (out[: want.shape[0]] - want).abs().max() <= 2.0**-6
            assert (out[want.shape[0] :] == 7.0).all()


class PagedContract(Contract):
    """A kernel of `paged_attention`."""

    op = "paged_attention"
    cases = paged_cases()
    plain = Case("plain", {"seq_lens": (40, 9, 77)})
    several = Case("several queries", {"seq_lens": (40, 9, 77), "q_lens": 6})
    rich = Case("rich", {"seq_lens": (40, 9, 77), "q_lens": 3}, features=("causal", "window_left"))


def split_names(op: str) -> tuple[str, ...]:
    """Positional parameters of an op."""
    return ("q", "k", "v") if op == "attention" else ("q", "k_cache", "v_cache", "block_table", "seq_lens")


def split(arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by name as a call's positional and named ones."""
    names = split_names("attention" if "k" in arguments else "paged_attention")
    return tuple(arguments[n] for n in names), {n: v for n, v in arguments.items() if n not in names}


def largest_value(arguments: dict[str, Any]) -> float:
    """Largest |v| that a sequence holds, scaled."""
    v = arguments.get("v", arguments.get("v_cache")).float().nan_to_num()
    scale = arguments.get("v_scale", 1.0)
    largest = float(v.abs().max()) if v.numel() else 0.0
    return largest * (float(scale.max()) if isinstance(scale, Tensor) else scale or 1.0)


def _sliced(tensor: Tensor) -> Tensor:
    """A part of a wider tensor, as q is of a fused qkv."""
    wide = tensor.new_zeros((*tensor.shape[:-2], tensor.shape[-2] + 3, tensor.shape[-1]))
    wide[..., 1:-2, :] = tensor
    return wide[..., 1:-2, :]


def _transposed(tensor: Tensor) -> Tensor:
    """Heads before tokens in memory."""
    return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)


def _spread(tensor: Tensor) -> Tensor:
    """Every second element of a row."""
    wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
    wide[..., ::2] = tensor
    return wide[..., ::2]


def _in_wider(tensor: Tensor) -> Tensor:
    """Rows that begin at multiples of 16 bytes, but not of their width, with NaN between them."""
    gap = 16 // tensor.element_size()
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + gap), torch.nan, device=tensor.device).to(tensor.dtype)
    part = wide[..., gap:]
    part.copy_(tensor)
    return part


def _moved(tensor: Tensor) -> Tensor:
    """Without gaps, one element past an aligned address."""
    raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    longer = raw.new_zeros(raw.numel() + 1)
    longer[1:] = raw.flatten()
    return longer[1:].view(tensor.dtype).view(tensor.shape)


def _with_nans_behind(tensor: Tensor) -> Tensor:
    """Ragged rows, and 70 more that no sequence has."""
    return torch.cat([tensor, tensor.new_full((70, *tensor.shape[1:]), torch.nan)])
