"""An environment, translated: each variable of another project that is set, and what kernelhub makes of it."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kernelhub.compat.env.attention import ATTENTION
from kernelhub.compat.env.experts import EXPERTS
from kernelhub.compat.env.gemm import GEMM
from kernelhub.compat.env.libraries import LIBRARIES
from kernelhub.compat.env.successors import LOOK_ALIKES, SUCCESSORS
from kernelhub.compat.env.variable import VLLM, EngineVariable, Meaning
from kernelhub.dispatch.policy import FOREIGN, Layer, Override
from kernelhub.dispatch.settings import parse_bool

IGNORE = "KERNELHUB_IGNORE_VLLM_ENV"
VARIABLES = {variable.name: variable for variable in (*ATTENTION, *GEMM, *EXPERTS, *LIBRARIES)}

_PREFIXES = ("VLLM_", "FLASHINFER_", "DG_", "FORCE_NUM_")
_NEAR = 0.85  # likeness from which a name is taken for a misspelt one: one letter in seven may differ

logger = logging.getLogger("kernelhub.env")
_warned: set[str] = set()


@dataclass(frozen=True)
class Translation:
    """One variable that is set, and what became of it.

    Attributes:
        name: full name.
        text: its value.
        owner: the project whose variable it is, or seems to be.
        says: what follows from it here, as a sentence; empty if it is wrong.
        successor: what the project's present version takes in its place; empty if it still reads it.
        problem: what is wrong with it; empty if nothing is.
        meaning: its overrides, with their place filled in.
    """

    name: str
    text: str
    owner: str
    says: str = ""
    successor: str = ""
    problem: str = ""
    meaning: Meaning = Meaning("")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {name: getattr(self, name) for name in ("name", "text", "owner", "says", "successor", "problem")} | {
            "overrides": [{"op": override.ops, "names": list(override.names)} for override in self.meaning.overrides]
        }


def translate(environ: Mapping[str, str] | None = None) -> tuple[Translation, ...]:
    """Every variable of another project that is set and is about kernels, by name."""
    environ = os.environ if environ is None else environ
    return tuple(found for name in sorted(environ) if (found := _translation(name, environ[name])) is not None)


def said(environ: Mapping[str, str]) -> Layer:
    """The policy in an environment; of what is wrong in it kernelhub warns once, and it says nothing."""
    translations = translate(environ)
    for item in translations:
        if item.problem and item.owner == VLLM and item.name not in _warned:
            _warned.add(item.name)
            logger.warning("%s=%s is not obeyed: %s", item.name, item.text, item.problem)
    meanings = [item.meaning for item in translations]
    return Layer(
        requests=_all(meaning.requests for meaning in meanings),
        prefers=_all(meaning.prefers for meaning in meanings),
        disables=_all(meaning.disables for meaning in meanings),
        batch_invariant=next(
            (meaning.batch_invariant for meaning in meanings if meaning.batch_invariant is not None), None
        ),
    )


def flag(name: str, default: bool) -> bool:
    """A switch of vLLM's as it was when the settings were read; its default where it is unset, wrong or not obeyed."""
    from kernelhub.dispatch.hub import HUB  # reads this module while it reads its settings

    if HUB.settings[IGNORE]:
        return default
    try:
        text = HUB.machine.variable(name)
        return parse_bool(text) if text else default
    except ValueError:
        return default


def _translation(name: str, text: str) -> Translation | None:
    variable = VARIABLES.get(name)
    if variable is not None:
        return _read(variable, text)
    if name in SUCCESSORS:
        owner, successor = SUCCESSORS[name]
        problem = f"{owner} reads it no longer, and kernelhub does not; write {successor}"
        return Translation(name, text, owner, successor=successor, problem=problem)
    if not name.startswith(_PREFIXES) or name in LOOK_ALIKES:
        return None
    near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=_NEAR)
    if not near:
        return None
    return Translation(
        name, text, VARIABLES[near[0]].owner, problem=f"nobody reads a variable of that name; did you mean {near[0]}?"
    )


def _read(variable: EngineVariable, text: str) -> Translation:
    try:
        meaning = variable.read(text)
    except ValueError as error:
        problem = f"{error}; write {variable.grammar}"
        return Translation(variable.name, text, variable.owner, successor=variable.successor, problem=problem)
    origin = f"{variable.name}={text}"
    undo = f"unset {variable.name}, or set {IGNORE}=1"

    def placed(overrides: tuple[Override, ...]) -> tuple[Override, ...]:
        return tuple(replace(override, source=FOREIGN, origin=origin, undo=undo) for override in overrides)

    meaning = replace(
        meaning,
        requests=placed(meaning.requests),
        prefers=placed(meaning.prefers),
        disables=placed(meaning.disables),
    )
    return Translation(variable.name, text, variable.owner, meaning.says, variable.successor, meaning=meaning)


def _all(groups: Iterable[tuple[Override, ...]]) -> tuple[Override, ...]:
    return tuple(override for group in groups for override in group)
