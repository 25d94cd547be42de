"""Calls through a plan, and through a step of a plan: right ones in odd memory, and wrong ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.hub import HUB
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.poison import copied
from tests.fuzz.bases import DEFAULT, Base
from tests.fuzz.memory import place
from tests.fuzz.operands import Arguments, tensors_of
from tests.fuzz.outcome import ParsedCall

Vary = Callable[[str, Base, Random], ParsedCall | None]
# Ops with steps, and what their `step.run` takes.
_OPERANDS = {
    "attention": ("q", "k", "v"),
    "paged_attention": ("q", "k_cache", "v_cache"),
    "mla_attention": ("q", "kv_cache", "topk_indices"),
}


def through_plan(vary: Vary, kernel: str) -> Vary:
    """A varied call that runs through a plan, which was prepared with the call as it was."""

    def varied(op: str, base: Base, random: Random) -> ParsedCall | None:
        asked = vary(op, base, random)
        if asked is not None:
            plan = _plan(op, base.arguments if asked.partners else asked.judged, kernel)
            kept = {*plan.weights} - {*plan.call.split(", ")}
            names = {*inspect.signature(plan.run).parameters} - kept
            if asked.partners and not names & {*asked.varied}:
                return None  # the plan holds what is varied
            asked.call = lambda **given: plan.run(**{name: given[name] for name in given if name in names})
            asked.note = f"plan.run, {asked.note}"
        return asked

    return varied


def through_step(vary: Vary, kernel: str) -> Vary:
    """The same through a step, begun with the metadata as they are in the varied call."""

    def varied(op: str, base: Base, random: Random) -> ParsedCall | None:
        asked = vary(op, base, random) if op in _OPERANDS else None
        if asked is not None:
            on_host = random.random() < 0.5
            begun = base.arguments if asked.partners else asked.judged
            asked.call = lambda **given: _step(op, begun, given, kernel, on_host)
            if asked.partners and not {*_OPERANDS[op], *CASES[op].destinations(base.arguments)} & {*asked.varied}:
                return None
            asked.note = f"step.run, {asked.note}"
        return asked

    return varied


def _plan(op: str, arguments: Arguments, kernel: str) -> Any:
    how = {} if kernel == DEFAULT else {"backend": kernel}
    return HUB.function(op).prepare(**copied(arguments), **how)


def _step(op: str, arguments: Arguments, given: Arguments, kernel: str, on_host: bool) -> Any:
    plan = _plan(op, arguments, kernel)
    begins = inspect.signature(plan.begin).parameters
    meta = {name: given[name] for name in given if name in begins}
    if on_host:
        for name in ("seq_lens", "cu_seqlens_q", "cu_seqlens_k"):
            if isinstance(meta.get(name), Tensor) and f"{name}_cpu" in begins:
                meta[f"{name}_cpu"] = meta[name].tolist()
    step = plan.begin(**meta)
    names = inspect.signature(step.run).parameters
    return step.run(**{name: given[name] for name in given if name in names})


def other_sizes(op: str, base: Base, random: Random) -> ParsedCall | None:
    """An operand or a destination has other rows, another width, dtype or device than those before it."""
    given = copied(base.arguments)
    wanted = CASES[op].destinations(base.arguments)
    names = [name for name, tensor in tensors_of(given).items() if "[" not in name and tensor.ndim and tensor.numel()]
    names = [name for name in names if name not in ("block_table", "seq_lens", "cu_seqlens_q", "cu_seqlens_k")]
    if not names and not wanted:
        return None
    name = random.choice([*names, *wanted] if random.random() < 0.5 or not wanted else list(wanted))
    if name in wanted:
        shape, dtype = wanted[name]
        tensor = torch.empty(shape, dtype=dtype, device=next(iter(tensors_of(given).values())).device)
    else:
        tensor = given[name]
    label, other = _otherwise(tensor, random)
    if other is None:
        return None
    asked = ParsedCall(base.arguments, given | {name: other}, {}, [], (name,), f"{name} {label}")
    if other.device.type != "meta" and other.numel():
        placed = place(other)  # what is written past it is seen
        asked.given[name] = placed.tensor
        asked.around = [placed]
    in_place = copied(asked.given) if CASES[op].written and not other.is_meta else asked.given  # as before the call
    asked.judged = base.arguments if name in wanted else in_place
    asked.written = (name,) if name in wanted else ()
    asked.must_refuse = name in wanted or other.is_meta
    asked.partners = True
    return asked


def _otherwise(tensor: Tensor, random: Random) -> tuple[str, Tensor | None]:
    raw = tensor.view(torch.uint8) if tensor.itemsize == 1 and tensor.ndim else tensor
    kind = random.choice(("fewer rows", "more rows", "narrower", "wider", "dtype", "meta", "one more dimension"))
    if not raw.ndim or not raw.numel():
        return kind, None
    if kind == "fewer rows":
        return f"has {len(raw) - 1} rows for {len(raw)}", raw[: len(raw) - 1].clone().view(tensor.dtype)
    if kind == "more rows":
        return f"has {len(raw) + 1} rows for {len(raw)}", torch.cat([raw, raw[:1]]).view(tensor.dtype)
    if kind in ("narrower", "wider") and raw.ndim > 1:
        if kind == "narrower":
            return "is narrower by one", raw[..., :-1].clone().view(tensor.dtype)
        return "is wider by one", torch.cat([raw, raw[..., :1]], -1).view(tensor.dtype)
    if kind == "dtype":
        dtype = random.choice([d for d in (torch.float32, torch.float16, torch.bfloat16) if d is not tensor.dtype])
        return f"is {str(dtype)[6:]}", tensor.float().nan_to_num().to(dtype)
    if kind == "one more dimension":
        return "has one more dimension", tensor[None]
    return "is on meta", tensor.to("meta")


def packed(vary: Vary, kernel: str) -> Vary:
    """A varied call whose weight is packed for the kernel beforehand; what of it is varied is packed no more."""

    def varied(op: str, base: Base, random: Random) -> ParsedCall | None:
        _ = HUB.settings  # loads the records
        packs = [record.name for record in HUB.registry.candidates(op).kernels if record.packs_to]
        if kernel not in packs:
            return None
        asked = vary(op, base, random)
        if asked is None:
            return None
        made = CASES[op].pack(_plan(op, asked.judged, kernel), copied(asked.judged))
        if made is None:
            return None
        with_weight, _ = made
        rest = {name: value for name, value in asked.given.items() if name in with_weight}
        asked.given = rest | {"b": with_weight["b"]}
        asked.note = f"packed, {asked.note}"
        return asked

    return varied
