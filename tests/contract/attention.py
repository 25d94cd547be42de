"""What every kernel of the attention ops must do, beside the cases of the ops.

Subclass `DenseContract` or `PagedContract` and name the kernel.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.evidence.cases import CASES
from kernelhub.ops.attention.cases import E5M2, FP8
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.testing import KernelCase, OpContract
from tests.conftest import DEVICE


class Contract(OpContract):
    """Statements that hold for every kernel of either op."""

    device: ClassVar[str] = DEVICE
    table: ClassVar[Any]  # the op's cases; for some kernels varied, see `varied_attention`
    model: ClassVar[AttentionModel | None] = None  # heads of the calls below; those of the first model by default
    widest: ClassVar[torch.dtype] = torch.float32  # of the queries that it takes
    plain: ClassVar[dict[str, Any]]
    rich: ClassVar[dict[str, Any]]  # with features

    @classmethod
    def inputs(
        cls,
        *,
        model: AttentionModel | None = None,
        kv_scale: str | None = None,
        quantised: torch.dtype = FP8,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        **inputs: Any,
    ) -> dict[str, Any]:
        """Arguments of a call with these inputs and features."""
        features = {"causal": causal, "window": window}
        make = cls.table.make(inputs, features, model or cls.model, kv_scale, quantised=quantised)
        return make(torch.device(cls.device))  # type: ignore[no-any-return]

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        return of_one_width(super().accepted_cases())

    @classmethod
    def function(cls) -> Any:
        return getattr(kernelhub, cls.op)

    def run(self, arguments: dict[str, Any], **more: Any) -> Any:
        return self.function()(**arguments | more, backend=self.kernel)

    def check(self, out: Tensor, arguments: dict[str, Any]) -> None:
        """Compare a result with the reference, within the op's tolerance."""
        judgement = self.table.judge({"out": out}, arguments)
        assert judgement.ok, judgement.figures

    def test_every_code_of_a_float8_value_is_exact(self) -> None:
        """A query that sees one key gives that key's value: all codes of a byte in four heads of 64."""
        one = {"q_tokens": 1, "kv_tokens": 1} if self.op == "attention" else {"seq_lens": (1,), "q_lens": (1,)}
        four_heads = AttentionModel("codes", 4, 4, 64, 64)
        for quantised in (FP8, E5M2):
            inputs = {"dtype": self.widest, "model": four_heads, "kv_scale": "value", "quantised": quantised}
            arguments = self.inputs(**one, **inputs)
            with kernelhub.use(unsafe=False):  # a record that is forced takes no other dtypes than it says
                selection = self.function().explain(**arguments, backend=self.kernel)
            decision = next(item for item in selection.decisions if item.kernel == self.kernel)
            if {rejection.code for rejection in decision.rejections} - {"known_bad"}:
                continue
            codes = torch.arange(256, device=self.device).to(torch.uint8)
            codes[~codes.view(quantised).float().isfinite()] = 0
            value = arguments["v"] if "v" in arguments else arguments["v_cache"][arguments["block_table"][0, 0]]
            value.view(torch.uint8)[..., :1, :, :].copy_(codes.view(4, 64))
            out = self.run(arguments)
            assert torch.equal(out.flatten(), (codes.view(quantised).float() * arguments["v_scale"]).to(self.widest))

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs(**self.plain)
        want = self.run(arguments)
        for layout in (_sliced, _transposed, _spread, _moved):
            moved = {
                name: layout(t) if name in ("q", "k", "v", "k_cache", "v_cache") else t for name, t in arguments.items()
            }
            out = layout(torch.full_like(want, torch.nan))
            assert self.run(moved, out=out) is out
            self.check(out, arguments)
            if layout is _transposed:
                new = self.run(moved)
                assert new.is_contiguous()
                assert torch.equal(new, out)

    def test_no_tokens_give_an_empty_result(self) -> None:
        """Of ragged calls; the cases of the ops have batches of none."""
        arguments = self.inputs(**self.plain)
        if "cu_seqlens_q" in arguments:
            arguments |= {"q": arguments["q"][:0], "cu_seqlens_q": torch.zeros_like(arguments["cu_seqlens_q"])}
            assert self.run(arguments).shape == arguments["q"].shape

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        for inputs in (self.plain, self.rich):
            arguments = self.inputs(**inputs)
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
        args, kwargs = split(self.inputs(**self.plain))
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
            assert caught.value.parameter == POSITIONAL[self.op][parameter]


class DenseContract(Contract):
    """A kernel of `attention`."""

    op = "attention"
    table = CASES["attention"]
    plain: ClassVar = {"batch": 2, "q_tokens": 24, "kv_tokens": 40}
    rich: ClassVar = plain | {"causal": True}


class PagedContract(Contract):
    """A kernel of `paged_attention`."""

    op = "paged_attention"
    table = CASES["paged_attention"]
    plain: ClassVar = {"seq_lens": (40, 9, 77)}
    rich: ClassVar = plain | {"q_lens": 3, "causal": True, "window": (5, -1)}


POSITIONAL = {"attention": ("q", "k", "v"), "paged_attention": ("q", "k_cache", "v_cache", "block_table", "seq_lens")}


def of_one_width(cases: list[KernelCase]) -> list[KernelCase]:
    """On a CPU, without the cases of width 128 that repeat one of width 64."""
    labels = {case.label for case in cases if case.device == "cpu"}
    return [case for case in cases if case.label.replace("width 128", "width 64") not in labels - {case.label}]


def split(arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by name as a call's positional and named ones."""
    names = POSITIONAL["attention" if "k" in arguments else "paged_attention"]
    return tuple(arguments[n] for n in names), {n: v for n, v in arguments.items() if n not in names}


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


def _moved(tensor: Tensor) -> Tensor:
    """Without gaps, one element past an aligned address."""
    raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    longer = raw.new_zeros(raw.numel() + 1)
    longer[1:] = raw.flatten()
    return longer[1:].view(tensor.dtype).view(tensor.shape)
