"""Weights in the layout of one kernel, with a tag that names it.

A checkpoint's layout suits no kernel in particular. A kernel that reads its weights faster in another order says so
in its record (`layouts`, `packs_to`) and its adapter rearranges them once, when a model is loaded:

    plan = kernelhub.fp4_gemm.prepare(a, b, b_scale=scale, b_global_scale=factor)
    weight = plan.pack(b, scale, factor)
    out = kernelhub.fp4_gemm(a, weight)

The tag is the facet `weight_layout` of the op's problem, so selection decides on it as on everything else: kernels
that read the layout remain, all others are rejected with the code ``layout``. Nothing is ever read as what it is not.

An op that takes packed weights does four things:

1. its problem has ``weight_layout: str = weight_layout()``, and its key holds ``layout_of(weight)``;
2. its argument is ``Tensor | PackedWeight``; what it needs of the weight is in `shape` and `facts`;
3. its plan is a `PackingPlan`, with the weight's arguments in the order of `pack`, made by `prepared`;
4. adapters whose record has `packs_to` are `PackingAdapter`s too.

A kernel that cannot read a checkpoint's weights is selected if the caller promises to pack: with `packing` of
``prepare``, ``explain`` and `kernelhub.warmup`. All of them use the same selection, under one policy.

Packing never changes a value: `unpack` returns the checkpoint's tensors bit for bit. If a kernel's format cannot
represent the weight's values, packing raises `InvalidArgument`.
"""

from __future__ import annotations

import abc
import ast
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.gate import Caller
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.load import LoadFailure
from kernelhub.dispatch.op import Backend, Op, ParsedCall
from kernelhub.dispatch.plan import Plan
from kernelhub.dispatch.problem import CHECKPOINT
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.work import JOURNAL
from kernelhub.errors import InvalidArgument, NoKernel
from kernelhub.ops.arguments import describe

PlanT = TypeVar("PlanT")
Tensors = tuple[Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight with its scales in one kernel's layout; made by a plan's `pack`.

    Attributes:
        layout: tag of the layout, with its version; ``"checkpoint"`` if nothing was moved.
        op: the op that it is a weight of.
        kernel: the kernel that packed it.
        tensors: what the kernel reads, by name; None for what this format lacks.
        shape: of the weight before packing.
        dtype: of the weight before packing.
        facts: what else the op needs of the weight, such as its number format.
        unpacker: gives back the tensors that were packed, in their order.
        description: all but the tensors and the unpacker, in words: see `described`.
    """

    layout: str
    op: str
    kernel: str
    tensors: Mapping[str, Tensor | None]
    shape: tuple[int, ...]
    dtype: torch.dtype
    facts: Mapping[str, Any] = field(default_factory=dict)
    unpacker: Callable[[PackedWeight], Tensors] | None = None
    description: str = field(init=False)  # made once: torch.compile reads it as a constant

    def __post_init__(self) -> None:
        parts = tuple((name, tensor is not None) for name, tensor in self.tensors.items())
        about = (self.layout, self.op, self.kernel, parts, self.shape, self.dtype, dict(self.facts))
        object.__setattr__(self, "description", repr(_literal(about)))

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return next(self._present())[1].device

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return sum(tensor.numel() * tensor.itemsize for _, tensor in self._present())

    def get_device(self) -> int:
        """Index of its GPU, -1 for the CPU, as of a tensor."""
        return next(self._present())[1].get_device()

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same on another device."""
        moved = {name: None if tensor is None else tensor.to(device) for name, tensor in self.tensors.items()}
        about = (self.shape, self.dtype, self.facts, self.unpacker)
        return remembered(PackedWeight(self.layout, self.op, self.kernel, moved, *about))

    def unpack(self) -> Tensors:
        """The arguments of `pack`, bit for bit."""
        return tuple(self.tensors.values()) if self.unpacker is None else self.unpacker(self)

    def parts(self) -> list[Tensor]:
        """The tensors that are present, in their order."""
        return [tensor for _, tensor in self._present()]

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}: {describe(tensor)}" for name, tensor in self._present())
        facts = "".join(f", {name}={value}" for name, value in self.facts.items())
        return (
            f"<PackedWeight {self.layout} of {self.op} by {self.kernel}: "
            f"{str(self.dtype)[6:]} {list(self.shape)}{facts}; {inside}; {self.num_bytes} bytes on {self.device}>"
        )

    def _present(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in self.tensors.items() if tensor is not None)


def described(parts: Sequence[Tensor], description: str) -> PackedWeight:
    """A packed weight of its parts and its description; it cannot be unpacked."""
    layout, op, kernel, names, shape, dtype, facts = _read(description)
    given = iter(parts)
    tensors = {name: next(given) if present else None for name, present in names}
    return PackedWeight(layout, op, kernel, tensors, shape, dtype, facts)


@functools.lru_cache(1024)
def _read(description: str) -> Any:
    return _value(ast.literal_eval(description))


def _literal(value: Any) -> Any:
    """A value of plain types, which Python reads back from its text: a dtype as the set of its name."""
    if isinstance(value, dict):
        return {name: _literal(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_literal, value))
    return {str(value)} if isinstance(value, torch.dtype) else value


def _value(literal: Any) -> Any:
    """The value of a literal."""
    if isinstance(literal, dict):
        return {name: _value(item) for name, item in literal.items()}
    if isinstance(literal, tuple):
        return tuple(map(_value, literal))
    if isinstance(literal, set):
        (name,) = literal
        return getattr(torch, name.removeprefix("torch."))
    return literal


# By device and address, the packed weights that are alive: a launch is given their tensors alone (`packed_at`).
_BY_MEMORY: WeakValueDictionary[tuple[int, int], PackedWeight] = WeakValueDictionary()


def remembered(weight: PackedWeight) -> PackedWeight:
    """The weight, which `packed_at` finds from now on."""
    with contextlib.suppress(RuntimeError):  # tensors without memory, such as those of a trace
        for _, tensor in weight._present():
            if tensor.data_ptr():
                _BY_MEMORY[tensor.get_device(), tensor.data_ptr()] = weight
    return weight


def packed_at(tensor: Tensor) -> PackedWeight | None:
    """The weight that a tensor is the beginning of a part of, if it was packed here and is alive."""
    return _BY_MEMORY.get((tensor.get_device(), tensor.data_ptr()))


def layout_of(weight: Tensor | PackedWeight) -> str:
    """The facet `weight_layout` of a weight."""
    return weight.layout if isinstance(weight, PackedWeight) else CHECKPOINT


@dataclass(frozen=True)
class _Prepared:
    """The parts of a plan: its key, and the selection that determined the key."""

    key: Any
    chosen: Selection[Any] | None


def prepared(
    op: Op[Any],
    parsed: ParsedCall,
    backend: Backend,
    packed: Callable[[Any, str], Any],
    packing: bool,
    make: Callable[[Bound], PlanT],
) -> PlanT:
    """A plan for a weight as in a checkpoint, or for one that is packed already.

    With `packing` all kernels are candidates, including those that need packed weights, and the plan is for the layout
    of the selected kernel. Without it the plan is for the given weight. If only kernels that need packed weights are
    supported, it is for the best of these, so that the caller can pack.

    Args:
        op: the op.
        parsed: how it reads the call.
        backend: the call's ``backend=``.
        packed: key and tag -> the key with that layout.
        packing: the caller packs weights as in a checkpoint with the plan's `pack` before it runs.
        make: returns the plan of a bound selection. It raises `InvalidArgument` if `packing`, and the kernel's format
            cannot represent this weight: then the next best is selected, unless the user requests the kernel.

    Raises:
        NoKernel: no kernel can run this; of those that only trust keeps back, the commands that verify them are named.
    """
    refused: dict[str, tuple[Rejection, ...]] = {}
    while True:
        found = _key_to_prepare(op, parsed, backend, packed, packing, refused)
        try:
            return make(op.bound_for(found.key, parsed.device, backend))
        except NoKernel:
            if found.chosen is None or _key_to_prepare(op, parsed, backend, packed, packing, refused).key == found.key:
                raise
            # The kernel could not be loaded, which is recorded: the next one is selected.
        except InvalidArgument as error:
            if found.chosen is None or not packing or found.chosen.explicit or op.policy(backend).strict:
                raise
            name = found.chosen.selected
            assert name is not None
            failure = LoadFailure("layout", f"it cannot pack this weight: {error}", f"disable={name!r}")
            refused[name] = (Rejection(failure.code, failure.reason, failure.remedy),)
            HUB.add_fallback(op.contract.name, name, failure)


def _key_to_prepare(
    op: Op[Any],
    parsed: ParsedCall,
    backend: Backend,
    packed: Callable[[Any, str], Any],
    packing: bool,
    refused: Mapping[str, tuple[Rejection, ...]],
) -> _Prepared:
    """The key of a plan: the call's own, or that of the layout of the selected kernel."""
    key, problem_of = parsed.key, op.contract.problem_of
    problem = problem_of(key, parsed.device)
    as_given = _Prepared(key, None)
    if problem.weight_layout != CHECKPOINT or (not packing and op.select(problem, backend).kernel is not None):
        return as_given
    selection = op.select(problem, backend, packing=True, barred=refused)
    kernel = selection.kernel
    if kernel is None:
        raise op.no_kernel(selection, backend)
    if not kernel.packs_to:
        return as_given
    other = packed(key, kernel.packs_to)
    if kernel.needs_packing or op.select(problem_of(other, parsed.device), backend).kernel is kernel:
        return _Prepared(other, selection)
    return as_given


class PackingAdapter(abc.ABC):
    """A further base class of adapters whose record has `packs_to`."""

    @abc.abstractmethod
    def pack(self, *weight: Tensor | None) -> tuple[dict[str, Tensor | None], Callable[[PackedWeight], Tensors]]:
        """The tensors in the layout `packs_to`, by name, and a module's function that gives back the arguments."""

    def check_holds(self, *weight: Tensor | None) -> None:  # noqa: B027, most layouts hold every number
        """Look whether the layout holds a weight's numbers, without packing it.

        Raises:
            InvalidArgument: it does not, as `pack` would say.
        """


class PackingPlan(Plan):
    """A plan of an op with weights, which can be packed for its kernel."""

    __slots__ = ()

    @property
    def layout(self) -> str:
        """Tag of the layout that `pack` gives; ``"checkpoint"`` if the kernel packs nothing."""
        assert self.selection.kernel is not None
        return self.selection.kernel.packs_to or CHECKPOINT

    @property
    def needs_packing(self) -> bool:
        """Whether the kernel cannot read weights in the layout of checkpoints."""
        assert self.selection.kernel is not None
        return self.selection.kernel.needs_packing

    def check_packs(self, *weight: Tensor | None) -> None:
        """Raise what `pack` would, if the kernel's format does not hold the weight's numbers."""
        if self.layout != CHECKPOINT:
            self.adapter.check_holds(*weight)

    def _pack(self, weight: Mapping[str, Tensor | None], facts: Mapping[str, Any]) -> PackedWeight:
        """What a subclass's `pack` returns, once it has checked the arguments; the weight itself comes first."""
        first = next(iter(weight.values()))
        assert first is not None
        about = (tuple(first.shape), first.dtype, dict(facts))
        if self.layout == CHECKPOINT:
            return PackedWeight(CHECKPOINT, self.selection.op, self.kernel, dict(weight), *about)
        caller = Caller(self.selection.op, self.kernel, self.selection.problem, None, sys._getframe(), self.bound)
        with JOURNAL.doing("pack", f"a weight as {self.layout}", self.kernel, caller=caller):
            tensors, unpacker = self.adapter.pack(*weight.values())
        return remembered(PackedWeight(self.layout, self.selection.op, self.kernel, tensors, *about, unpacker))
