"""The cases of an op: calls for its kernels, and the comparison of their results with the reference.

An op's `cases.py` has one class that derives from `OpCases`:

1. `cases` returns its calls, in shapes small enough for a CPU and in some that kernels for GPUs support; the label says
   what is unusual about each. A kernel runs the calls that its record supports. Together the cases use every feature of
   the op's schema.
2. `destinations` names the results, so that they can be poisoned and guarded before the call.
3. `expect` runs the reference, which takes the most time, once per call; `compare` compares the results of a kernel
   with it, within the op's tolerance.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kernelhub.dispatch.hub import HUB
from kernelhub.ops.packed import PackedWeight

Arguments = dict[str, Any]
Make = Callable[[torch.device], Arguments]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call.

    Attributes:
        label: what is unusual about it; no two of an op have the same.
        make: the call's arguments on a device, without destinations.
        quick: whether it is among the few that ``--quick`` runs.
        tokens: whether it is one of several that differ in their number of tokens only.
        without: for a call with a feature, the same call without: the result must differ from that.
        feature: the feature, as a user would name it.
        repeats: whether the call is made again: for a kernel that claims to give the same bits each time; as part of
            wider tensors, without destinations, and with other values in the same memory.
        packs: whether the weight is packed too, where the kernel packs.
        serving: what the call is made from, for a call of serving that is none of the op's own cases, as plain values:
            see `serving`.
    """

    label: str
    make: Make
    quick: bool = False
    tokens: bool = False
    without: Make | None = None
    feature: str = ""
    repeats: bool = False
    packs: bool = False
    serving: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Judgement:
    """Results compared with the reference.

    Attributes:
        ratio: the largest error over what is allowed; at most 1 is right, NaN is not.
        figures: the error in words.
        want: what the reference gives, by the result's name; NaN where nothing is to be written.
    """

    ratio: float
    figures: str
    want: Mapping[str, Tensor]

    @property
    def ok(self) -> bool:
        return self.ratio <= 1.0


class Packing(NamedTuple):
    """A weight that a plan packed, and the tensors that unpacking it must give."""

    weight: PackedWeight
    tensors: tuple[Tensor | None, ...]


class OpCases(abc.ABC):
    """The cases of one op.

    Attributes:
        op: its name.
        exact: whether results must be the reference's to the bit, NaN and infinities among them.
        written: arguments that a call writes to.
        whole: arguments and destinations that the op takes in memory of their own only, not as part of a wider tensor.
        formats: facets that a case should have as the problem that is served, if the op has such a case.
        read: all facets that `concerns` reads of the problem that is served.
    """

    op: str
    exact: ClassVar[bool] = False
    written: ClassVar[tuple[str, ...]] = ()
    whole: ClassVar[tuple[str, ...]] = ()
    formats: ClassVar[tuple[str, ...]] = ()
    read: ClassVar[tuple[str, ...]] = ()

    @property
    def reference(self) -> Any:
        """The op in plain torch."""
        return HUB.function(self.op).reference

    @abc.abstractmethod
    def cases(self) -> Iterator[Case]:
        """Every call."""

    @abc.abstractmethod
    def destinations(self, arguments: Arguments) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each destination, by its parameter."""

    @abc.abstractmethod
    def expect(self, arguments: Arguments) -> Any:
        """What the reference gives, with what else judging needs of it; `arguments` are as before the call."""

    @abc.abstractmethod
    def compare(self, results: Mapping[str, Tensor], arguments: Arguments, expected: Any) -> Judgement:
        """Compare results with what `expect` returned, without changing it."""

    def concerns(self, of_case: Any, served: Any) -> bool:
        """Whether a case with a problem shows something about the kernel that serves another problem.

        A warm-up runs the quick cases that concern what its kernels will serve. By default all of them do.
        """
        return True

    def judge(self, results: Mapping[str, Tensor], arguments: Arguments) -> Judgement:
        """Compare results with the reference."""
        return self.compare(results, arguments, self.expect(arguments))

    def results(self, returned: Any, destinations: Mapping[str, Tensor], arguments: Arguments) -> dict[str, Tensor]:
        """All that a call gave, by name: its destinations, and what else it returned or wrote."""
        return dict(destinations)

    def returned_for(self, names: Sequence[str], returned: Any) -> dict[str, Tensor]:
        """The results that a call without destinations returned, by the names of the destinations."""
        return dict(zip(names, returned if isinstance(returned, tuple | list) else (returned,), strict=False))

    def later(self, arguments: Arguments) -> Arguments:
        """A later call whose operands have the same shapes and other values: floats in the other order."""
        return each(lambda tensor: turned(tensor) if tensor.is_floating_point() else tensor, arguments)

    def in_place(self, given: Arguments) -> tuple[Arguments, dict[str, Tensor]] | None:
        """A call whose destinations are memory of its operands, and these, if the op allows it; `given` is copies."""
        return None

    def untouched(self, arguments: Arguments) -> dict[str, Tensor]:
        """By parameter, which rows of a destination are not the call's to write: bool, over its first dimensions."""
        return {}

    def pack(self, plan: Any, arguments: Arguments) -> tuple[Arguments, tuple[Packing, ...]] | None:
        """The call with its weights packed by a plan, and each of them; None if the op takes no packed weights."""
        return None


def turned(tensor: Tensor) -> Tensor:
    """The same with its first dimension the other way round, as tensors of float8 cannot be turned."""
    raw = tensor.view(torch.uint8) if tensor.itemsize == 1 and tensor.ndim else tensor
    return raw.flip(0).view(tensor.dtype) if tensor.ndim else tensor


def each(change: Callable[[Tensor], Tensor], arguments: Arguments) -> Arguments:
    """The arguments with every tensor changed, also those in lists."""
    return {
        name: change(value)
        if isinstance(value, Tensor)
        else [change(part) for part in value]
        if isinstance(value, list)
        else value
        for name, value in arguments.items()
    }


def worst(error: Tensor, allowed: Tensor) -> tuple[float, str]:
    """The largest share of an error in what is allowed, and the figures there; NaN counts as infinite."""
    if not error.numel():
        return 0.0, ""
    allowed = allowed.double().expand(error.shape).flatten()
    error = error.double().flatten()
    share = torch.where(error == 0, 0.0, error / allowed).nan_to_num(nan=torch.inf, posinf=torch.inf)
    at = int(share.argmax())
    return float(share[at]), f"off by {float(error[at]):.2g} where {float(allowed[at]):.2g} is allowed"


def same_bits(got: Tensor, want: Tensor) -> tuple[float, str]:
    """The same for results that are exact: infinite with the number of elements that differ, or 0."""
    if got.shape != want.shape or got.dtype is not want.dtype:
        return torch.inf, f"is {got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}"
    differ = bytes_of(got) != bytes_of(want)
    count = int(differ.view(-1, got.itemsize).any(1).sum()) if got.numel() else 0
    return (torch.inf, f"{count} of {got.numel()} elements differ") if count else (0.0, "")


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in a row."""
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # as one element of a row has that was spread
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def joined(*parts: tuple[float, str]) -> tuple[float, str]:
    """The worst of several figures."""
    return max(parts, key=lambda part: part[0])
