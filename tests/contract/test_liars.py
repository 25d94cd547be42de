"""The contract catches kernels that lie: each of these is the right kernel with one defect."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from typing import Any

import pytest
import torch

from kernelhub.backends.torch.attention.blocked import Blocked, BlockedPaged
from kernelhub.backends.torch.merge.merge import Merge
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.kernel import Band, Kernel
from tests.contract.attention import DenseContract, PagedContract
from tests.contract.lies import lies_of
from tests.contract.merge import MergeContract
from tests.dispatch.backends import record, register


class Lie:
    """Mixed into a right kernel: the whole of it unless a method is overridden."""

    def change(self, q: Any, k: Any, v: Any, values: Any) -> Any:
        return q, k, v, values

    def spoil(self, q: Any, out: Any, lse: Any) -> None:
        return None

    def launch(self, q: Any, k: Any, v: Any, step: Any, values: Any, out: Any, lse: Any) -> None:
        q, k, v, values = self.change(q, k, v, values)
        super().launch(q, k, v, step, values, out, lse)  # type: ignore[misc]
        if q.numel():
            self.spoil(q, out, lse)


class Truth(Lie):
    pass


class ForgetsSoftcap(Lie):
    def change(self, q, k, v, values):
        return q, k, v, values._replace(softcap=0.0)


class ForgetsSinks(Lie):
    def change(self, q, k, v, values):
        return q, k, v, values._replace(sinks=None)


class ForgetsTheMask(Lie):
    def change(self, q, k, v, values):
        return q, k, v, values._replace(window_right=-1)


class WindowOfOneMore(Lie):
    def change(self, q, k, v, values):
        return q, k, v, values._replace(window_left=values.window_left + (values.window_left >= 0))


class RightWindowOfOneLess(Lie):
    def change(self, q, k, v, values):
        return q, k, v, values._replace(window_right=values.window_right - (values.window_right > 0))


class DefaultScale(Lie):
    def change(self, q, k, v, values):
        return q, k, v, values._replace(scale=q.shape[-1] ** -0.5)


class SharesTheScaleOfTheFirstHead(Lie):
    def change(self, q, k, v, values):
        if not isinstance(values.k_scale, torch.Tensor):
            return q, k, v, values
        first = values.k_scale[:1].expand_as(values.k_scale) if values.k_scale.ndim else values.k_scale
        return q, k, v, values._replace(k_scale=first)


class ForgetsTheScaleOfV(Lie):
    def change(self, q, k, v, values):
        return q, k, v, values._replace(v_scale=values.k_scale)


class OtherHeadsOfTheGroup(Lie):
    def change(self, q, k, v, values):
        group = self.problem.group_size
        mixed = q.unflatten(-2, (group, -1)).transpose(-3, -2).flatten(-3, -2)
        return mixed, k, v, values


class LogToTheBaseOfTwo(Lie):
    def spoil(self, q, out, lse):
        if lse is not None:
            lse /= math.log(2)


class OnePercentTooMuch(Lie):
    def spoil(self, q, out, lse):
        out *= 1.01


class LeavesTheLastTokenUnwritten(Lie):
    def spoil(self, q, out, lse):
        out[-1:] = torch.nan


class OneWrongElement(Lie):
    def spoil(self, q, out, lse):
        out[(0,) * out.ndim] += 0.5


class WritesPastItsOutput(Lie):
    def spoil(self, q, out, lse):
        bytes_after = out.untyped_storage().nbytes() - (out.storage_offset() + out.numel()) * out.itemsize
        if bytes_after >= out.itemsize and out.is_contiguous():
            out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(0.0)


class OtherBitsEachTime(Lie):
    def spoil(self, q, out, lse):
        out *= 1 + 0.01 * torch.rand((), device=out.device).to(out.dtype)


def _both(lie: type) -> tuple[type, type]:
    dense = type(f"Dense{lie.__name__}", (lie, Blocked), {"__module__": __name__})
    paged = type(f"Paged{lie.__name__}", (lie, BlockedPaged), {"__module__": __name__})
    globals()[dense.__name__], globals()[paged.__name__] = dense, paged
    return dense, paged


LIES = [lie for lie in Lie.__subclasses__() if lie is not Truth]
for _lie in (Truth, *LIES):
    _both(_lie)


_found: Counter[str] = Counter()  # how many lies each test found


def failures(contract: type, kernel: str, device: str) -> list[str]:
    """The first test of a contract that a kernel fails: one is enough to tell it from a right kernel.

    Those that found the most lies before are tried first.
    """
    subject = type("Subject", (contract,), {"kernel": kernel, "device": device})()
    tests = [(name, test) for name, test in inspect.getmembers(subject, inspect.ismethod) if name.startswith("test_")]
    for name, test in sorted(tests, key=lambda item: -_found[item[0]]):
        for arguments in _cases_of(subject, test):
            try:
                test(*arguments)
            except AssertionError:
                _found[name] += 1
                return [name]
    return []


def _cases_of(subject: Any, test: Any) -> list[tuple[Any, ...]]:
    """What a test of a contract is called with, once for each: cases, values of its one parameter, or nothing."""
    if "case" in inspect.signature(test).parameters:
        return [(case,) for case in subject.accepted_cases()]
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    return [(value,) for value in marks[0].args[1]] if marks else [()]


def _register(lie: type, op: str, prefix: str) -> None:
    kernel = record("liar.k", f"{__name__}:{prefix}{lie.__name__}", op=op, band=Band.PLUGIN, reads_lengths=True)
    register("liar", kernel)


SUBJECTS = [("attention", "Dense", DenseContract), ("paged_attention", "Paged", PagedContract)]


@pytest.mark.parametrize(("op", "prefix", "contract"), SUBJECTS, ids=["attention", "paged_attention"])
class TestLiars:
    @pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
    def test_is_detected(self, lie, op, prefix, contract) -> None:
        _register(lie, op, prefix)
        assert failures(contract, "liar.k", "cpu"), f"nothing in the contract tells {lie.__name__} from a right kernel"

    def test_a_right_kernel_is_not(self, op, prefix, contract) -> None:
        _register(Truth, op, prefix)
        assert failures(contract, "liar.k", "cpu") == []


class MergeLie(MergeContract):
    """A contract over one of the merges below, for a test that collects no cases of it."""

    kernel = "liar.k"
    device = "cpu"
    __test__ = False


class TrueMerge(Merge):
    pass


class AddsPartsUp(Merge):
    def launch(self, outs, lses, out, lse, out_scale=None):
        super().launch(outs, [torch.zeros_like(part) for part in lses], out, None, out_scale)
        if lse is not None:
            lse.copy_(torch.logsumexp(torch.stack(list(lses)), 0))


class TakesLseForBaseTwo(Merge):
    def launch(self, outs, lses, out, lse, out_scale=None):
        super().launch(outs, [part * math.log(2) for part in lses], out, lse, out_scale)


class ReadsPartsWithoutKeys(Merge):
    def launch(self, outs, lses, out, lse, out_scale=None):
        super().launch(outs, [part.nan_to_num(neginf=-80.0, posinf=-80.0) for part in lses], out, lse, out_scale)


class ForgetsTheLastPart(Merge):
    def launch(self, outs, lses, out, lse, out_scale=None):
        super().launch(outs[: max(2, len(outs) - 1)], lses[: max(2, len(outs) - 1)], out, lse, out_scale)


class WritesBeforeItReads(Merge):
    def launch(self, outs, lses, out, lse, out_scale=None):
        out.copy_(outs[0])
        super().launch(outs, lses, out, lse, out_scale)


class LeavesTheLse(Merge):
    def launch(self, outs, lses, out, lse, out_scale=None):
        super().launch(outs, lses, out, None, out_scale)


class ForgetsTheScale(Merge):
    def launch(self, outs, lses, out, lse, out_scale=None):
        super().launch(outs, lses, out, lse, None if out_scale is None else 1.0)


@pytest.mark.parametrize("lie", lies_of(Merge, __name__), ids=lambda lie: lie.__name__)
def test_merges_that_lie_are_caught(lie) -> None:
    target = f"{__name__}:{lie.__name__}"
    constraints = (anything("device", "dtype", "num_heads", "head_dim", "parts"),)
    features = frozenset({"batched", "lse", "out_scale=value", "out_scale=tensor"})
    register("liar", Kernel("merge_attention_states", "liar.k", target, "lies", Band.PLUGIN, constraints, features))
    assert bool(failures(MergeLie, "liar.k", "cpu")) == (lie is not TrueMerge)
