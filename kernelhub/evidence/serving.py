"""Serving calls as cases: a problem class at the real sizes of a model, with new values each time."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernelhub.evidence.results import SERVING
from kernelhub.ops.case import Arguments, Case
from kernelhub.ops.models.calls import calls_of, counts_of
from kernelhub.ops.models.problems import Need

_PLAIN = ("tokens", "context_len", "seed", "repeats", "scale_bits")
_MOST_SEEDS = 1 << 30
_MOST_SIZES = 6  # token counts of one kind of call: the smallest, the largest, and some between
_MOST_OF_ALL = 12  # of all kinds of call together, without the smallest and the largest of each


@dataclass(frozen=True)
class ServingCall:
    """One call of a problem class, as plain values from which any process creates the same tensors.

    Attributes:
        need: the problem class, with one kind of sizes.
        tokens: new tokens.
        context_len: tokens of a sequence in a paged cache.
        seed: seed of the values.
        repeats: whether it is repeated in other memory and with other values.
        scale_bits: significant bits of scales, as of `calls_of`.
    """

    need: Need
    tokens: int
    context_len: int
    seed: int
    repeats: bool = False
    scale_bits: int | None = None

    @property
    def label(self) -> str:
        sizes = "".join(f", {name} {value}" for kind in self.need.sizes for name, value in kind)
        again = ", repeated in other memory" if self.repeats else ""
        bits = "" if self.scale_bits is None else f", scales of {self.scale_bits} bits"
        return f"{mark_of(self.need)}: {self.tokens} tokens{sizes}, seed {self.seed}{bits}{again}"

    def make(self, device: torch.device) -> Arguments:
        """The call's arguments."""
        said: dict[str, Any] = {"context_len": self.context_len, "seed": self.seed, "scale_bits": self.scale_bits}
        return next(calls_of(self.need, [self.tokens], device, **said)).arguments

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"need": self.need.to_dict(), **{name: getattr(self, name) for name in _PLAIN}}

    def case(self) -> Case:
        """The call as a case."""
        return Case(label=self.label, make=self.make, repeats=self.repeats, packs=self.repeats, serving=self.to_dict())


def mark_of(need: Need) -> str:
    """The prefix of labels of a problem class's calls, the same in every process."""
    text = repr((need.op, sorted(need.facets)))
    return f"{SERVING} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def serving_case(plain: Mapping[str, Any]) -> Case:
    """The case from `ServingCall.to_dict`."""
    return ServingCall(Need.from_dict(plain["need"]), **{name: plain[name] for name in _PLAIN}).case()


def other_class(case: Case, problem: Any) -> str:
    """How the problem of a serving call differs from the class that it is to show, as a sentence; empty if it does not.

    A kernel that is verified by calls of another class would be trusted for one that it never ran.
    """
    if case.serving is None:
        return ""
    meant = Need.from_dict(case.serving["need"]).facets
    differs = [
        f"{name} {getattr(problem, name)} for {value}" for name, value in meant if getattr(problem, name) != value
    ]
    return f"its call has {', '.join(differs)}: kernelhub makes no calls of this class" if differs else ""


def serving_calls(
    need: Need, tokens: Sequence[int], context_len: int, most_sizes: int = _MOST_SIZES
) -> list[ServingCall]:
    """Calls of a problem class for checks of a kernel against its reference.

    Sizes are the smallest and the largest of `tokens`, and some between, in random order and with random values. The
    smallest is repeated at the end, so that stale state of the others shows; that call is also repeated in other
    memory.

    Args:
        need: the problem class.
        tokens: token counts of serving; those without a call of the class are left out.
        context_len: tokens of a sequence in a paged cache.
        most_sizes: most token counts of each kind of call; fewer if there are many kinds, but at least two.
    """
    draw = random.Random()
    found: list[ServingCall] = []
    kinds = need.sizes or ((),)
    most_sizes = min(most_sizes, max(2, _MOST_OF_ALL // len(kinds)))
    for kind in kinds:
        one = replace(need, sizes=(kind,) if kind else ())
        sizes = _spread(sorted(counts_of(one, tokens)), most_sizes, draw)
        made = [ServingCall(one, size, context_len, draw.randrange(_MOST_SEEDS)) for size in sizes]
        draw.shuffle(made)
        if made:
            last = ServingCall(one, sizes[0], context_len, draw.randrange(_MOST_SEEDS), repeats=True)
            found += [*made, last]
    return found


def _spread(sizes: Sequence[int], most: int, draw: random.Random) -> list[int]:
    """The smallest, the largest, and random ones between."""
    if len(sizes) <= most:
        return list(sizes)
    return sorted([sizes[0], sizes[-1], *draw.sample(sizes[1:-1], most - 2)])
