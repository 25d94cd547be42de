"""A problem written as flags: one for each facet that the op declares, with the op's text as help."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import Facet, shown
from kernelhub.dispatch.settings import did_you_mean
from kernelhub.errors import ConfigurationError
from kernelhub.ops.records import OPS

_PREFIX = "facet_"  # separates a facet from an option of the same name in argparse's namespace


def ops() -> dict[str, OpRecord[Any]]:
    """The record of every op by name. Unlike the hub, it needs no valid settings."""
    return {record.name: record for record in OPS}


def op_named(name: str) -> OpRecord[Any]:
    """The record of the op of that name, for argparse.

    Raises:
        ArgumentTypeError: no op has this name; the message suggests the nearest.
    """
    known = ops()
    if name not in known:
        raise argparse.ArgumentTypeError(f"{name!r} is not an op{did_you_mean(name, known)}; ops: {', '.join(known)}")
    return known[name]


def add_facets(parser: argparse.ArgumentParser, contract: OpRecord[Any]) -> None:
    """Flags for every facet of the op but its device."""
    group = parser.add_argument_group(f"facets of {contract.name}")
    usual = defaults(contract)
    for facet in _facets(contract):
        text = facet.doc.replace("%", "%%")
        if facet.name in usual:
            text += f" (default: {shown(usual[facet.name])})"
        flag, where = f"--{facet.name.replace('_', '-')}", f"{_PREFIX}{facet.name}"
        if facet.semantic and facet.values == (True,):
            group.add_argument(
                flag, dest=where, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            group.add_argument(
                flag, dest=where, type=_parse(facet), metavar=_metavar(facet), default=argparse.SUPPRESS, help=text
            )


def given(arguments: argparse.Namespace, contract: OpRecord[Any]) -> dict[str, Any]:
    """The given facets, by name."""
    said = vars(arguments)
    return {facet.name: said[_PREFIX + facet.name] for facet in _facets(contract) if _PREFIX + facet.name in said}


def from_words(words: Sequence[str], contract: OpRecord[Any]) -> dict[str, Any]:
    """Facets written as ``name=value``, several of them with commas between.

    Raises:
        ConfigurationError: a name is not a facet of the op, or a word is not a pair.
    """
    known, said = {facet.name: facet for facet in _facets(contract)}, {}
    for pair in (part for word in words for part in word.split(",") if part):
        name, equals, text = pair.partition("=")
        if name not in known or not equals:
            raise ConfigurationError(
                f"--shape: {pair!r} is not a FACET=VALUE of {contract.name}{did_you_mean(name, known)}; its facets are "
                f"{', '.join(known)}"
            )
        try:
            value = _parse(known[name])(text)
        except ValueError:
            raise ConfigurationError(f"--shape: {name} is {text!r}; write a number") from None
        said[name] = {"True": True, "true": True, "False": False, "false": False}.get(text, value)
    return said


def defaults(contract: OpRecord[Any]) -> dict[str, Any]:
    """The default facets of a problem; facets without a default are left out."""
    fields = dataclasses.fields(contract.problem)
    return {item.name: item.default for item in fields if item.default is not dataclasses.MISSING}


def _facets(contract: OpRecord[Any]) -> list[Facet]:
    return [facet for facet in contract.schema.facets.values() if facet.name != "device"]


def _parse(facet: Facet) -> Callable[[str], Any]:
    """Text to value. `explain` checks whether the op accepts it."""
    if facet.semantic:
        words = {shown(value): value for value in (facet.neutral, *facet.values)}
        return lambda text: words.get(text, text)
    return int if facet.annotation == "int" else str


def _metavar(facet: Facet) -> str:
    if facet.semantic:
        return "{" + ",".join(shown(value) for value in (facet.neutral, *facet.values)) + "}"
    return "N" if facet.annotation == "int" else "DTYPE" if facet.name.endswith("dtype") else "WORD"
