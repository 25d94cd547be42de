"""How a right call is varied: one function for each kind, which gives a call to make, or None if it cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from torch import Tensor

from kernelhub.evidence.cases import CASES
from kernelhub.evidence.poison import copied, poisoned
from kernelhub.ops.case import bytes_of
from tests.fuzz.bases import Base
from tests.fuzz.garbage import garbage
from tests.fuzz.memory import LAYOUTS, Placed, dense, place, spread
from tests.fuzz.metadata import metadata
from tests.fuzz.operands import Arguments, replaced, tensors_of
from tests.fuzz.outcome import ParsedCall
from tests.fuzz.plans import other_sizes, packed, through_plan, through_step
from tests.fuzz.wrong import wrong

Kind = Callable[[str, Base, Random], ParsedCall | None]
ThroughKernel = Callable[[Kind, str], Kind]


def plain(op: str, base: Base, random: Random) -> ParsedCall | None:
    """The call as it is."""
    return ParsedCall(base.arguments, copied(base.arguments), _places(op, base.arguments, random))


def _laid_out(kind: str) -> Kind:
    def varied(op: str, base: Base, random: Random) -> ParsedCall | None:
        tensors = tensors_of(base.arguments)
        given, placed = dict(base.arguments), {}
        for name in _some(list(tensors), random):
            layout = LAYOUTS[kind if kind != "mixed" else random.choice(list(LAYOUTS))]
            made = layout(tensors[name], random)
            if made is not None:
                placed[name] = made
                given = replaced(given, name, made.tensor)
        if not placed:
            return None
        rest = {name: value for name, value in copied(base.arguments).items() if given[name] is base.arguments[name]}
        watched = [part for name, part in placed.items() if name not in CASES[op].written]
        note = f"{kind}: {', '.join(f'{name} {list(part.tensor.stride())}' for name, part in placed.items())}"
        places = _places(op, base.arguments, random)
        return ParsedCall(base.arguments, given | rest, places, watched, tuple(placed), note)

    return varied


def expanded(op: str, base: Base, random: Random) -> ParsedCall | None:
    """Operands with strides of zero, whose values are those of their first slice.

    Not of several the columns: the terms of a product were equal, and tolerances are for errors of random sign.
    """
    tensors = tensors_of(base.arguments)
    fit = [name for name, tensor in tensors.items() if tensor.is_floating_point() or name in _MAY_REPEAT]
    fit = [name for name in fit if name not in CASES[op].written and tensors[name].numel() > 1]
    fit = [name for name in fit if not name.startswith("lses") and not _has_nan(tensors[name])]
    given, judged, placed = copied(base.arguments), dict(base.arguments), {}
    for name in _some(fit, random):
        of_columns = any(part.tensor.stride(-1) == 0 for part in placed.values())
        made = spread(tensors[name], random, columns=not of_columns)
        if made is not None:
            placed[name] = made
            given = replaced(given, name, made.tensor)
            raw = made.tensor.view(torch.uint8) if made.tensor.itemsize == 1 else made.tensor
            judged = replaced(judged, name, raw.contiguous().view(made.tensor.dtype))
    if not placed:
        return None
    note = f"strides of zero: {', '.join(f'{name} {list(part.tensor.stride())}' for name, part in placed.items())}"
    return ParsedCall(judged, given, _places(op, judged, random), list(placed.values()), tuple(placed), note)


_MAY_REPEAT = ("expert_map",)


def _has_nan(tensor: Tensor) -> bool:
    """Whether some element is no number, beside which others may not take its place."""
    return bool((tensor.view(torch.uint8) & 0x7F == 0x7F).any() if tensor.itemsize == 1 else tensor.isnan().any())


def destinations(op: str, base: Base, random: Random) -> ParsedCall | None:
    """Destinations in odd memory."""
    wanted = CASES[op].destinations(base.arguments)
    if not wanted:
        return None
    places, notes, odd = {}, [], False
    for name, (shape, dtype) in wanted.items():
        fresh = poisoned(name, shape, dtype, _device(base.arguments)).body.view(dtype).view(shape)
        kind = random.choice(list(LAYOUTS))
        made = LAYOUTS[kind](fresh, random)
        odd |= made is not None
        places[name] = made or place(fresh)
        notes.append(f"{name} {kind} {list(places[name].tensor.stride())}")
    if not odd:
        return None
    return ParsedCall(base.arguments, copied(base.arguments), places, [], tuple(wanted), ", ".join(notes))


def aliased(op: str, base: Base, random: Random) -> ParsedCall | None:
    """A destination that shares memory with an operand, or with itself: refused, or right."""
    wanted = CASES[op].destinations(base.arguments)
    if not wanted:
        return None
    target = random.choice(list(wanted))
    shape, dtype = wanted[target]
    fresh = poisoned(target, shape, dtype, _device(base.arguments)).body.view(dtype).view(shape)
    given = copied(base.arguments)
    if random.random() < 0.25:
        made = spread(fresh, random) if random.random() < 0.5 else _self_overlapping(fresh)
        if made is None:
            return None
        asked = ParsedCall(base.arguments, given, {}, [], (target,), f"{target} overlaps itself {made.tensor.stride()}")
        asked.given = given | {target: made.tensor}
        asked.must_refuse = bool(fresh.numel())
        return asked
    tensors = {name: tensor for name, tensor in tensors_of(base.arguments).items() if tensor.numel()}
    if not tensors or not fresh.numel():
        return None
    name = random.choice(list(tensors))
    operand = tensors[name]
    whole, other = fresh.numel() * dtype.itemsize, operand.numel() * operand.itemsize
    step = 16 if random.random() < 0.7 else max(dtype.itemsize, operand.itemsize)
    shift = 0 if random.random() < 0.4 else random.randrange(0, max(min(whole, other), step), step)
    memory = torch.zeros(whole + other + shift + 64, dtype=torch.uint8, device=operand.device)
    first, second = (0, shift) if random.random() < 0.5 else (shift, 0)
    if second % dtype.itemsize or first % operand.itemsize:
        return None
    out = memory[second : second + whole].view(dtype).view(shape)
    inside = memory[first : first + other].view(operand.dtype).view(operand.shape)
    memory[first : first + other].copy_(bytes_of(operand))
    given = replaced(given, name, inside) | {target: out}
    note = f"{target} lies {second - first} bytes past {name}, in its memory"
    asked = ParsedCall(base.arguments, given, {}, [], (target, name), note)
    asked.written = (target, name.partition("[")[0])
    return asked


def _self_overlapping(fresh: Tensor) -> Placed | None:
    """Rows that begin before the one before ends."""
    if not fresh.numel() or fresh.ndim < 2 or fresh.shape[-1] < 2 or fresh.shape[-2] < 2:
        return None
    strides = list(dense(fresh.shape))
    strides[-2] = 1
    made = place(fresh.reshape(-1)[:1])
    memory = torch.zeros(fresh.numel() * fresh.itemsize + 64, dtype=torch.uint8, device=fresh.device)
    return Placed(memory.view(fresh.dtype).as_strided(fresh.shape, strides), made.memory, made.before)


def bits(op: str, base: Base, random: Random) -> ParsedCall | None:
    """Operands with the negative bit set, as the imaginary part of a conjugate has it."""
    tensors = tensors_of(base.arguments)
    fit = [name for name, tensor in tensors.items() if tensor.dtype in _NEGATED and tensor.numel()]
    fit = [name for name in fit if name not in CASES[op].written]
    if not fit:
        return None
    given, chosen = copied(base.arguments), _some(fit, random)
    for name in chosen:
        tensor = tensors_of(given)[name]
        # `torch._neg_view` would make contiguous ones, and is private.
        part = torch.complex32 if tensor.dtype is torch.float16 else torch.complex64
        pairs = torch.stack((torch.zeros_like(tensor), -tensor), -1).contiguous()
        given = replaced(given, name, pairs.view(part).squeeze(-1).conj().imag)
    note = f"negative bit: {', '.join(chosen)}"
    return ParsedCall(base.arguments, given, _places(op, base.arguments, random), [], tuple(chosen), note)


_NEGATED = (torch.float32, torch.float16)  # there are no complex numbers of bfloat16


def context(op: str, base: Base, random: Random) -> ParsedCall | None:
    """Under autocast, another precision, another default dtype; in inference mode; with Parameters."""
    name = random.choice(list(_CONTEXTS))
    given = copied(base.arguments)
    places = _places(op, base.arguments, random)
    if name == "parameters":
        for operand, tensor in tensors_of(given).items():
            if tensor.is_floating_point() and operand not in CASES[op].written:
                given = replaced(given, operand, torch.nn.Parameter(tensor, requires_grad=random.random() < 0.3))
    elif name == "tensors of inference mode":
        with torch.inference_mode():
            given = copied(base.arguments)
    device = _device(base.arguments).type
    return ParsedCall(base.arguments, given, places, [], (), name, lambda: _CONTEXTS[name](device))


@contextlib.contextmanager
def _precision(device: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def _default_dtype(device: str) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _deterministic(device: str) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


_CONTEXTS: dict[str, Callable[[str], Any]] = {
    "autocast to bfloat16": lambda device: torch.autocast(device, torch.bfloat16),
    "autocast to float16": lambda device: torch.autocast(device, torch.float16),
    "medium precision": _precision,
    "default dtype float64": _default_dtype,
    "default device meta": lambda device: torch.device("meta"),
    "deterministic algorithms": _deterministic,
    "inference mode": lambda device: torch.inference_mode(),
    "tensors of inference mode": lambda device: contextlib.nullcontext(),
    "parameters": lambda device: torch.no_grad(),
}


def unused(op: str, base: Base, random: Random) -> ParsedCall | None:
    """Garbage in all that the contract calls unused."""
    made = garbage(op, base.arguments, random)
    if made is None:
        return None
    judged, given, note = made
    return ParsedCall(judged, copied(given), _places(op, judged, random), [], (), note)


def _places(op: str, arguments: Arguments, random: Random) -> dict[str, Placed]:
    """Poisoned destinations between guards; now and then none."""
    if random.random() < 0.3:
        return {}
    places = {}
    for name, (shape, dtype) in CASES[op].destinations(arguments).items():
        places[name] = place(poisoned(name, shape, dtype, _device(arguments)).body.view(dtype).view(shape))
    return places


def _device(arguments: Arguments) -> torch.device:
    return next(iter(tensors_of(arguments).values())).device


def _some(names: list[str], random: Random) -> list[str]:
    """One of them most of the time, now and then several or all."""
    if not names:
        return []
    if random.random() < 0.65:
        return [random.choice(names)]
    return names if random.random() < 0.5 else random.sample(names, random.randint(1, len(names)))


KINDS: dict[str, Kind] = {
    "base": plain,
    "garbage": unused,
    **{name: _laid_out(name) for name in (*LAYOUTS, "mixed")},
    "zero": expanded,
    "out": destinations,
    "alias": aliased,
    "bits": bits,
    "context": context,
    "wrong": wrong,
    "metadata": metadata,
}
RIGHT = ("base", "garbage", *LAYOUTS, "mixed", "zero", "out", "bits")
# Kinds that need to know the kernel: what is varied, and how it is called.
THROUGH: dict[str, tuple[tuple[Kind, ...], ThroughKernel]] = {
    "plan": (tuple(KINDS[name] for name in RIGHT), through_plan),
    "plan_sizes": ((other_sizes,), through_plan),
    "step": (tuple(KINDS[name] for name in RIGHT), through_step),
    "step_sizes": ((other_sizes,), through_step),
    "packed": (tuple(KINDS[name] for name in RIGHT), packed),
}
NAMES = (*KINDS, *THROUGH)


def varied(kind: str, op: str, kernel: str, base: Base, random: Random) -> ParsedCall | None:
    """A call varied so, or None where it cannot be."""
    if kind in KINDS:
        return KINDS[kind](op, base, random)
    several, through = THROUGH[kind]
    return through(random.choice(several), kernel)(op, base, random)
