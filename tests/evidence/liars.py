"""Wrong kernels, each the right one with one defect, and the same kernels after a fix."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

import kernelhub
from kernelhub.backends.torch.attention.blocked import Blocked
from kernelhub.dispatch.constraint import anything
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Band, Kernel
from kernelhub.ops.packed import PackingAdapter
from kernelhub.runtime.scratch import scratch
from tests.contract.test_fp4_gemm_liars import Truth as Dequantised
from tests.contract.test_fp8_liars import Truth as Dequantized
from tests.contract.test_indexer_liars import TrueTopK as TopK
from tests.dispatch.backends import record, register

LAYOUT = "liar.rows_reversed.v1"


class Lie(Blocked):
    """`attention`, the truth unless `spoil` or `change` is overridden; the truth in any case once it is mended."""

    mended: ClassVar[bool] = False

    def launch(self, q: Any, k: Any, v: Any, step: Any, values: Any, out: Any, lse: Any) -> None:
        if not self.mended:
            values = self.change(values)
        if self.mended or self.runs(q):
            super().launch(q, k, v, step, values, out, lse)
        if q.numel() and not self.mended:
            self.spoil(q, k, out, lse)

    def runs(self, q: Any) -> bool:
        return True

    def change(self, values: Any) -> Any:
        return values

    def spoil(self, q: Any, k: Any, out: Any, lse: Any) -> None:
        return None


class Truth(Lie):
    pass


class Zeros(Lie):
    def spoil(self, q, k, out, lse):
        out.zero_()


class NaN(Lie):
    def spoil(self, q, k, out, lse):
        out[..., :1] = torch.nan


class ThirtyPercentOff(Lie):
    def spoil(self, q, k, out, lse):
        out *= 1.3


class WritesNothing(Lie):
    def runs(self, q):
        return False


class LeavesTheLastToken(Lie):
    def spoil(self, q, k, out, lse):
        bits = torch.int32 if out.itemsize == 4 else torch.int16
        poison = {torch.bfloat16: 0x7FA5, torch.float16: 0x7DA5, torch.float32: 0x7FA5A5A5}[out.dtype]
        out[-1:].contiguous().view(bits)
        out.view(bits)[-1:] = poison


class IgnoresSoftcap(Lie):
    def change(self, values):
        return values._replace(softcap=0.0)


class IgnoresSinks(Lie):
    def change(self, values):
        return values._replace(sinks=None)


class PastItsWorkspace(Lie):
    def spoil(self, q, k, out, lse):
        room = scratch("liar", (64,), torch.float32, q.device)
        room.as_strided((65,), (1,), room.storage_offset())[64] = 1.0


class PastItsOutput(Lie):
    def spoil(self, q, k, out, lse):
        after = out.storage_offset() + out.numel()
        if out.is_contiguous() and out.untyped_storage().nbytes() > after * out.itemsize:
            out.as_strided((1,), (1,), after).fill_(0.0)


class ChangesAnInput(Lie):
    def spoil(self, q, k, out, lse):
        if k.numel():
            k.view(-1)[0] = 1.0


class WrongForOddTokens(Lie):
    def spoil(self, q, k, out, lse):
        if q.shape[-3] % 2 and q.shape[-3] > 1 and q.ndim == 4:
            out[..., -1, :, :] *= 1.5


class Raises(Lie):
    def spoil(self, q, k, out, lse):
        raise RuntimeError("operands must begin at multiples of 128 bytes")


class LosesTheDevice(Lie):
    def spoil(self, q, k, out, lse):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class SealsTheProcess(Lie):
    """As another thread may at any time."""

    def spoil(self, q, k, out, lse):
        kernelhub.seal()


class OtherBits(Lie):
    calls = 0

    def spoil(self, q, k, out, lse):
        OtherBits.calls += 1
        if OtherBits.calls % 2:
            view = out.view(-1)[:1]
            view.view(torch.int32 if out.itemsize == 4 else torch.int16)[0] ^= 1


class SwapsHeads(Lie):
    def launch(self, q, k, v, step, values, out, lse):
        super().launch(q, k.flip(-2), v.flip(-2), step, values, out, lse)


class LseInBaseTwo(Lie):
    def spoil(self, q, k, out, lse):
        if lse is not None:
            lse /= math.log(2.0)


class ThirtyPercentOffInTheLastRow(Lie):
    def spoil(self, q, k, out, lse):
        out[-1, ..., -1:, :, :] *= 1.3


class ForgetsTheScaleOfK(Lie):
    def change(self, values):
        return values._replace(k_scale=None)


class WritesElsewhere(Lie):
    def launch(self, q, k, v, step, values, out, lse):
        super().launch(q, k, v, step, values, torch.empty_like(out), lse)


class IgnoresStrides(Lie):
    """Takes every operand for contiguous."""

    def launch(self, q, k, v, step, values, out, lse):
        super().launch(*(_dense(operand) for operand in (q, k, v)), step, values, out, lse)


class IgnoresWhereItBegins(Lie):
    """Reads from where the memory of an operand begins, and not the operand."""

    def launch(self, q, k, v, step, values, out, lse):
        moved = (operand.as_strided(operand.shape, operand.stride(), 0) for operand in (q, k, v))
        super().launch(*moved, step, values, out, lse)


class IgnoresStridesOfTheResult(Lie):
    def launch(self, q, k, v, step, values, out, lse):
        made = torch.empty(out.shape, dtype=out.dtype)
        super().launch(q, k, v, step, values, made, lse)
        dense = made.flatten()
        if out.is_contiguous() or out.untyped_storage().nbytes() < made.nbytes + out.storage_offset() * out.itemsize:
            out.copy_(made)
        else:
            out.as_strided(dense.shape, (1,), out.storage_offset()).copy_(dense)


class WrongInItsOwnMemory(Lie):
    def compute(self, q, k, v, step, values):
        return 1.3 * super().compute(q, k, v, step, values)


class KeepsTheFirstOffsets(Lie):
    """Metadata of the first call with as many sequences and tokens, whatever their lengths are later."""

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        self.steps: dict[Any, Any] = {}

    def launch(self, q, k, v, step, values, out, lse):
        first = self.steps.setdefault((step.num_seqs, q.shape[0], k.shape[0]), step)
        super().launch(q, k, v, first, values, out, lse)


class KeepsWhatItReadAtAnAddress(Lie):
    """Keys of the first call whose tensor lay where this one does."""

    def __init__(self, problem: Any) -> None:
        super().__init__(problem)
        self.seen: dict[Any, Any] = {}

    def launch(self, q, k, v, step, values, out, lse):
        _, kept = self.seen.setdefault((k.data_ptr(), k.shape, k.stride()), (k, k.clone()))
        super().launch(q, kept, v, step, values, out, lse)


CODES: dict[type[Lie], str] = {
    Zeros: "zeros",
    NaN: "nan",
    ThirtyPercentOff: "wrong_numbers",
    WritesNothing: "not_written",
    LeavesTheLastToken: "not_written",
    IgnoresSoftcap: "feature_ignored",
    IgnoresSinks: "feature_ignored",
    PastItsWorkspace: "past_workspace",
    PastItsOutput: "past_output",
    ChangesAnInput: "input_changed",
    WrongForOddTokens: "token_count",
    Raises: "raised",
    OtherBits: "other_bits",
    SwapsHeads: "wrong_numbers",
    ThirtyPercentOffInTheLastRow: "wrong_numbers",
    WritesElsewhere: "not_written",
    IgnoresStridesOfTheResult: "past_output",
    WrongInItsOwnMemory: "own_result",
    KeepsWhatItReadAtAnAddress: "stale",
    LseInBaseTwo: "wrong_numbers",
    ForgetsTheScaleOfK: "wrong_numbers",
    IgnoresStrides: "strides",
    IgnoresWhereItBegins: "strides",
    KeepsTheFirstOffsets: "stale",
}


class ReadsScalesOfTheFirstRow(Dequantized):
    """`fp8_gemm` that takes one scale for all of a."""

    def launch(self, a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any, out: Any) -> None:
        if a_scale.ndim == 2 and a_scale.shape[0]:
            a_scale = a_scale[:1].expand_as(a_scale)
        super().launch(a, b, a_scale, b_scale, bias, out)


class Reversing(Dequantised, PackingAdapter):
    """`fp4_gemm` with rows of the weight the other way round, as it packs them."""

    def pack(self, *weight: Any) -> Any:
        names = ("codes", "scale", "global_scale")
        flipped = [None if part is None or part.ndim < 2 else _flipped(part) for part in weight]
        kept = [part if part is None or part.ndim < 2 else other for part, other in zip(weight, flipped, strict=True)]
        return dict(zip(names, kept, strict=True)), _unpack

    def launch(self, a: Any, b: Any, bias: Any, out: Any) -> None:
        if self.problem.weight_layout == LAYOUT:
            b = dataclasses.replace(b, codes=_flipped(b.codes), scale=_flipped(b.scale))
        super().launch(a, b, bias, out)


class LosesARow(Reversing):
    """Packs right and reads right, but cannot give back what it packed."""

    def pack(self, *weight: Any) -> Any:
        return super().pack(*weight)[0], _unpack_without_the_last_row


class ReadsAsItLies(Reversing):
    """Forgets that it packed the weight."""

    def launch(self, a: Any, b: Any, bias: Any, out: Any) -> None:
        Dequantised.launch(self, a, b, bias, out)


def _dense(operand: Any) -> Any:
    """The operand as it would be if its elements lay next to each other, where there are as many."""
    room = operand.untyped_storage().nbytes() // operand.itemsize - operand.storage_offset()
    if operand.is_contiguous() or room < operand.numel():
        return operand
    return operand.as_strided((operand.numel(),), (1,), operand.storage_offset()).view(operand.shape)


def _flipped(part: Any) -> Any:
    return part.view(torch.uint8).flip(0).contiguous().view(part.dtype)


def _unpack(packed: Any) -> Any:
    return tuple(
        None if part is None else part if part.ndim < 2 else _flipped(part) for part in packed.tensors.values()
    )


def _unpack_without_the_last_row(packed: Any) -> Any:
    made = _unpack(packed)
    made[0].view(torch.uint8)[-1] = 0
    return made


class PlacesOutOfOrder(TopK):
    """`topk_indices` whose ties are in another order."""

    def launch(self, *arguments: Any) -> None:
        super().launch(*arguments)
        out = arguments[-1]
        out.copy_(out.flip(1))


def attention(lie: type[Lie]) -> None:
    """Register a lie as a plugin's kernel of `attention`, which is chosen before all of ours."""
    register("liar", record("liar.k", f"{__name__}:{lie.__name__}", deterministic=lie is OtherBits))


def other(op: str, lie: type, **more: Any) -> None:
    """The same for another op, of which it claims everything."""
    _ = HUB.settings
    schema = HUB.registry.contracts[op].schema
    features = frozenset(schema.features)
    constraints = (anything(*schema.structural),)
    kernel = Kernel(
        op, "liar.k", f"{lie.__module__}:{lie.__name__}", "lies", Band.PLUGIN, constraints, features, **more
    )
    register("liar", kernel)


@contextmanager
def mended(lie: type[Lie]) -> Iterator[None]:
    """A block in which the kernel is right."""
    lie.mended = True
    try:
        yield
    finally:
        lie.mended = False
